"""Selection of the agent that hosts the coordination store, and the addresses of the store and of
the nodes.
"""

import os
import socket
import sys

import pytest
from helpers.procs import run_program
from helpers.rendezvous import rendezvous
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.nodes.hosting import (
    SystemResolver,
    decide_again,
    decide_hosting,
    host_identity,
    unresolved,
)
from elasticrs._engine.nodes.transport.addresses import (
    is_loopback,
    is_loopback_name,
    is_unspecified,
    is_usable_elsewhere,
    packed,
    parse_endpoint,
)
from elasticrs._engine.nodes.transport.etcd_site import EtcdSite

ALL = ("::",)
ONE = (1, 1)
"""Minimum and maximum number of nodes of a job with one node."""


class Machine:
    """A fake machine: its names, its addresses, and what its name service knows."""

    def __init__(self, *names, own=(), known=None, has_ipv6=True, outgoing=None):
        self.outgoing = outgoing
        self.names = names
        self.own = {"127.0.0.1", "0.0.0.0", *own, *(("::", "::1") if has_ipv6 else ())}
        self.known = known or {}

    def host_names(self):
        return list(self.names)

    def outgoing_address(self):
        return self.outgoing

    def resolve(self, name):
        if packed(name) is not None:
            return [name]
        if name not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.known[name]

    def is_local(self, address):
        return address in self.own


KNOWN = {"node1": ["10.0.0.1"], "node2": ["10.0.0.2", "fd00::2"]}
NODE1 = Machine("node1", "node1.cluster", own=["10.0.0.1"], known={**KNOWN, "node1": ["127.0.1.1"]})
NODE2 = Machine("node2", own=["10.0.0.2", "fd00::2"], known=KNOWN)


def listens(host, machine, port=29400, **how):
    return decide_hosting(rendezvous(host, port, **how), machine).listen


@pytest.mark.parametrize("host", ["node1", "NODE1", "node1.", "node1.cluster", "Node1.Cluster.", "10.0.0.1"])
def test_the_host_named_by_the_endpoint_listens_on_all_interfaces(host):
    assert listens(host, NODE1) == (("::", 29400),)
    assert listens(host, Machine("node1", "node1.cluster", own=["10.0.0.1"], has_ipv6=False)) == (
        ("0.0.0.0", 29400),
    )


def test_a_host_recognizes_its_alias_by_the_address():
    machine = Machine("node1", own=["10.0.0.1"], known={"head": ["192.0.2.9", "10.0.0.1"]})
    found = decide_hosting(rendezvous("head"), machine)
    assert found.listen == (("::", 29400),)
    assert "head is 10.0.0.1" in found.reason


@pytest.mark.parametrize("host", ["localhost", "node1"])
def test_with_etcd_no_agent_hosts_a_store_and_each_node_has_an_address(host):
    site = EtcdSite(((host, 2379),))
    machine = Machine("me", own=["10.0.0.7"], known={"me": ["127.0.1.1", "10.0.0.7"]})
    found = decide_hosting(rendezvous(host, 2379, "etcd", etcd=site), machine)
    assert (found.may_host, found.fallback) == (False, "10.0.0.7")
    assert decide_again(found, rendezvous(host), machine) == found


def test_agents_on_other_hosts_are_clients():
    found = decide_hosting(rendezvous("node1"), NODE2)
    assert found.listen == ()
    assert "node1 (10.0.0.1)" in found.reason
    assert not decide_hosting(rendezvous("node"), Machine("node1", known={"node": ["10.9.9.9"]})).may_host


@pytest.mark.parametrize("how", [{}, {"is_host": True}])
@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::2"])
def test_names_are_not_looked_up_if_the_endpoint_is_an_address(host, how, monkeypatch):
    machine = Machine(own=["10.0.0.1", "fd00::2"])
    monkeypatch.setattr(machine, "host_names", lambda: pytest.fail("a name server was asked"))
    assert decide_hosting(rendezvous(host, **how), machine).fallback == host
    assert not decide_hosting(rendezvous("10.0.0.9"), machine).may_host


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "localhost."])
def test_localhost_is_served_on_ipv4_and_ipv6_loopback_for_one_node(host):
    assert listens(host, NODE1, nodes=ONE) == (("127.0.0.1", 29400), ("::1", 29400))
    assert listens(host, Machine(has_ipv6=False), nodes=ONE) == (("127.0.0.1", 29400),)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1"])
def test_a_loopback_address_is_served_on_that_address_only_for_one_node(host):
    assert listens(host, NODE1, nodes=ONE) == ((host, 29400),)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_other_nodes_reach_a_store_whose_host_has_a_loopback_endpoint(host):
    machine = Machine("node1", own=["10.0.0.1"], known={"node1": ["127.0.1.1", "10.0.0.1"]})
    found = decide_hosting(rendezvous(host, nodes=(2, 2)), machine)
    assert (found.listen, found.fallback) == ((("::", 29400),), "10.0.0.1")
    # A machine's own name may resolve only to a loopback address.
    looped = decide_hosting(rendezvous(host, nodes=(2, 2)), Machine("node1", outgoing="10.0.0.7"))
    assert looped.fallback == "10.0.0.7"
    only_here = decide_hosting(rendezvous(host, nodes=(2, 2), bind_addr="127.0.0.1"), machine)
    assert only_here.listen == (("127.0.0.1", 29400),)


def test_port_0_is_bound_on_a_single_address():
    assert listens("localhost", NODE1, 0, nodes=ONE) == (("127.0.0.1", 0),)
    assert listens("node1", NODE1, 0) == (("::", 0),)


def test_is_host_overrides_the_hosting_decision():
    told = decide_hosting(rendezvous("service", is_host=True), NODE1)
    assert (told.listen, told.is_explicit) == ((("::", 29400),), True)
    assert listens("node1", NODE1, is_host=False) == ()
    assert listens("localhost", NODE1, is_host=True, nodes=ONE) == (("127.0.0.1", 29400), ("::1", 29400))
    assert listens("localhost", NODE1, is_host=True) == (("::", 29400),)
    assert listens("0.0.0.0", NODE1, is_host=True) == (("::", 29400),)
    assert not decide_hosting(rendezvous("node1"), NODE1).is_explicit
    assert decide_hosting(rendezvous("node1", is_host=False), NODE1).is_explicit


def test_bind_addr_sets_the_listening_address():
    assert listens("node1", NODE1, bind_addr="10.0.0.1") == (("10.0.0.1", 29400),)
    assert listens("localhost", NODE1, bind_addr="10.0.0.1") == (("10.0.0.1", 29400),)
    assert listens("node1", NODE2, bind_addr="10.0.0.1") == ()


def test_node_rank_0_hosts_the_store_with_the_static_backend():
    assert listens("node1", NODE2, backend="static", node_rank=0) == (("::", 29400),)
    assert listens("node1", NODE1, backend="static", node_rank=1) == ()
    assert listens("node1", NODE1, backend="static", node_rank=1, is_host=True) == (("::", 29400),)
    assert listens("127.0.0.1", NODE1, backend="static", node_rank=0) == (("::", 29400),)


@pytest.mark.parametrize(
    ("host", "doubt"),
    [
        ("node1", None),
        ("localhost", None),
        ("fd00::2", None),
        ("10.0.0.9", "10.0.0.9"),
        ("service", "service (10.1.1.1, 10.1.1.2)"),
        ("nowhere", "'nowhere'"),
    ],
)
def test_node_rank_0_at_another_address_than_given_is_reported(host, doubt):
    """A different address is not an error, because the agent may be reachable through the address of a
    service.
    """
    known = {"node1": ["10.0.0.1", "10.0.0.2"], "service": ["10.1.1.1", "10.1.1.2"]}
    machine = Machine("node2", own=["10.0.0.2", "fd00::2"], known=known)
    found = decide_hosting(rendezvous(host, backend="static", node_rank=0), machine)
    assert found.may_host
    assert found.doubt is None if doubt is None else doubt in found.doubt
    assert decide_hosting(rendezvous(host, is_host=True), machine).doubt is None


@pytest.mark.parametrize("how", [{}, {"is_host": False}, {"backend": "static", "node_rank": 1}])
def test_an_agent_is_a_client_if_the_endpoint_does_not_resolve_yet(how):
    found = decide_hosting(rendezvous("later", **how), NODE1)
    assert not found.may_host
    assert found.trouble == "Name or service not known"
    option = "--master-addr later" if "backend" in how else "--rdzv-endpoint later:29400"
    line = unresolved(rendezvous("later", **how), found.trouble)
    assert line.startswith(f"{option}: ")
    assert f"({found.trouble})" in line


def test_the_host_name_of_this_machine_need_not_be_resolvable():
    assert listens("lonely", Machine("lonely")) == (("::", 29400),)


def test_port_0_on_another_host_is_refused():
    for how, why in (
        ({"host": "node1"}, r"node1 \(10.0.0.1\)"),
        ({"host": "later"}, "later"),
        ({"host": "node2", "is_host": False}, "another agent"),
    ):
        host = how.pop("host")
        with pytest.raises(UsageError, match=f"^--rdzv-endpoint: got '{host}:0'.*: {why}"):
            decide_hosting(rendezvous(host, 0, **how), NODE2)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_address_is_refused_as_endpoint(host):
    with pytest.raises(UsageError, match=f"got '.*{host}.*'"):
        decide_hosting(rendezvous(host), NODE1)


labels = st.sampled_from(["node1", "node2", "node1.cluster", "head", "later", "localhost"])
hosts = labels | st.ip_addresses().map(str) | st.sampled_from(["10.0.0.1", "fd00::2", "127.0.1.1", "::1"])
flags = st.none() | st.booleans()


@given(
    hosts,
    st.sampled_from([0, 29400]),
    flags,
    st.none() | st.just("10.0.0.1"),
    st.sampled_from([NODE1, NODE2]),
    st.sampled_from([ONE, (1, 2)]),
)
def test_every_hosting_decision_is_consistent(host, port, is_host, bind_addr, machine, nodes):
    how = {"is_host": is_host, "bind_addr": bind_addr, "nodes": nodes}
    try:
        found = decide_hosting(rendezvous(host, port, **how), machine)
    except UsageError:
        assert port == 0 or is_unspecified(host)
        return
    assert found == decide_hosting(rendezvous(host, port, **how), machine)
    assert found.may_host or port
    assert {number for _, number in found.listen} <= {port}
    if is_host is not None:
        assert (found.may_host, found.is_explicit) == (is_host, True)
    if found.may_host and bind_addr:
        assert found.listen == (("10.0.0.1", port),)
    elif found.may_host:
        on_loopback = {is_loopback(address) for address, _ in found.listen}
        assert on_loopback == {is_loopback_name(host) and nodes == ONE}


@given(hosts.filter(lambda host: not (is_loopback_name(host) or is_unspecified(host))))
def test_at_most_one_of_two_machines_hosts_the_store(host):
    guesses = [decide_hosting(rendezvous(host), machine).may_host for machine in (NODE1, NODE2)]
    # Loopback addresses and wildcards are left out above: both machines have them, and no other machine can
    # use them.
    assert sum(guesses) <= 1


# --- the address of a node ---


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        (rendezvous("node1"), None),
        (rendezvous("node1", local_addr="n2.example"), "n2.example"),
        (rendezvous("node1", local_addr="[fd00::2]"), "fd00::2"),
        (rendezvous("node1", backend="static", node_rank=0), "node1"),
        (rendezvous("node1", backend="static", node_rank=0, local_addr="a"), "node1"),
        (rendezvous("node1", backend="static", node_rank=1, local_addr="a"), "a"),
        (rendezvous("node1", backend="static", node_rank=1), None),
    ],
)
def test_the_node_address_comes_from_local_addr_or_the_static_endpoint(endpoint, address):
    assert endpoint.given_addr == address


@pytest.mark.parametrize(
    ("endpoint", "machine", "address"),
    [
        # The agent that hosts the store, or another agent on its machine.
        (rendezvous("node1"), NODE1, "node1"),
        (rendezvous("10.0.0.1"), NODE1, "10.0.0.1"),
        (rendezvous("node2"), NODE2, "node2"),
        # All agents are on this machine.
        (rendezvous("localhost"), NODE1, None),
        (rendezvous("::1", is_host=True), NODE1, None),
        # The store is on another machine, so the connection to it shows an address that others can use.
        (rendezvous("node1"), NODE2, None),
        (rendezvous("later"), NODE2, None),
        # With an explicit host, the endpoint may be an address that forwards only a single port.
        (rendezvous("service", is_host=True), NODE2, "10.0.0.2"),
        (rendezvous("service", is_host=True), NODE1, "service"),
        (rendezvous("0.0.0.0", is_host=True), NODE2, "10.0.0.2"),
        (rendezvous("0.0.0.0", is_host=True), NODE1, None),
        (rendezvous("node2", is_host=False), NODE2, "10.0.0.2"),
        (rendezvous("node1", is_host=False), NODE1, None),
    ],
)
def test_the_fallback_address_is_reachable_from_other_machines(endpoint, machine, address):
    assert decide_hosting(endpoint, machine).fallback == address


def test_hosting_is_decided_again_if_the_endpoint_resolves_differently():
    early = Machine("pod", own=["10.0.0.1"], known={"old": ["10.0.0.9"]})
    late = Machine("pod", own=["10.0.0.1"], known={"new": ["10.0.0.1"], "old": ["10.0.0.1"]})
    for name in ("new", "old"):
        endpoint = rendezvous(name)
        first = decide_hosting(endpoint, early)
        assert not first.may_host
        assert decide_again(first, endpoint, early) == first
        again = decide_again(first, endpoint, late)
        assert again == decide_hosting(endpoint, late)
        assert again.may_host
        assert again.fallback == name


def test_an_explicit_is_host_is_not_decided_again():
    for is_host in (False, True):
        endpoint = rendezvous("new", is_host=is_host)
        first = decide_hosting(endpoint, NODE2)
        assert decide_again(first, endpoint, Machine("new", own=["10.0.0.2"])) is first


def test_agents_with_the_same_loopback_have_the_same_host_identity(tmp_path):
    assert host_identity() == host_identity()
    ask = "from elasticrs._engine.nodes.hosting import host_identity; print(host_identity())"
    done = run_program([sys.executable, "-c", ask], check=True)
    assert done.stdout.strip() == host_identity()
    other = tmp_path / "net"
    other.symlink_to("net:[1]")
    assert host_identity(network=str(other)) != host_identity()
    assert host_identity(boot_id=str(tmp_path / "none")) == os.uname().nodename


@pytest.mark.parametrize(
    ("address", "loopback", "elsewhere"),
    [
        ("127.0.0.1", True, False),
        ("127.255.0.9", True, False),
        ("::1", True, False),
        ("[::1]", False, False),
        ("::ffff:127.0.0.1", True, False),
        ("10.0.0.1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("fd00::1", False, True),
        ("169.254.1.1", False, False),
        ("fe80::1%eth0", False, False),
        ("febf::1", False, False),
        ("fec0::1", False, True),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("localhost", False, False),
        ("node1", False, False),
    ],
)
def test_loopback_and_externally_usable_addresses_are_recognized(address, loopback, elsewhere):
    assert (is_loopback(address), is_usable_elsewhere(address)) == (loopback, elsewhere)
    assert is_loopback_name(address) == (loopback or address in {"localhost", "[::1]"})


@given(st.ip_addresses(v=4))
def test_an_ipv4_mapped_ipv6_address_equals_its_ipv4_address(address):
    assert packed(f"::ffff:{address}") == packed(str(address)) == address.packed
    assert is_loopback(f"::ffff:{address}") == address.is_loopback
    assert is_usable_elsewhere(str(address)) == (
        not (address.is_loopback or address.is_link_local or address.is_unspecified)
    )


# --- this machine ---


def test_the_system_resolver_recognizes_this_machine():
    machine = SystemResolver()
    assert os.uname().nodename in machine.host_names()
    assert machine.resolve("127.0.0.1") == ["127.0.0.1"]
    assert set(machine.resolve("localhost")) <= {"127.0.0.1", "::1"}
    assert machine.is_local("127.0.0.1")
    assert machine.is_local("127.0.1.1")
    assert machine.is_local("0.0.0.0")
    # These addresses are reserved for documentation.
    assert not machine.is_local("192.0.2.1")
    assert not machine.is_local("2001:db8::1")
    assert not machine.is_local("no address")


ASK = """
import sys
from elasticrs._engine.nodes.transport.etcd_site import EtcdSite
from elasticrs._engine.nodes.hosting import SystemResolver
print(*(SystemResolver().is_local(address) for address in sys.argv[1:]))
"""


@pytest.mark.privileged
def test_a_bindable_address_of_another_machine_is_not_local():
    # `ip_nonlocal_bind`, which load balancers use, allows this. The third address has a route, and the fourth
    # has none.
    setup = """
        sysctl -q -w net.ipv4.ip_nonlocal_bind=1
        ip link set lo up
        ip address add 10.77.0.1/32 dev lo
        ip route add 10.77.0.0/24 dev lo
        exec "$@"
    """
    addresses = ("127.0.0.1", "10.77.0.1", "10.77.0.2", "192.0.2.1")
    command = ["unshare", "--net", "sh", "-ec", setup, "sh", sys.executable, "-c", ASK, *addresses]
    done = run_program(command, check=True)
    assert done.stdout.split() == ["True", "True", "False", "False"]


def test_resolving_an_invalid_host_name_raises_an_error():
    for name in ("a..b", "x" * 64 + ".b", "node.invalid"):
        with pytest.raises(OSError, match=r"."):
            SystemResolver().resolve(name)


def test_hosting_is_decided_with_the_system_resolver():
    own_name = os.uname().nodename
    assert decide_hosting(rendezvous(own_name), SystemResolver()).may_host
    assert not decide_hosting(rendezvous("192.0.2.1"), SystemResolver()).may_host
    served = decide_hosting(rendezvous("localhost", 0, nodes=ONE), SystemResolver()).listen
    assert served == (("127.0.0.1", 0),)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("host", ("host", None)),
        ("host:1", ("host", 1)),
        ("node-1.cluster.:0", ("node-1.cluster.", 0)),
        ("10.0.0.1:29400", ("10.0.0.1", 29400)),
        ("[::1]", ("::1", None)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_endpoints_are_split_into_host_and_port(endpoint, expected):
    assert parse_endpoint("--rdzv-endpoint", endpoint) == expected


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "host:", "host:x", "host:65536", "host:-1", "host:²", "host:" + "0" * 5000, "ho st:1"),
        *("[::1", "[]:1", "[::1]80", "[host]:1", "[10.0.0.1]:1", "a=b:1", "a/b", "h]:1", ":1"),
    ],
)
def test_malformed_endpoints_are_refused(endpoint):
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: got '.*', expected HOST\[:PORT\]$"):
        parse_endpoint("--rdzv-endpoint", endpoint)


def test_an_ipv6_address_without_brackets_gets_a_hint():
    with pytest.raises(UsageError, match=r"^endpoint: got 'fd00::1'.* \[fd00::1\]$"):
        parse_endpoint("endpoint", "fd00::1")
    with pytest.raises(UsageError, match=r"\[fd00::1\]:29400$"):
        parse_endpoint("endpoint", "fd00::1:29400")


names = st.from_regex(r"[A-Za-z0-9_.-]{1,40}", fullmatch=True)
addresses = st.ip_addresses(v=6).map(str)
ports = st.integers(0, 65535)


@given(names | addresses, st.none() | ports)
def test_a_formatted_endpoint_parses_to_the_same_host_and_port(host, port):
    text = f"[{host}]" if ":" in host else host
    assert parse_endpoint("x", text if port is None else f"{text}:{port}") == (host, port)


@given(st.text(max_size=30) | st.text("[]:019afx.%", max_size=30))
def test_any_text_is_parsed_or_refused_with_a_one_line_error(text):
    line = None
    try:
        host, port = parse_endpoint("x", text)
    except UsageError as error:
        line = str(error)
    if line is not None:
        assert len(line.splitlines()) == 1
    else:
        assert host
        assert port is None or 0 <= port < 2**16
