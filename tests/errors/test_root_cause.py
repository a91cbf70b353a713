"""Choice of the root cause among a job's failures."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.failures.failure import (
    RECORD_WINDOW_NS,
    WAVE_NS,
    in_order,
    root_cause,
    victims,
)
from elasticrs.multiprocessing.errors import ChildFailedError, ProcessFailure

NOW = time.monotonic_ns()
MS = 1_000_000


def failure(
    seen_ns: int | None,
    sent_signal: int | None = None,
    recorded_ns: int | None = None,
    recorded_pid: int = 7,
    is_lost_peer: bool = False,
    cause: str | None = None,
) -> ProcessFailure:
    made = ProcessFailure(0, 7, -9, "", seen_ns=seen_ns, sent_signal=sent_signal, cause=cause)
    if recorded_ns is not None:
        made.is_lost_peer = is_lost_peer
        made.recorded_ns, made.recorded_pid = recorded_ns, recorded_pid
    return made


def test_the_earliest_exit_in_nanoseconds_is_the_root_cause():
    assert root_cause({0: failure(NOW + 1), 1: failure(NOW), 2: failure(NOW + 2)}) == 1


def test_the_first_failure_in_the_mapping_is_the_cause_at_equal_times():
    assert root_cause({3: failure(NOW), 1: failure(NOW), 2: failure(NOW)}) == 3


def test_a_worker_signalled_by_the_agent_is_a_victim_even_if_it_exits_first():
    assert root_cause({0: failure(NOW, sent_signal=15), 1: failure(NOW + 5)}) == 1


def test_the_first_exit_is_the_cause_if_all_workers_were_signalled():
    assert root_cause({0: failure(NOW + 1, sent_signal=15), 1: failure(NOW, sent_signal=15)}) == 1


def test_an_error_recorded_before_the_first_exit_is_the_root_cause():
    slow = failure(NOW + 20 * MS, sent_signal=15, recorded_ns=NOW - 30 * MS)
    failures = {0: failure(NOW), 1: slow, 2: failure(NOW + 20 * MS, sent_signal=15)}
    assert root_cause(failures) == 1
    assert victims(failures) == [2]


@pytest.mark.parametrize(
    "recorded_ns",
    [NOW + MS, NOW + 20 * MS - RECORD_WINDOW_NS - 1, NOW + 21 * MS],
    ids=["after the first end", "long before", "after its own end"],
)
def test_an_error_recorded_at_another_time_does_not_make_a_victim_the_cause(recorded_ns):
    other = failure(NOW + 20 * MS, sent_signal=15, recorded_ns=recorded_ns)
    assert root_cause({0: other, 1: failure(NOW)}) == 1
    assert victims({0: other, 1: failure(NOW)}) == [0]


def test_an_error_time_recorded_by_another_process_is_ignored():
    wrapper = failure(NOW + MS, recorded_ns=NOW - MS, recorded_pid=8)
    assert root_cause({0: wrapper, 1: failure(NOW)}) == 1


@pytest.mark.parametrize("sent_signal", [None, 15], ids=["ended by itself", "stopped"])
def test_a_lost_peer_error_is_ordered_after_an_exit_without_an_error_record(sent_signal):
    lost = failure(NOW + 20 * MS, sent_signal, recorded_ns=NOW - MS, is_lost_peer=True)
    failures = {0: lost, 1: failure(NOW)}
    assert in_order(failures) == [1, 0]
    assert root_cause(failures) == 1
    assert victims(failures) == ([] if sent_signal is None else [0])


@pytest.mark.parametrize(
    ("lost", "other"),
    [
        ({"is_lost_peer": False}, {}),
        ({"recorded_ns": NOW - WAVE_NS - MS}, {}),
        ({}, {"recorded_ns": NOW, "is_lost_peer": True}),
        ({}, {"sent_signal": 15}),
    ],
    ids=["another error", "long before", "both lost a peer", "stopped"],
)
def test_a_lost_peer_error_is_the_cause_if_no_other_exit_explains_it(lost, other):
    first = failure(**{"seen_ns": NOW + 20 * MS, "recorded_ns": NOW - MS, "is_lost_peer": True, **lost})
    assert root_cause({0: first, 1: failure(**{"seen_ns": NOW, **other})}) == 0


@pytest.mark.parametrize(
    ("lost", "other"),
    [
        ({"recorded_pid": 8}, {"seen_ns": NOW + 30 * MS}),
        ({}, {"recorded_ns": NOW}),
        ({}, {"cause": "hung"}),
    ],
    ids=["of another process", "another error", "hung"],
)
def test_a_lost_peer_error_is_not_the_cause_if_another_rank_failed(lost, other):
    first = failure(**{"seen_ns": NOW + 20 * MS, "recorded_ns": NOW - MS, "is_lost_peer": True, **lost})
    assert root_cause({0: first, 1: failure(**{"seen_ns": NOW, **other})}) == 1


def test_failures_without_exit_times_are_ordered_as_in_torch(tmp_path):
    failures = {}
    for rank, timestamp in ((5, 12), (4, 10), (3, 10)):
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps({"message": "m", "timestamp": timestamp}))
        failures[rank] = ProcessFailure(rank, 7, 1, str(path))
    assert ChildFailedError("train.py", failures).get_first_failure() == (4, failures[4])


def test_the_root_cause_of_no_failures_raises_an_error():
    with pytest.raises(ValueError, match="no failures"):
        root_cause({})


times = st.integers(NOW, NOW + 100)
made = st.builds(
    failure, times | st.none(), st.none() | st.just(15), st.none() | st.integers(NOW - 50, NOW + 150)
)


@given(st.dictionaries(st.integers(0, 63), made, min_size=1))
def test_the_root_cause_is_the_earliest_failure_that_is_not_a_victim(failures):
    root, spared, order = root_cause(failures), victims(failures), in_order(failures)
    assert sorted(order) == sorted(failures)
    assert all(failures[rank].sent_signal is not None for rank in spared)
    if len(spared) < len(failures):
        assert root not in spared
        assert all(rank in spared for rank in order[: order.index(root)])
    else:
        assert root == order[0]
