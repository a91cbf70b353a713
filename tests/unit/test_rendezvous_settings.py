"""Tests for the settings of the elastic rendezvous: the invalid values of each key, and keys that must be set
together. test_usage_errors.py tests the error messages.
"""

import math
import os
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rendezvous.store import Entry

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.nodes.driver import Timers, drop_stale, names_of
from elasticrs._engine.nodes.protocol.records import Head, encode
from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
from elasticrs._engine.nodes.transport.coordination import Changes, ConnectionLost, Reply
from elasticrs._engine.nodes.transport.settings import KEYS, Settings, read_settings

NAMES = [key.name for key in KEYS]


def settings(environ=None, **given):
    return read_settings(given, environ or {})[0]


def mistake(environ=None, **given):
    with pytest.raises(UsageError) as raised:
        read_settings(given, environ or {})
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_settings_have_the_expected_defaults():
    made = settings()
    assert (made.join_timeout, made.last_call_timeout, made.close_timeout) == (600, 30, 30)
    assert (made.keep_alive_interval, made.keep_alive_max_attempt, made.ttl) == (1, 5, 5)
    assert (made.restart_call_timeout, made.scale_up_delay, made.store_lost_timeout) == (0, 1, 10)
    assert (made.max_short_losses, made.short_round, made.max_node_losses) == (10, 60, None)
    assert (made.stall_timeout, made.connect_timeout, made.exit_barrier_timeout) == (60, 5, 300)
    assert (made.is_host, made.bind_addr, made.worker_port_range, made.order_hint) == (None,) * 4
    assert (made.homogeneous, made.same_command, made.fresh) == (False, True, False)
    assert (made.drain, made.token, made.rank) == ("node", None, None)


@pytest.mark.parametrize(("given", "attempts"), [("15", 15), ("14.5", 15), ("1", 3)])
def test_store_grace_sets_the_lease_duration(given, attempts):
    assert settings(store_grace=given) == settings(keep_alive_max_attempt=attempts)
    assert settings(store_grace=given, keep_alive_interval="2").ttl == 2 * max(3, (attempts + 1) // 2)
    assert "store_grace: got '0.5'" in mistake(store_grace="0.5")
    assert "keep_alive_max_attempt" in mistake(store_grace=given, keep_alive_max_attempt=5)


def test_settle_defaults_to_grace_period_plus_two_leases_plus_margin():
    assert settings().settle == 30 + 2 * 5 + 5
    values = {"keep_alive_interval": "0.5", "keep_alive_max_attempt": 4}
    assert read_settings(values, {}, grace=7)[0].settle == 7 + 2 * 2 + 5
    assert settings(settle="6.5").settle == 6.5


ANY_SECONDS = {
    "scale_up_delay",
    "last_call_timeout",
    *("restart_call_timeout", "close_timeout", "exit_barrier_timeout", "store_lost_timeout", "short_round"),
}
SOME_SECONDS = {"join_timeout", "connect_timeout"}
NO_EFFECT = {
    "heartbeat_timeout": "5",
    "read_timeout": "60",
    "cas_backoff_max_seconds": "0",
    "timeout": 900,
    "store_type": "TCP",
}


@pytest.mark.parametrize("name", sorted(ANY_SECONDS | SOME_SECONDS))
def test_durations_accept_fractions_and_reject_invalid_values(name):
    assert getattr(settings(**{name: "0.25"}), name) == 0.25
    assert getattr(settings(**{name: 3}), name) == 3.0
    assert getattr(settings(**{name: "2m"}), name) == 120.0
    bad = ["-1", "nan", "x", "", "1y", True, [1], None, "inf", "1e10", 2e9]
    for value in [*bad, "0"] if name in SOME_SECONDS else bad:
        assert mistake(**{name: value}).startswith(f"--rdzv-conf: {name}: got {value!r}, ")
    if name in ANY_SECONDS:
        assert getattr(settings(**{name: 0}), name) == 0


TORCHS = {
    "join_timeout": "600",
    "last_call_timeout": "30",
    "close_timeout": "30",
    "heartbeat_timeout": "5",
    "keep_alive_interval": "5",
    "keep_alive_max_attempt": "3",
    "store_type": "tcp",
    "read_timeout": "60",
    "cas_backoff_max_seconds": "0.5",
    "is_host": "True",
    "rank": "0",
    "timeout": "900",
}
ETCDS = ("protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "etcd_prefix", "cert", "key", "cacert")


def test_every_static_and_c10d_setting_of_torch_is_accepted():
    made = settings(**TORCHS)
    assert (made.ttl, made.is_host, made.rank) == (15, True, 0)


@pytest.mark.parametrize("name", ETCDS)
def test_etcd_settings_are_refused_by_other_backends(name):
    assert re.match(rf"--rdzv-conf: .*\b{name}\b", mistake(**{name: "x"}))


def test_the_exit_barrier_timeout_prefers_option_then_setting_then_variable():
    variable = {"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT": "4"}
    key = {"exit_barrier_timeout": "3"}

    def found(given, environ, option=None):
        return read_settings(given, environ, exit_barrier_timeout=option)[0].exit_barrier_timeout

    assert [found(key, variable, 2), found(key, variable)] == [2, 3]
    assert [found({}, variable), found({}, {})] == [4, 300]
    assert settings(**key).adapted(grace=1).exit_barrier_timeout == 3
    with pytest.raises(UsageError, match=r"^TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT: got 'x'"):
        found({}, {"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT": "x"})


@pytest.mark.parametrize(("name", "value"), NO_EFFECT.items())
def test_settings_used_only_by_torch_have_no_effect(name, value):
    assert settings(**{name: value}) == settings()
    assert mistake(**{name: "inf"}).startswith(f"--rdzv-conf: {name}: got 'inf', expected ")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("scale_up", "0", False),
        ("stall_timeout", "OFF", None),
        ("stall_timeout", "5", 5),
        ("settle", "5.5", 5.5),
        ("keep_alive_interval", "0.4", 0.4),
        ("keep_alive_max_attempt", "3", 3),
        ("max_node_losses", "0", 0),
        ("max_node_losses", "off", None),
        ("max_short_losses", "1", 1),
        ("is_host", "1", True),
        ("is_host", "False", False),
        ("is_host", True, True),
        ("homogeneous", "yes", True),
        ("same_command", "0", False),
        ("fresh", 1, True),
        ("drain", "job", "job"),
        ("bind_addr", "10.0.0.1", "10.0.0.1"),
        ("bind_addr", "[fd00::1]", "fd00::1"),
        ("worker_port_range", "30000-30100", (30000, 30100)),
        ("worker_port_range", "30000", (30000, 30000)),
        ("worker_port_range", 30000, (30000, 30000)),
        ("order_hint", "7", 7),
        ("rank", 1, 1),
        ("token", "s=cret", b"s=cret"),
    ],
)
def test_valid_values_are_parsed(name, text, value):
    found = getattr(settings(**{name: text}), name)
    assert found == value
    assert type(found) in (type(value), float)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settle", "0"),
        ("keep_alive_interval", "3601"),
        ("keep_alive_max_attempt", "2.5"),
        ("max_short_losses", 1.5),
        ("is_host", "maybe"),
        ("is_host", 2),
        ("homogeneous", ""),
        ("fresh", 0.0),
        ("drain", "all"),
        ("bind_addr", ""),
        ("bind_addr", "10.0.0.\0"),
        ("worker_port_range", "0-5"),
        ("worker_port_range", "1-65536"),
        ("worker_port_range", "a-b"),
        ("rank", True),
    ],
)
def test_invalid_values_are_refused(name, text):
    """Test the values that ``usage-errors-settings.txt`` does not contain."""
    assert mistake(**{name: text}).startswith(f"--rdzv-conf: {name}: got {text!r}, ")


def test_an_unknown_setting_is_refused_with_a_suggestion():
    before, _, known = mistake(jion_timeout="5").partition("known: ")
    assert re.search(r"jion_timeout \(.*\bjoin_timeout\b", before)
    assert set(known.split(", ")) == set(NAMES)
    assert "(" not in mistake(zzz="5")


def test_every_setting_is_tested_in_this_file():
    tested = ANY_SECONDS | SOME_SECONDS | set(NO_EFFECT)
    for test in (test_valid_values_are_parsed, test_invalid_values_are_refused):
        tested |= {case[0] for case in test.pytestmark[0].args[1]}
    assert tested | {"store_grace", "token_file"} == set(NAMES)


# --- the token ---


def token_file(tmp_path, data=b"secret\n", mode=0o600):
    path = tmp_path / "token"
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_the_token_comes_from_the_setting_the_file_or_the_environment(tmp_path):
    environ = {"ELASTICRS_TOKEN": "from-env"}
    assert settings(environ).token == b"from-env"
    assert settings(environ, token="mine").token == b"mine"
    assert settings(environ, token_file=token_file(tmp_path)).token == b"secret"
    assert settings(token_file=token_file(tmp_path, b"\x00\xff\r\n")).token == b"\x00\xff"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604, 0o606, 0o602])
def test_a_token_file_that_other_users_can_access_is_reported(tmp_path, mode):
    path = token_file(tmp_path, mode=mode)
    _, notices = read_settings({"token_file": path}, {})
    assert [notice.endswith(f"chmod o-rwx {path}") for notice in notices] == [True] * bool(mode & 0o007)


def test_files_without_a_valid_token_are_refused(tmp_path):
    missing = str(tmp_path / "none")
    for path in (missing, str(tmp_path), token_file(tmp_path, b"\n"), token_file(tmp_path, b"x" * 5000)):
        assert mistake(token_file=path).startswith(f"--rdzv-conf: token_file: {path!r}")
    assert settings(token_file=token_file(tmp_path, b"x" * 4096 + b"\n")).token == b"x" * 4096


def test_the_token_is_never_shown_in_text():
    assert "s3cret" not in repr(settings(token="s3cret"))
    assert "<secret>" in repr(settings(token="s3cret"))
    assert "token=None" in repr(settings())
    long = "s3cret" * 1000
    assert "s3cret" not in mistake(token=long)
    assert mistake({"ELASTICRS_TOKEN": ""}).startswith("ELASTICRS_TOKEN: got 0 ")
    assert "s3cret" not in mistake({"ELASTICRS_TOKEN": long})


# --- all of it ---

texts = (
    st.text(max_size=12) | st.floats().map(str) | st.integers().map(str) | st.sampled_from(["off", "1", "no"])
)
anything = texts | st.floats() | st.integers() | st.booleans() | st.none() | st.binary(max_size=4)


@given(
    st.dictionaries(st.sampled_from([name for name in NAMES if name != "token_file"]), anything, max_size=4)
)
@example({"keep_alive_max_attempt": "288230376151711728"})
def test_any_settings_are_accepted_or_refused_with_a_one_line_error(given):
    line = None
    try:
        made, _ = read_settings(given, {})
    except UsageError as error:
        line = str(error)
    if line is not None:
        assert len(line.splitlines()) == 1
        return
    assert made.settle > made.ttl > 0
    spans = (made.join_timeout, made.last_call_timeout, made.close_timeout, made.settle)
    assert all(math.isfinite(span) and span >= 0 for span in spans)


def test_settings_compare_by_value():
    assert settings(drain="job") == Settings({"drain": "job"})
    assert settings(drain="job") != Settings()
    assert len({settings(), Settings()}) == 1


def test_an_endpoint_is_formatted_as_host_and_port():
    def at(host):
        return Rendezvous("c10d", host, 7, run_id="j", min_nodes=1, max_nodes=3, settings=Settings())

    assert at("node1").endpoint == "node1:7"
    assert at("fd00::1").endpoint == "[fd00::1]:7"
    assert at("node1").max_connections == 70


def test_the_token_file_may_be_a_path_object(tmp_path):
    path = token_file(tmp_path)
    assert settings(token_file=tmp_path / "token").token_file == os.fspath(path)


def test_settings_adapt_to_the_timeouts_of_the_agent():
    made, _ = read_settings({"join_timeout": "7"}, {})
    adapted = made.adapted(grace=3, exit_barrier_timeout=2)
    assert (adapted.join_timeout, adapted.exit_barrier_timeout) == (7, 2)
    assert adapted.settle == 3 + 2 * made.ttl + 5
    given, _ = read_settings({"settle": "77"}, {})
    assert given.adapted(grace=3, exit_barrier_timeout=2).settle == 77


HEAD = "/elasticrs/job/head"
LOST = ConnectionLost("closed", "the store has gone")


def head(state, revision, **more):
    return Changes(revision, [Entry(HEAD, Head(state, 1, **more).encode(), 1, revision)])


def test_no_event_is_dropped_without_a_connection_loss():
    events = [head("RUNNING", 2), Reply(1, True, 3)]
    assert drop_stale(events, HEAD) == events
    assert drop_stale([], HEAD) == []


def test_events_before_a_connection_loss_are_dropped():
    assert drop_stale([Reply(1, True, 2), head("RUNNING", 3), LOST], HEAD) == [LOST]


def test_the_end_of_the_job_is_kept_despite_a_connection_loss():
    closed = head("CLOSED", 4, outcome="succeeded")
    assert drop_stale([head("ENDED", 3), closed, LOST], HEAD) == [closed, LOST]


def test_only_a_closed_head_record_counts_as_the_end_of_the_job():
    other = Changes(2, [Entry("/elasticrs/job/slot/a/1", b"{}", 2, 2)])
    deleted = Changes(3, [Entry(HEAD, None, 1, 3)])
    assert drop_stale([other, deleted, LOST], HEAD) == [LOST]


TABLE = "/elasticrs/job/table/5.1/"


def table_of_nodes(count, key=TABLE):
    """Return the parts of a table of members, two members in each, in the order of a store's answer."""
    rows = [(f"a{rank}/1", f"node{rank}", "10.0.0.1") for rank in range(count)]
    parts = {f"{key}{first // 2}": encode(rows[first : first + 2]) for first in range(0, count, 2)}
    return [Entry(name, parts[name], 7, 7) for name in sorted(parts)]


@pytest.mark.parametrize("count", [1, 2, 25])
def test_the_names_of_a_table_are_in_the_order_of_ranks(count):
    names = [f"node{rank}" for rank in range(count)]
    assert names_of(table_of_nodes(count), TABLE, count) == names


def test_names_are_unknown_if_the_table_is_missing_or_damaged_or_another_one():
    table = table_of_nodes(6)
    assert names_of([], TABLE, 6) is None
    assert names_of(table[1:], TABLE, 6) is None
    assert names_of(table_of_nodes(6, TABLE.replace("5.1", "5.2")), TABLE, 6) is None
    assert names_of([*table[:2], Entry(f"{TABLE}2", b"[[1]]", 7, 7)], TABLE, 6) is None
    assert names_of([Entry(f"{TABLE}stranger", b"{", 8, 8), *table], TABLE, 6) is not None


def test_due_timers_are_returned_once_in_order_of_their_deadlines():
    timers = Timers()
    assert timers.seconds_left(7.0) == 7.0
    timers.arm("late", 3600)
    timers.arm("second", -1)
    timers.arm("first", -2)
    timers.arm("gone", -3)
    timers.disarm("gone")
    timers.disarm("never there")
    assert timers.seconds_left(7.0) == 0.0
    assert timers.take_due() == ["first", "second"]
    assert timers.take_due() == []
    assert 3500 < timers.seconds_left(1e9) <= 3600


def test_a_rearmed_timer_has_the_new_deadline():
    timers = Timers()
    timers.arm("one", -1)
    timers.arm("one", 3600)
    assert timers.take_due() == []
