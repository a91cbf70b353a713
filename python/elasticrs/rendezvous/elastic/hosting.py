"""Which agent hosts the coordination store, where it listens, and which address a node gives to the others.

Decisions are pure functions over a :class:`Resolver`; :class:`SystemResolver` asks the machine.

- **HOST-1** ``is_host`` is obeyed. Without it an agent may host when the endpoint is a loopback name, when it
  is this host's name, or when one of its addresses is this machine's. Several agents of a machine may all
  host: the first takes the port, the others become clients.
- **HOST-2** A loopback name is served on loopback only, everything else on all interfaces unless
  ``bind_addr`` says otherwise: a host's own name may mean 127.0.1.1 to itself and something else to others.
- **HOST-3** A name that cannot be resolved is no mistake yet: in a cluster names appear after the containers
  do, and lead to a former container for a while. Such an agent is a client, which tries again, and decides
  again each time that nobody answers at an address of the name. :attr:`Hosting.trouble` is what it says in
  the end.
- **ADDR-1** A node gives to the others the address that the user names (with ``static`` the endpoint's host
  for rank 0, as in torch), else its own end of the connection to the store: that needs no name service, and
  is of the interface that leads to the other nodes. Torch gives out the host's full name, which the others
  may not know.
- **ADDR-2** On the machine of the store that connection may be a loopback one. Agents on other machines have
  come through the endpoint, so it is an address of this machine that works for them.
- **ADDR-3** Two agents share their loopback interface when they are in one network namespace of one boot of a
  machine. Names cannot tell: containers and cloned machines may all have the same one.
"""

from __future__ import annotations

import _socket
import errno
import os

from elasticrs.job.config import UsageError
from elasticrs.job.value import Value
from elasticrs.rendezvous.elastic.addresses import (
    is_loopback,
    is_loopback_name,
    is_unspecified,
    is_usable_elsewhere,
    packed,
    plain,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from dataclasses import KW_ONLY
    from typing import Protocol

    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous

    class Resolver(Protocol):
        """What decisions ask about names and addresses."""

        def host_names(self) -> Sequence[str]:
            """The names that this machine calls itself: short, full."""

        def resolve(self, name: str) -> Sequence[str]:
            """The numeric addresses of a name or an address, in the order in which a client tries them.

            Raises:
                OSError: there are none.
            """

        def is_local(self, address: str) -> bool:
            """True if a numeric address is one of this machine's, so that a server can listen on it."""


ANY_ADDRESS = ("::", "0.0.0.0")
_LOOPBACK = ("127.0.0.1", "::1")


class Hosting(Value):
    """What an agent does about the coordination store.

    Args:
        listen: where to listen, numeric addresses and the port; empty for a client. ``"::"`` stands for all
            interfaces, IPv4 included.
        reason: why, for the log.
        is_explicit: the user decided: then a port that is taken is an error, and no reason to become
            a client.
        trouble: why the endpoint's name could not be resolved; ``None`` when it could.
        doubt: what is odd about hosting here, for the user; ``None``: nothing.
    """

    listen: tuple[tuple[str, int], ...]
    reason: str
    _: KW_ONLY
    is_explicit: bool = False
    trouble: str | None = None
    doubt: str | None = None

    @property
    def may_host(self) -> bool:
        """True if this agent may try to listen."""
        return bool(self.listen)


class Found(Value):
    """What an agent knows before it begins: see :func:`decide` and :func:`fallback_address`."""

    hosting: Hosting
    fallback: str | None


def look_up(rendezvous: Rendezvous, resolver: Resolver) -> Found:
    """Ask for all that has to be known before an agent begins; as slow as the name servers.

    Raises:
        UsageError: see :func:`decide`.
    """
    if rendezvous.etcd is not None:
        # One of its members may be on this machine, and others still come to this node.
        here = Hosting((), "the nodes meet in etcd", is_explicit=True)
        return Found(here, _address_of_own_name(resolver))
    hosting = decide(rendezvous, resolver)
    return Found(hosting, fallback_address(rendezvous, hosting, resolver))


def decide(rendezvous: Rendezvous, resolver: Resolver) -> Hosting:
    """Decide if this agent hosts the store; with ``static`` node rank 0 does unless ``is_host`` is set.

    Raises:
        UsageError: an endpoint that no other node could use: port 0 of another host, or no host at all.
    """
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
        trouble = _trouble(rendezvous.host, resolver)
        return _client(rendezvous, "another agent hosts the store", trouble, is_explicit=True)
    if wanted:
        doubt = _doubt(rendezvous, resolver) if rendezvous.backend == "static" else None
        return Hosting(_listen(rendezvous, resolver), "told to host the store", is_explicit=True, doubt=doubt)
    if is_loopback_name(rendezvous.host):
        return Hosting(_listen(rendezvous, resolver), f"{rendezvous.host} is this machine")
    if _is_own_name(rendezvous.host, resolver):
        return Hosting(_listen(rendezvous, resolver), f"{rendezvous.host} is the name of this host")
    return _by_address(rendezvous, resolver)


def decide_again(hosting: Hosting, rendezvous: Rendezvous, resolver: Resolver) -> Hosting:
    """Decide once more if this agent hosts the store: what the endpoint's name stands for may have changed.
    The resolver is asked about the endpoint alone, as a host keeps its names.
    """
    if hosting.is_explicit or hosting.may_host:
        return hosting
    return _by_address(rendezvous, resolver)


def _by_address(rendezvous: Rendezvous, resolver: Resolver) -> Hosting:
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


def _is_own_name(host: str, resolver: Resolver) -> bool:
    name = plain(host)
    return any(plain(own) == name for own in resolver.host_names())


def listening_address(host: str, resolver: Resolver) -> str | None:
    """Return where a server listens that others reach at this host: an address of this machine, all of them
    where only a loopback one is known for a name that means more; ``None``: it is another machine.

    Raises:
        OSError: the name is not known.
    """
    if is_loopback(host):
        return host
    if plain(host) == "localhost":
        return _LOOPBACK[0]
    is_own_name = _is_own_name(host, resolver)
    try:
        own = [address for address in resolver.resolve(host) if resolver.is_local(address)]
    except OSError:
        if not is_own_name:
            raise
        own = []
    usable = next((address for address in own if not is_loopback(address)), None)
    if usable is not None or not (own or is_own_name):
        return usable
    return ANY_ADDRESS[0] if resolver.is_local(ANY_ADDRESS[0]) else ANY_ADDRESS[1]


def unresolved(rendezvous: Rendezvous, trouble: str) -> str:
    """Tell the user that the endpoint's name never became known, and what the last attempt said."""
    option = "--master-addr" if rendezvous.backend == "static" else "--rdzv-endpoint"
    value = rendezvous.host if rendezvous.backend == "static" else rendezvous.endpoint
    return (
        f"{option} {value}: this host cannot resolve {rendezvous.host!r} ({trouble}): "
        "give the address of the node that hosts the store instead, or add the name to DNS or /etc/hosts"
    )


def fallback_address(rendezvous: Rendezvous, hosting: Hosting, resolver: Resolver) -> str | None:
    """Return where other machines reach this node when its end of the connection is a loopback address: a
    name or an address without brackets; ``None`` when there can be no such node, or nothing is known.
    """
    if is_loopback_name(rendezvous.host) or not (hosting.may_host or hosting.is_explicit):
        return None
    is_usable = hosting.may_host and not is_unspecified(rendezvous.host)
    if is_usable and not hosting.is_explicit:
        return rendezvous.host
    # Told to host, it may be behind an address that leads to the store's port alone.
    return _address_of_own_name(resolver) or (rendezvous.host if is_usable else None)


def _address_of_own_name(resolver: Resolver) -> str | None:
    for name in resolver.host_names():
        try:
            addresses = resolver.resolve(name)
        except OSError:
            continue
        for address in addresses:
            if is_usable_elsewhere(address) and resolver.is_local(address):
                return address
    return None


def _listen(rendezvous: Rendezvous, resolver: Resolver) -> tuple[tuple[str, int], ...]:
    port, bind_addr = rendezvous.port, rendezvous.settings.bind_addr
    if bind_addr is not None:
        return ((bind_addr, port),)
    if not is_loopback_name(rendezvous.host):
        return ((ANY_ADDRESS[0] if resolver.is_local(ANY_ADDRESS[0]) else ANY_ADDRESS[1], port),)
    if is_loopback(rendezvous.host):
        return ((rendezvous.host, port),)
    # A client may try either family first.
    served = [address for address in _LOOPBACK if resolver.is_local(address)] or [_LOOPBACK[0]]
    # Two listeners would get two different free ports.
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


def _trouble(name: str, resolver: Resolver) -> str | None:
    try:
        resolver.resolve(name)
    except OSError as error:
        return _why(error)
    return None


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _doubt(rendezvous: Rendezvous, resolver: Resolver) -> str | None:
    """What speaks against this machine's being the one that the others are told to come to.

    No mistake: the address may be that of a service which leads here.
    """
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


# --- the machine ---


def host_identity(
    boot_id: str = "/proc/sys/kernel/random/boot_id", network: str = "/proc/self/ns/net"
) -> str:
    """Return what tells hosts apart: the same for two agents if they share their loopback interface."""
    try:
        with open(boot_id, encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink(network)}"
    except (OSError, UnicodeError):
        # Without /proc the name has to do.
        return _socket.gethostname()


class SystemResolver:
    """Asks the C library and the kernel. Blocks while name servers do not answer."""

    __slots__ = ()

    def host_names(self) -> list[str]:
        name = _socket.gethostname()
        try:
            found = _socket.getaddrinfo(
                _plain_text(name), None, 0, _socket.SOCK_STREAM, 0, _socket.AI_CANONNAME
            )
        except OSError:
            # A host that does not know its own name still has it.
            return [name]
        full = [entry[3] for entry in found if entry[3]]
        return list(dict.fromkeys((name, *full)))

    def resolve(self, name: str) -> list[str]:
        try:
            found = _socket.getaddrinfo(_plain_text(name), None, 0, _socket.SOCK_STREAM)
        except UnicodeError:
            # Of the codec for international names: a label that is empty or too long.
            raise OSError("not a host name") from None
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def is_local(self, address: str) -> bool:
        """See :class:`Resolver`. Binding tells, but for machines that allow to bind what is not theirs
        (``ip_nonlocal_bind``): to an address of its own a machine talks *from* that address.
        """
        family = _socket.AF_INET6 if ":" in address else _socket.AF_INET
        try:
            found = _socket.getaddrinfo(address, 9, family, _socket.SOCK_DGRAM, 0, _socket.AI_NUMERICHOST)
        except OSError:
            return False
        host, port, *rest = found[0][4]
        if not _can_bind(family, (host, 0, *rest)):
            return False
        # From one loopback address a machine talks to all of them.
        is_special = is_unspecified(address) or is_loopback(address)
        return is_special or _talks_from(family, (host, port, *rest), address)


def _plain_text(name: str) -> str | bytes:
    # For text the codec of international names is loaded, which takes longer than all the rest.
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
    """True if this machine would talk to an address of its own from there; nothing is sent."""
    sock = _socket.socket(family, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        sock.connect(sockaddr)
        return packed(sock.getsockname()[0]) == packed(address)
    except OSError as error:
        # Nobody comes to an address without a route. Other errors are of a sandbox: then the bind counts.
        return error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH)
    finally:
        sock.close()
