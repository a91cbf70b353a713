"""The relays alter connections and packets exactly as documented."""

import random
import sys

import pytest
from helpers.inside.packet_relay import Impairment
from helpers.relay import relay_on
from helpers.talk import connecting, serving

pytestmark = pytest.mark.privileged

PORT = 7000


@pytest.fixture
def relayed(hosts):
    """Connect the first of three hosts to the last one through a relay on the second."""
    client_host, relay_host, server_host = hosts(3)
    with (
        relay_on(relay_host, server_host, PORT) as relay,
        serving(server_host, PORT) as server,
        connecting(client_host, relay_host.address, relay.port, peer=server) as client,
    ):
        yield client_host, relay, server, client


def test_a_relay_forwards_counts_delays_and_limits_the_rate(relayed):
    _, relay, server, client = relayed
    assert client.tell("send hello") == "SENT"
    assert server.tell("receive") == "RECEIVED b'hello'"
    assert server.tell("send hi") == "SENT"
    assert client.tell("receive") == "RECEIVED b'hi'"
    assert relay.counts() == {"up": 5, "down": 2, "connections": 1, "open": 1}
    server.order("echo")
    relay.set(delay_up=0.2, delay_down=0.1)
    assert float(client.tell("ask hello").split()[-1]) >= 0.3
    relay.set(delay_up=0.0, delay_down=0.0, rate=100_000)
    # The echo starts before the request has fully arrived, so the round trip takes at least one transfer
    # time, not two.
    assert float(client.tell("ask " + 20_000 * "x").split()[-1]) >= 0.2


def test_a_stalled_relay_keeps_the_connection_and_loses_nothing(relayed):
    client_host, relay, server, client = relayed
    relay.set(is_stalled_up=True)
    assert client.tell("send hello") == "SENT"
    assert server.tell("send hello") == "SENT"
    assert client.tell("receive") == "RECEIVED b'hello'"
    relay.stall()
    assert server.tell("send hi") == "SENT"
    assert server.tell("peek 0.3") == client.tell("peek 0.3") == "NOTHING"
    assert "ESTAB" in client_host.run("ss", "-tn").stdout
    relay.resume()
    assert server.tell("receive") == "RECEIVED b'hello'"
    assert client.tell("receive") == "RECEIVED b'hi'"


def test_a_relay_resets_both_sides(relayed):
    _, relay, server, client = relayed
    assert relay.reset() == 1
    assert server.tell("receive") == "ConnectionResetError"
    assert client.tell("receive") == "ConnectionResetError"
    assert relay.counts()["open"] == 0


def test_a_relay_forwards_much_data_and_a_half_close(relayed):
    _, _, server, client = relayed
    server.order("receive-bulk")
    sent = client.tell("send-bulk 300000 1")
    assert sent.startswith("BULK")
    assert server.hear() == sent
    assert server.tell("send hello") == "SENT"
    assert client.tell("receive") == "RECEIVED b'hello'"


def test_a_relay_can_refuse_new_connections_or_let_them_hang(relayed):
    client_host, relay, server, _ = relayed
    relay.set(new="refuse")
    source = "import socket, sys; s = socket.create_connection(('node2', int(sys.argv[1]))); "
    source += "s.settimeout(0.3); s.recv(1)"
    python = (sys.executable, "-I", "-S", "-c", source, str(relay.port))
    assert "ConnectionRefusedError" in client_host.run(*python, check=False).stderr
    relay.set(new="hang")
    assert "TimeoutError" in client_host.run(*python, check=False).stderr
    assert server.tell("send hello") == "SENT"  # the open connection still works


# --- packets ---


def fates(seed, how, count=20_000):
    chance = random.Random(seed)
    return [how.deliveries(chance) for _ in range(count)]


def test_packet_impairments_depend_only_on_the_seed():
    how = Impairment(loss=0.05, duplicate=0.02, reorder=0.1, delay=0.1, jitter=0.01)
    assert fates("a", how) == fates("a", how)
    assert fates("a", how) != fates("b", how)


def test_the_measured_impairment_rates_match_the_settings():
    found = fates("a", Impairment(loss=0.05, duplicate=0.1, reorder=0.2, reorder_by=1.0, delay=0.5))
    assert len([each for each in found if not each]) == pytest.approx(1000, abs=200)
    arrived = [each for each in found if each]
    assert len([each for each in arrived if len(each) == 2]) == pytest.approx(1900, abs=300)
    assert len([each for each in arrived if each[0] == 1.5]) == pytest.approx(3800, abs=400)
    assert {each[0] for each in arrived} == {0.5, 1.5}


def test_changing_the_duplicate_rate_does_not_change_which_packets_are_lost():
    few, many = fates("a", Impairment(loss=0.05)), fates("a", Impairment(loss=0.05, duplicate=0.5))
    assert [not each for each in few] == [not each for each in many]


def test_tcp_transfers_all_data_despite_loss_duplication_and_reordering(hosts, impair):
    first, second = hosts(2)
    relay = impair(second, seed=1, loss=0.05, duplicate=0.05, reorder=0.1, reorder_by=0.005)
    with serving(first) as server, connecting(second, first.address, peer=server) as client:
        server.order("receive-bulk")
        sent = client.tell("send-bulk 1000000 1")
        assert server.hear() == sent
    counts = relay.counts()
    assert min(counts["up"][what] for what in ("lost", "repeated", "overtaken")) > 0, counts
    assert counts["up"]["taken"] > 1_000_000 / 1500
    relay.close()
    assert first.can_reach(second)


@pytest.mark.parametrize("is_ipv6_only", [False, True], ids=["IPv4", "IPv6"])
def test_a_packet_relay_delays_packets_and_can_be_removed(hosts, impair, is_ipv6_only):
    first, second = hosts(2, is_ipv6_only=is_ipv6_only)
    with serving(first) as server, connecting(second, first.address, peer=server) as client:
        server.order("echo")
        relay = impair(second, seed=1, delay=0.2)
        assert float(client.tell("ask hello").split()[-1]) >= 0.4
        relay.set(loss=1.0)
        assert not first.can_reach(second, seconds=0.3)
        relay.close()
        assert client.tell("ask hello").startswith("ANSWER hello")
        assert first.can_reach(second)
