"""The first failure of a node, which the other nodes receive and show."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from helpers.attempts import adopted, beat, ended, exited, failed, hung, raised, seen

from elasticrs import _core
from elasticrs._engine.failures.failure import Clock, remote_failure
from elasticrs._engine.gpus.xids import Xid
from elasticrs._engine.job.restart_policy import Cause
from elasticrs._engine.nodes.protocol.records import bound_cause, checked_cause
from elasticrs._engine.nodes.protocol.round_outcome import failure_of
from elasticrs._engine.supervise.attempt import Attempt, JobResult
from elasticrs._engine.supervise.failed_attempt import (
    MAX_LINE,
    MAX_LINES,
    MAX_MESSAGE,
    Place,
    first_of,
    first_word,
    not_started,
    own_cause,
    told_here,
)
from elasticrs._engine.supervise.observe.job_report import all_failures
from elasticrs._engine.workers.event_log import Silent
from elasticrs._engine.workers.logs import LogPaths
from elasticrs._engine.workers.plan import NodeShare, Plan, assign
from elasticrs.multiprocessing.errors import ChildFailedError

PLACE = Place("b", "host-b", 1)


def report(result):
    return ChildFailedError("train.py", all_failures(result)).format_msg()


def attempt_of(exits, group_rank=1, paths=None, first=None):
    nodes = [NodeShare("default", 2), NodeShare("default", 2)]
    attempt = Attempt(3, 1, Plan(assign(nodes, group_rank), "a", 1))
    attempt.paths = paths or LogPaths()
    now = time.monotonic_ns()
    for local_rank, exitcode, sent in exits:
        exited(attempt, local_rank, exitcode, sent, seen_ns=now + local_rank)
    if exits and first != -1:
        failed(attempt, exits[0][0] if first is None else first, now)
    return attempt


def test_a_node_whose_workers_were_only_stopped_has_no_failure_cause():
    assert own_cause(attempt_of([(0, -15, 15), (1, -15, 15)]), PLACE) is None
    assert own_cause(attempt_of([]), PLACE) is None


def test_the_xids_of_a_node_are_in_the_reports_of_all_nodes():
    attempt = attempt_of([(0, 1, None), (1, 1, None)])
    adopted(attempt, 100, 101)
    attempt.xids = {(0, 31): Xid(31, 0, 1, (101,), (101,)), (2, 79): Xid(79, 2, 1)}
    assert [note.split()[1] for note in all_failures(JobResult(attempts=[attempt]))[3].more_notes] == ["31"]
    cause = own_cause(attempt, PLACE)
    received = Cause.decoded(checked_cause(json.loads(json.dumps(bound_cause(cause.encoded())))))
    shown = report(JobResult(first_cause=received, clock=Clock()))
    assert "Xid 31 (GPU 0, pid 101)" in shown
    assert "Xid 79 (GPU 2)" in shown


@pytest.mark.parametrize(
    ("end", "words"),
    [({"nursery_exitcode": -9}, "the nursery died by SIGKILL"), ({"nursery_hung": True}, "the nursery hung")],
)
def test_the_failure_cause_names_a_crashed_or_hung_nursery_process(end, words):
    killed = attempt_of([(0, -9, 9), (1, -9, 9)], first=-1)
    none_told = attempt_of([])
    for attempt, worker in ((killed, (2, 100, -9)), (none_told, (None, None, None))):
        ended(attempt, **end)
        cause = own_cause(attempt, PLACE)
        assert cause is not None
        assert (cause.rank, cause.pid, cause.exitcode) == worker
        assert words in cause.message


def test_the_oom_killer_is_named_if_it_killed_the_nursery_process():
    # Whoever killed the workers, which die with the nursery, they are not called victims of the OOM killer.
    attempt = attempt_of([(0, -9, None), (1, -9, 9)], first=-1)
    attempt.oom_kills, attempt.oom_kills_after = {"/c/memory.events": 1}, {"/c/memory.events": 2}
    ended(attempt, nursery_exitcode=-9)
    cause = own_cause(attempt, PLACE)
    assert "the nursery died by SIGKILL (probably by the kernel's OOM killer)" in cause.message
    for each in all_failures(JobResult(attempts=[attempt])).values():
        assert "oom_kill rose by 1 in /c/memory.events" in each.note
        assert (each.how or ": the nursery died").startswith(": the nursery died")


def test_a_failure_cause_names_the_worker_and_is_limited_in_size(tmp_path):
    stderr = tmp_path / "stderr.log"
    stderr.write_text("".join(f"line {number} {'x' * 500}\n" for number in range(100)))
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": "y" * 100_000 + " the end", "timestamp": 5}))
    paths = LogPaths({}, {1: str(stderr)}, {}, {}, {1: str(error_file)})
    cause = own_cause(attempt_of([(1, 7, None)], paths=paths), PLACE)
    assert cause is not None
    assert (cause.node, cause.host, cause.group_rank) == ("b", "host-b", 1)
    assert (cause.rank, cause.local_rank, cause.pid, cause.exitcode) == (3, 1, 101, 7)
    assert cause.message.endswith(" the end")
    assert len(cause.message) == MAX_MESSAGE
    assert len(cause.lines) == MAX_LINES
    assert all(len(line) <= MAX_LINE for line in cause.lines)
    assert len(json.dumps(cause.encoded())) < 3072


def test_failure_times_are_sent_in_store_time_and_converted_back():
    fast, slow = Clock(offset_ns=5_000_000_000), Clock(offset_ns=-7_000_000_000)
    attempt = attempt_of([(0, 1, None)])
    seen = attempt.exits[0].seen_ns
    cause = own_cause(attempt, PLACE.replaced(clock=fast))
    assert cause is not None
    assert abs(cause.time_ns - time.time_ns() - 5_000_000_000) < 2_000_000_000
    # Decode the cause on another node, whose wall clock is 12 s off. For simplicity, both nodes share a
    # monotonic clock.
    shifted = Cause.decoded(dict(cause.encoded(), time_ns=cause.time_ns - 12_000_000_000))
    back = remote_failure(shifted, slow).seen_ns
    assert back is not None
    assert abs(back - seen) < 100_000_000


def test_a_report_shows_the_first_failure_of_another_node_not_local_victims(golden):
    cause = own_cause(attempt_of([(1, -9, None)]), PLACE.replaced(clock=Clock(error_ns=300_000)))
    result = JobResult()
    result.attempts = [attempt_of([(0, -15, 15), (1, -15, 15)], group_rank=0)]
    result.first_cause = cause
    result.clock = Clock(error_ns=200_000)
    texts = {"a worker of another node died": report(result)}
    here = hung_attempt(0, 0, 8)
    result.attempts, result.first_cause = [here], own_cause(hung_attempt(1, 1, 7), PLACE)
    texts["a rank of another node hung, and one here waited for it"] = report(result)
    result.attempts = [attempt_of([(0, -15, 15), (1, -15, 15)], group_rank=0, first=-1)]
    result.attempts[0].heartbeats = here.heartbeats
    texts["a rank of another node hung, and none here"] = report(result)
    result.attempts = [hung_attempt(0, 0, 8)]
    kept = {
        name: result.first_cause.fields()[name] for name in ("node", "host", "rank", "local_rank", "ground")
    }
    shown = {
        "message": "hung: kept the other ranks waiting",
        "diagnosis": "rank 3 did not enter all_reduce #9",
    }
    result.first_cause = Cause(**kept, **shown)
    texts["the flight records blame a rank of another node that no node found"] = report(result)
    variable = {r"\d+\.\d{3} ms earlier": "SPAN earlier"}
    golden("failure-report-of-another-node", texts, variable)


def hung_attempt(local_rank, group_rank, step, *, was_found_here=True):
    """Return an attempt in which ``local_rank`` is one step behind the other rank and was silent for a
    minute.
    """
    first = local_rank if was_found_here else -1
    attempt = attempt_of([(0, -15, 15), (1, -15, 15)], group_rank=group_rank, first=first)
    now = attempt.exits[local_rank].seen_ns
    since = now - 61 * 10**9
    beats = [beat(rank, since, step + (rank != local_rank)) for rank in (0, 1)]
    ranks = [seen(each.local_rank, each) for each in beats]
    attempt.append(hung(local_rank, ranks, since, now), _core.WorkerHung)
    attempt.heartbeats = beats
    return attempt


def test_a_hung_rank_is_reported_with_its_evidence():
    clock = Clock()
    attempt = hung_attempt(1, 1, 7)
    place = PLACE.replaced(clock=clock)
    for cause in (first_word(attempt, 1, place), own_cause(attempt, place)):
        assert (cause.rank, cause.ground, cause.silence, cause.step) == (3, "behind", 61.0, 7)
        told = cause.message.splitlines()[-1]
        assert told.startswith("hung: ")
        assert failure_of(cause.encoded()) == f"rank 3 (pid 101) on node b: {told}"


TRACEBACK = 'Traceback (most recent call last):\n  File "/a/train.py", line 4, in <module>\nKeyError: 1\n'
TIMER = SimpleNamespace(
    local_rank=1, seen_ns=1, signal=15, scope_id="s", scope="s", at=None, deadline=1.0, others=0
)


@pytest.mark.parametrize("has_ended_itself", [True, False])
@pytest.mark.parametrize("text", [None, "bad learning rate", "two\nlines", TRACEBACK])
@pytest.mark.parametrize("exitcode", [1, 0, -9, -11])
@pytest.mark.parametrize("kind", [None, "timer", "silent", "nursery"])
def test_all_nodes_describe_a_failure_as_its_own_node_does(tmp_path, text, exitcode, kind, has_ended_itself):
    error_file = tmp_path / "error.json"
    if text is not None:
        error_file.write_text(json.dumps({"message": text, "timestamp": 5}))
    paths = LogPaths(error_files={1: str(error_file)})
    sent = None if has_ended_itself or exitcode >= 0 else -exitcode
    attempt = attempt_of([(1, exitcode, sent)], paths=paths)
    if kind == "timer":
        attempt.append(TIMER, _core.TimerExpired)
    elif kind == "nursery":
        ended(attempt, nursery_exitcode=-9)
    elif kind == "silent" and exitcode == 0:
        attempt.append(Silent({1}))
    cause = own_cause(attempt, PLACE)
    if cause is None or cause.rank is None:  # No worker has failed by itself.
        return
    received = Cause.decoded(checked_cause(json.loads(json.dumps(bound_cause(cause.encoded())))))
    (failed,) = all_failures(JobResult(attempts=[attempt])).values()
    assert failure_of(received.encoded()) == f"rank 3 (pid 101) on node b{told_here(attempt, failed)}"


def stuck_exit():
    attempt = attempt_of([(1, -9, 9), (0, -15, 15)])
    known = {"exit": "stuck", "limit": 5.0, "origin": "own", "text": "KeyError: 1"}
    raised(attempt, 1, seen_ns=attempt.exits[1].seen_ns, **known)
    return attempt


def killed_for_memory():
    attempt = attempt_of([(1, -9, None)])
    attempt.oom_kills, attempt.oom_kills_after = {"/c/memory.events": 1}, {"/c/memory.events": 2}
    return attempt


@pytest.mark.parametrize(
    "failed",
    [
        stuck_exit,
        killed_for_memory,
        lambda: hung_attempt(1, 1, 7),
        lambda: attempt_of([(1, None, None)]),
    ],
)
def test_a_failure_has_the_same_words_on_its_node_and_on_the_others(failed):
    attempt = failed()
    adopted(attempt, 100, 101)
    local_rank, told = first_of(attempt)
    cause = own_cause(attempt, PLACE)
    assert local_rank == cause.local_rank == 1
    sent = checked_cause(json.loads(json.dumps(bound_cause(cause.encoded()))))
    assert failure_of(sent) == f"rank 3 (pid 101) on node b{told}"


def test_a_stopped_rank_that_lagged_behind_is_a_failure_cause():
    cause = own_cause(hung_attempt(1, 1, 7, was_found_here=False), PLACE)
    assert cause is not None
    assert (cause.rank, cause.ground, cause.step) == (3, "behind", 7)


def report_of(attempt, cause):
    result = JobResult()
    result.attempts, result.first_cause = [attempt], cause
    root, _, others = report(result).partition("Root Cause")[2].partition("Failures:")
    return others, root


def test_the_cause_agreed_by_all_nodes_overrides_the_first_local_failure():
    waits = hung_attempt(0, 0, 8)
    # This cause was found later than the failure of the rank that only waits for it.
    cause = own_cause(hung_attempt(1, 1, 7), PLACE)
    others, root = report_of(waits, cause)
    assert "rank      : 3 (local_rank: 1)" in root
    assert re.search(r"^  \[\d\]: rank 0, .* hung", others, re.MULTILINE)
    assert re.search(r"note: .*\brank 3\b", others)
    assert "rank      : 3 (local_rank: 1)" in report_of(hung_attempt(1, 1, 7), cause)[1]


@pytest.mark.parametrize(
    ("theirs", "ours", "shown"),
    [(300_000, 200_001, " 0.6 ms"), (0, 900, " 0.1 ms"), (None, 900, " not "), (900, None, " not ")],
)
def test_the_clock_error_is_shown_as_a_bound_or_as_unknown(theirs, ours, shown):
    cause = own_cause(attempt_of([(1, -9, None)]), PLACE.replaced(clock=Clock(error_ns=theirs)))
    assert shown in remote_failure(Cause.decoded(bound_cause(cause.encoded())), Clock(error_ns=ours)).note


def test_a_local_failure_that_is_also_the_shared_cause_is_shown_once():
    result = JobResult()
    result.attempts = [attempt_of([(1, -9, None)])]
    result.first_cause = own_cause(result.attempts[0], PLACE)
    assert list(all_failures(result)) == [3]
    assert all_failures(result)[3].host is None


def test_a_node_outside_the_last_round_shows_no_failures_of_earlier_rounds():
    cause = own_cause(attempt_of([(1, -9, None)]), PLACE)
    result = JobResult()
    result.attempts = [attempt_of([(1, 7, None), (0, -15, 15)])]
    result.attempts[0].round -= 1
    result.first_cause = cause
    failed = all_failures(result)
    assert list(failed) == [3]
    assert (failed[3].exitcode, failed[3].host) == (-9, "host-b")


def test_a_failed_start_of_workers_adds_no_worker_to_the_failures():
    result = JobResult()
    result.first_cause = not_started("no memory", PLACE)
    assert all_failures(result) == {}


def test_workers_stopped_for_another_reason_are_not_listed_as_failures():
    result = JobResult()
    result.attempts = [attempt_of([(0, -9, 9), (1, -9, 9)])]
    result.message = "another reason"
    assert all_failures(result) == {}
    result.attempts = [attempt_of([(0, 1, None), (1, -9, 9)])]
    assert list(all_failures(result)) == [2, 3]
