"""Decide which agent hosts the coordination store, where it listens, and which address a node publishes.

- **HOST-1** The setting ``is_host`` decides. Without it, an agent may host the store if the endpoint is a
  loopback name, or a name or address of this machine. The first agent on this machine takes the port; later
  ones become clients.
- **HOST-2** If the endpoint is a loopback name and the job has one node, the store listens on loopback only.
  Otherwise it listens on ``bind_addr`` or all interfaces: a host's own name may resolve to 127.0.1.1 on that
  host only, and a loopback name may be the endpoint on the hosting node only.
- **HOST-3** An unknown name in the endpoint is no error at first, because a container's name may appear late,
  or refer to an earlier container. The agent retries as a client, and decides again if no store answers.
- **ADDR-1** A node publishes the user's address (rank 0 of ``static``: the endpoint's host, as in torch), or
  the local address of its connection to the store. Torch publishes its full host name instead, which other
  nodes may be unable to resolve.
- **ADDR-2** If that local address is loopback, a node publishes the endpoint's host. If that is loopback too,
  the node publishes the address of its own name, or the address that the kernel uses for other networks.
- **ADDR-3** Agents share a loopback interface if their kernel's boot id and network namespace are the same.
  Containers and cloned machines may have the same host name.
"""

from __future__ import annotations

import _socket
import errno
import os

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.transport.addresses import (
    is_loopback,
    is_loopback_name,
    is_unspecified,
    is_usable_elsewhere,
    packed,
    plain,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import KW_ONLY

    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous


ANY_ADDRESS = ("::", "0.0.0.0")
ANY_PORT = (("127.0.0.1", 0),)
"""Address of a store that only this agent uses: a free port on loopback."""

_LOOPBACK = ("127.0.0.1", "::1")
_ELSEWHERE = ((_socket.AF_INET, "192.0.2.1"), (_socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation, which no machine has. The route to them shows this machine's own address."""


class Hosting(Value):
    """Decision on whether this agent hosts the coordination store.

    Args:
        listen: numeric addresses and ports; empty for a client. ``"::"`` includes IPv4.
        is_explicit: true if the user decided. If the port is taken, the agent then does not become a client.
        trouble: why the endpoint's name could not be resolved, if it could not.
        doubt: warning to the user about hosting the store here.
        fallback: name or address (without brackets) at which other machines reach this node, if its
            connection to the store has a loopback address.
    """

    listen: tuple[tuple[str, int], ...]
    reason: str
    _: KW_ONLY
    is_explicit: bool = False
    trouble: str | None = None
    doubt: str | None = None
    fallback: str | None = None

    @property
    def may_host(self) -> bool:
        return bool(self.listen)


def decide_hosting(rendezvous: Rendezvous, resolver: SystemResolver) -> Hosting:
    """Decide whether this agent hosts the rendezvous store. Blocks until the name servers respond. Raises
    :class:`.UsageError` if no other node could use the endpoint, because its host is unspecified (such as
    0.0.0.0), or its host is another machine and its port is 0.
    """
    if rendezvous.etcd is not None:
        # Find an address of this node for other nodes: its connection to etcd may have a loopback address.
        address = _address_of_own_name(resolver)
        return Hosting((), "the nodes meet in etcd", is_explicit=True, fallback=address)
    return _with_fallback(rendezvous, _decide(rendezvous, resolver), resolver)


def _decide(rendezvous: Rendezvous, resolver: SystemResolver) -> Hosting:
    settings = rendezvous.settings
    wanted = settings.is_host
    if wanted is None and rendezvous.backend == "static":
        wanted = rendezvous.node_rank == 0
    if wanted is None and is_unspecified(rendezvous.host):
        raise UsageError(
            f"--rdzv-endpoint: got {rendezvous.endpoint!r}, expected the name or address of one node, "
            "the same on all nodes"
        )
    if wanted is False:
        trouble = None
        try:
            resolver.resolve(rendezvous.host)
        except OSError as error:
            trouble = _why(error)
        return _client(rendezvous, "another agent hosts the store", trouble, is_explicit=True)
    if wanted:
        doubt = _doubt(rendezvous, resolver) if rendezvous.backend == "static" else None
        return Hosting(_listen(rendezvous, resolver), "told to host the store", is_explicit=True, doubt=doubt)
    if is_loopback_name(rendezvous.host):
        return Hosting(_listen(rendezvous, resolver), f"{rendezvous.host} is this machine")
    # If the endpoint is an address, look up no names, because a silent name server would delay the start.
    is_name = packed(rendezvous.host) is None
    if is_name and any(plain(own) == plain(rendezvous.host) for own in resolver.host_names()):
        return Hosting(_listen(rendezvous, resolver), f"{rendezvous.host} is the name of this host")
    return _by_address(rendezvous, resolver)


def decide_again(hosting: Hosting, rendezvous: Rendezvous, resolver: SystemResolver) -> Hosting:
    """Decide again whether this agent hosts the store: the endpoint's name may have other addresses now."""
    if hosting.is_explicit or hosting.may_host:
        return hosting
    return _with_fallback(rendezvous, _by_address(rendezvous, resolver), resolver)


def _by_address(rendezvous: Rendezvous, resolver: SystemResolver) -> Hosting:
    try:
        addresses = resolver.resolve(rendezvous.host)
    except OSError as error:
        return _client(rendezvous, f"{rendezvous.host} is not a name of this host", _why(error))
    own_address = next((address for address in addresses if resolver.is_local(address)), None)
    if own_address is None:
        return _client(rendezvous, f"{rendezvous.host} ({', '.join(addresses)}) is another machine", None)
    return Hosting(
        _listen(rendezvous, resolver), f"{rendezvous.host} is {own_address}, an address of this host"
    )


def unresolved(rendezvous: Rendezvous, trouble: str) -> str:
    """Return the error message for an endpoint whose name could not be resolved."""
    option = "--master-addr" if rendezvous.backend == "static" else "--rdzv-endpoint"
    value = rendezvous.host if rendezvous.backend == "static" else rendezvous.endpoint
    return (
        f"{option} {value}: this host cannot resolve {rendezvous.host!r} ({trouble}): "
        "give the address of the node that hosts the store instead, or add the name to DNS or /etc/hosts"
    )


def _with_fallback(rendezvous: Rendezvous, hosting: Hosting, resolver: SystemResolver) -> Hosting:
    is_local_name = is_loopback_name(rendezvous.host)
    if (is_local_name and rendezvous.max_nodes == 1) or not (hosting.may_host or hosting.is_explicit):
        return hosting
    if is_local_name:
        return hosting.replaced(fallback=_address_of_own_name(resolver) or resolver.outgoing_address())
    fallback = None if is_unspecified(rendezvous.host) or not hosting.may_host else rendezvous.host
    is_own_address = fallback is not None and is_usable_elsewhere(fallback) and resolver.is_local(fallback)
    if fallback is None or (hosting.is_explicit and not is_own_address):
        # Prefer the address of this machine's name: the endpoint may be a proxy that forwards only one port.
        fallback = _address_of_own_name(resolver) or fallback
    return hosting.replaced(fallback=fallback)


def _address_of_own_name(resolver: SystemResolver) -> str | None:
    for name in resolver.host_names():
        try:
            addresses = resolver.resolve(name)
        except OSError:
            continue
        for address in addresses:
            if is_usable_elsewhere(address) and resolver.is_local(address):
                return address
    return None


def _listen(rendezvous: Rendezvous, resolver: SystemResolver) -> tuple[tuple[str, int], ...]:
    port, bind_addr = rendezvous.port, rendezvous.settings.bind_addr
    if bind_addr is not None:
        return ((bind_addr, port),)
    if not is_loopback_name(rendezvous.host) or rendezvous.max_nodes > 1:
        return ((ANY_ADDRESS[0] if resolver.is_local(ANY_ADDRESS[0]) else ANY_ADDRESS[1], port),)
    if is_loopback(rendezvous.host):
        return ((rendezvous.host, port),)
    # Listen on both loopback addresses, because clients may try either IPv4 or IPv6 first.
    served = [address for address in _LOOPBACK if resolver.is_local(address)] or [_LOOPBACK[0]]
    # With port 0, use only one address, because two listeners would get different ports.
    return tuple((address, port) for address in (served if port else served[:1]))


def _client(
    rendezvous: Rendezvous, reason: str, trouble: str | None, *, is_explicit: bool = False
) -> Hosting:
    if rendezvous.port == 0:
        raise UsageError(
            f"--rdzv-endpoint: got {rendezvous.endpoint!r}, expected a port other than 0: {reason}, "
            "and its free port cannot be known here"
        )
    return Hosting((), reason, is_explicit=is_explicit, trouble=trouble)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _doubt(rendezvous: Rendezvous, resolver: SystemResolver) -> str | None:
    """Return a warning if the endpoint, as other nodes see it, seems to be another machine or a proxy."""
    host, here = rendezvous.host, "node rank 0 is here, but"
    if is_loopback_name(host) or is_unspecified(host):
        return None
    try:
        addresses = resolver.resolve(host)
    except OSError as error:
        return f"{here} {host!r}, where the others look for it, is unknown here ({_why(error)})"
    if any(resolver.is_local(address) for address in addresses):
        return None
    shown = host if [host] == list(addresses) else f"{host} ({', '.join(addresses)})"
    return f"{here} {shown}, where the others look for it, is not an address of this machine"


# --- queries to the machine ---


def host_identity(
    boot_id: str = "/proc/sys/kernel/random/boot_id", network: str = "/proc/self/ns/net"
) -> str:
    """Return an identifier that agents have in common if they share a loopback interface."""
    try:
        with open(boot_id, encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink(network)}"
    except (OSError, UnicodeError):
        return _socket.gethostname()


class SystemResolver:
    """Resolver that uses the C library and the kernel. Calls block until the name servers respond."""

    __slots__ = ()

    def host_names(self) -> list[str]:
        name = _socket.gethostname()
        try:
            found = _socket.getaddrinfo(
                _plain_text(name), None, 0, _socket.SOCK_STREAM, 0, _socket.AI_CANONNAME
            )
        except OSError:
            return [name]
        full = [entry[3] for entry in found if entry[3]]
        return list(dict.fromkeys((name, *full)))

    def resolve(self, name: str) -> list[str]:
        """Return a host's numeric addresses in the order to try them, or raise :class:`OSError`."""
        try:
            found = _socket.getaddrinfo(_plain_text(name), None, 0, _socket.SOCK_STREAM)
        except UnicodeError:
            # Python's codec for international names raises this error if a label is empty or too long.
            raise OSError("not a host name") from None
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def outgoing_address(self) -> str | None:
        """Return this machine's address for other networks; ``None`` without a route. No packet is sent."""
        for family, elsewhere in _ELSEWHERE:
            sock = _socket.socket(family, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
            try:
                sock.connect((elsewhere, 9))
                address = str(sock.getsockname()[0])
            except OSError:
                continue
            finally:
                sock.close()
            if is_usable_elsewhere(address):
                return address
        return None

    def is_local(self, address: str) -> bool:
        """Return true if a numeric address belongs to this machine. The test is whether the kernel uses the
        address as the source of a connection to the same address. A successful bind proves less, because the
        kernel's setting ``ip_nonlocal_bind`` also allows foreign addresses.
        """
        family = _socket.AF_INET6 if ":" in address else _socket.AF_INET
        try:
            found = _socket.getaddrinfo(address, 9, family, _socket.SOCK_DGRAM, 0, _socket.AI_NUMERICHOST)
        except OSError:
            return False
        host, port, *rest = found[0][4]
        if not _can_bind(family, (host, 0, *rest)):
            return False
        # The kernel may choose the same source address for all loopback addresses.
        is_special = is_unspecified(address) or is_loopback(address)
        return is_special or _talks_from(family, (host, port, *rest), address)


def _plain_text(name: str) -> str | bytes:
    # Pass bytes, because Python would load its slow codec for international names if it got text.
    return name.encode() if name.isascii() else name


def _can_bind(family: int, sockaddr: tuple[object, ...]) -> bool:
    sock = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        sock.bind(sockaddr)
    except OSError:
        return False
    finally:
        sock.close()
    return True


def _talks_from(family: int, sockaddr: tuple[object, ...], address: str) -> bool:
    """Return true if the kernel connects to ``address`` from that same address. No packet is sent."""
    sock = _socket.socket(family, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        sock.connect(sockaddr)
        return packed(sock.getsockname()[0]) == packed(address)
    except OSError as error:
        # If there is no route to the address, it is not this machine's. A sandbox may cause other errors, so
        # after those, trust that `bind` has succeeded.
        return error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH)
    finally:
        sock.close()
