"""Tests for the line about the first failure, for the summary line at the end of a job (duration, restarts,
node changes and goodput), and for what the server of the control socket is told.
"""

import time
from types import SimpleNamespace

import pytest
from helpers.attempts import adopted, exited, failed, raised, stamped

from elasticrs._engine.job.config import JobSpec
from elasticrs._engine.job.phrases import goodput
from elasticrs._engine.supervise.attempt import Attempt, JobResult
from elasticrs._engine.supervise.observe.observer import Outliner, TerminalReporter, productive_ns
from elasticrs._engine.supervise.state_machine import Phase
from elasticrs._engine.workers.plan import NodeShare, Plan, assign

S = 1_000_000_000


def attempt_of(round_, restarts, **stamps):
    plan = Plan(assign([NodeShare("default", 1)], 0), "a", 1)
    return stamped(Attempt(round_, restarts, plan), **stamps)


def last_line(phase, attempts, *, is_multi_node=True, began_s_ago=1):
    job = JobSpec(1, "job", rendezvous=object() if is_multi_node else None, max_restarts=3)
    result, said = JobResult(phase=phase, attempts=attempts), []
    reporter = TerminalReporter(job, result, said.append, owns_process=True)
    reporter._begun_ns = time.monotonic_ns() - began_s_ago * S
    reporter.ended(result, None)
    return said[0] if said else "".join(result.ending)


STOPPING = "stopping the other rank"
UNKNOWN = "the cause is not known yet"
SIDE_EFFECTS = f"{STOPPING}: its errors are side effects"


@pytest.mark.parametrize(
    ("left", "exitcode", "origin", "said"),
    [
        (
            (1, 2),
            1,
            None,
            f"ranks 1, 2 exited with code 0, then rank 3 (pid 103) exited with code 1; {STOPPING}",
        ),
        ((1, 2), 1, "own", f"rank 3 (pid 103) raised an exception; {SIDE_EFFECTS}"),
        ((1, 2), -9, None, f"rank 3 (pid 103) died by SIGKILL; {SIDE_EFFECTS}"),
        ((0, 1, 2), 1, None, f"rank 3 (pid 103) exited with code 1, {UNKNOWN}; {STOPPING}"),
        ((), 1, None, f"rank 3 (pid 103) exited with code 1, {UNKNOWN}; {STOPPING}"),
        ((), 1, "peer", f"rank 3 (pid 103) raised an exception, {UNKNOWN}; {STOPPING}"),
    ],
)
def test_the_first_line_blames_no_rank_if_ranks_that_left_may_have_caused_the_failure(
    left, exitcode, origin, said
):
    """The exception may become known later. If it reports a lost peer, ranks that left early are to blame."""
    job, lines = JobSpec(4, "job"), []
    attempt = adopted(Attempt(1, 0, Plan(assign([NodeShare("default", 4)], 0), "a", 1)), 100, 101, 102, 103)
    for rank in left:
        exited(attempt, rank, 0)
    exited(attempt, 3, exitcode)
    failed(attempt, 3)
    if origin is not None:
        raised(attempt, 3, origin=origin)
    TerminalReporter(job, JobResult(), lines.append, owns_process=True).exited(attempt, attempt.exits[3])
    assert lines == [said]


@pytest.mark.parametrize(
    ("round_", "restarts", "said"),
    [
        (1, 0, "0 restarts charged"),
        (4, 0, "0 restarts charged, 3 not charged"),
        (4, 2, "2 restarts charged, 1 not charged"),
        (3, 2, "2 restarts charged"),
    ],
)
def test_rounds_that_use_no_restart_count_as_node_changes(round_, restarts, said):
    assert last_line(Phase.SUCCEEDED, [attempt_of(round_, restarts)]).endswith(f"; {said}")
    failed = last_line(Phase.FAILED, [attempt_of(round_, restarts)])
    assert failed.endswith(said.replace(" restarts", " of 3 restarts"))


def test_attempts_of_a_single_node_job_are_not_node_changes():
    assert "nodes" not in last_line(Phase.SUCCEEDED, [attempt_of(4, 0)], is_multi_node=False)


def test_the_goodput_of_a_short_job_is_not_shown():
    assert goodput(59 * S, 59 * S) == ""
    assert goodput(45 * S, 60 * S) == ", goodput 75.0 %"
    began, ended = time.monotonic_ns() - 100 * S, time.monotonic_ns()
    line = last_line(Phase.SUCCEEDED, [attempt_of(1, 0, started=began, ended=ended)], began_s_ago=200)
    assert "goodput 50.0 %" in line


def test_import_time_counts_as_productive_for_warm_and_cold_workers():
    cold = attempt_of(1, 0, planned=1 * S, started=2 * S, ended=100 * S)
    warm = attempt_of(1, 0, planned=1 * S, imported=30 * S, started=31 * S, ended=100 * S)
    assert productive_ns([cold]) == 98 * S
    assert productive_ns([warm]) == 99 * S


def test_the_control_socket_is_told_the_present_ranks_after_nodes_have_joined_or_left():
    told, nodes = [], [NodeShare("default", 1)] * 3
    server = SimpleNamespace(outline=lambda _, attempt=None: told.append(attempt))
    outliner = Outliner(JobSpec(1, "job"), server)
    attempt = adopted(Attempt(1, 0, Plan(assign(nodes, 2), "a", 1)), 100)
    outliner.running(JobResult(attempts=[attempt]))
    outliner.quiet()
    attempt.plan.ranks, attempt.agents_round = assign(nodes[:2], 1), 2
    outliner.quiet()
    assert [(number, placed, workers) for _, number, _, placed, _, workers in told[1:]] == [
        (1, (2, 3, 3), [(2, 0, 100)]),
        (2, (1, 2, 2), [(1, 0, 100)]),
    ]
