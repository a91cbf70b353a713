"""Events of the core in any order. All functions that describe an attempt work without an error, in whatever
order the core reports that workers have exited.
"""

import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticrs import _core
from elasticrs._engine.failures.failure import Clock
from elasticrs._engine.job.config import JobSpec
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.attempt import Attempt, phases
from elasticrs._engine.supervise.failed_attempt import Place, evidence, facts, first_word, own_cause
from elasticrs._engine.supervise.observe import job_report, recorder
from elasticrs._engine.supervise.observe.job_report import all_failures, headline_of
from elasticrs._engine.supervise.observe.recorder import EventRecorder, MetricRecorder
from elasticrs._engine.supervise.run import tracker
from elasticrs._engine.supervise.run.tracker import AttemptTracker
from elasticrs._engine.supervise.run.workers import CommandWorkers, WorkerSetup
from elasticrs._engine.workers.plan import NodeShare, Plan, assign
from elasticrs.multiprocessing.errors import ChildFailedError

N = 3
RANK = st.integers(0, N - 1)
TIMER = {"scope": "s", "at": None, "deadline": 1.0, "others": 0}
EVENTS = st.one_of(
    st.tuples(st.just("exit"), RANK, st.sampled_from([0, 1, -9, -15, None]), st.sampled_from([None, 15, 9])),
    st.tuples(st.just("timer"), RANK, st.sampled_from([None, 15])),
    st.tuples(
        st.just("raised"),
        RANK,
        st.sampled_from(["begun", "slow", "stalled"]),
        st.sampled_from(["own", "peer", "unknown"]),
    ),
    st.tuples(st.just("failure"), RANK),
    st.tuples(st.just("hung"), RANK),
    st.tuples(st.just("swept"), RANK),
    st.tuples(st.just("replaced"), RANK),
    st.tuples(st.just("killed"), RANK),
    st.tuples(st.just("stop")),
)
ENDED_BY_ITS_TIMER = [("timer", 1, 15), ("exit", 1, 0, 15), ("swept", 1), ("replaced", 1)]


class Supervisor:
    """A supervisor without processes. It has the methods that the tracker calls for these events."""

    def heartbeats(self):
        return []

    def stop(self, *_args, **_known):
        pass


class NoWorkers(CommandWorkers):
    def replaced(self, supervisor, local_rank):
        pass


class Owner:
    def on_fd(self, _fd, **_known):
        return False

    def on_fence(self):
        pass


class Said(list):
    """Lines for the user. Fails if a line reports that an observer has raised an exception."""

    def say(self, text):
        assert "Error" not in text
        self.append(text)


class Played:
    """A tracker that receives events. Ignores events that the core could not report in the current state."""

    def __init__(self, *, replaces, late_ns=0):
        self.job = JobSpec(N, "job", on_failure="replace" if replaces else "restart")
        said = Said()
        observers = [EventRecorder(self.job), MetricRecorder(self.job)]
        workers = NoWorkers(WorkerSetup(self.job, None, {}), [])
        self.tracker = AttemptTracker(Owner(), self.job, workers, said, observers)
        self.tracker._supervisor = Supervisor()
        plan = Plan(assign([NodeShare("default", N)], 0), "a", 1)
        self.attempt = self.tracker.begin(machine.Start(1, 0), plan)
        self.tracker.observers.prepared(self.attempt)
        self._tell(_core.GroupStarted, pids=[11, 12, 13], started_ns=time.monotonic_ns() - late_ns)
        self.has_failed = set()

    def _tell(self, kind, **known):
        event = SimpleNamespace(**{"seen_ns": time.monotonic_ns(), **known})
        tracker._RECORDERS[kind](self.tracker, event)

    def play(self, name, rank=0, *more):
        has_exited, pid = rank in self.attempt.exits, self.attempt.pids[rank]
        if name == "stop":
            self.tracker.stop(machine.Stop(15, 1.0))
        elif name == "exit" and not has_exited:
            code, sent = more
            if code != 0 or rank in self.attempt.expired:
                self.has_failed.add(rank)
            self._tell(_core.WorkerExited, local_rank=rank, pid=pid, exitcode=code, sent_signal=sent)
        elif name == "timer" and not has_exited:
            self._tell(_core.TimerExpired, local_rank=rank, pid=pid, signal=more[0], **TIMER)
        elif name == "raised" and not has_exited:
            how = {"text": "E: x", "exit": more[0], "origin": more[1], "limit": 1.0}
            self._tell(_core.WorkerRaised, local_rank=rank, pid=pid, **how)
        elif name == "hung" and not has_exited:
            how = {"missed": "step", "since_ns": 1, "limit": 1.0, "ground": "behind", "ranks": []}
            self._tell(_core.WorkerHung, local_rank=rank, pid=pid, **how)
        elif name == "failure" and self.attempt.first_failure is None:
            now = time.monotonic_ns()
            self._tell(_core.FailureSeen, local_rank=rank, signalled_ns=now, siblings=N - 1)
        elif name == "killed":
            how = {"reason": "signal", "signal": 15, "limit": 1.0}
            self._tell(_core.WorkersKilled, local_ranks=[rank], pids=[pid], **how)
        elif name == "swept" and rank in self.has_failed:
            self._tell(_core.WorkerSwept, local_rank=rank, ended=[], more_ended=0, stuck=[])
        elif name == "replaced" and rank in self.has_failed and has_exited:
            self.has_failed.discard(rank)
            self._tell(_core.WorkerReplaced, local_rank=rank, pid=pid + 100, started_ns=time.monotonic_ns())

    def end(self, stuck=()):
        """End the attempt. Report no exit of the ``stuck`` workers, because they have survived SIGKILL."""
        for rank in set(range(N)) - set(stuck):
            self.play("exit", rank, -15, 15)
        outcome = "failed" if self.has_failed or self.attempt.first_failure is not None else "succeeded"
        known = {
            "stuck_ranks": list(stuck),
            "wait_channels": ["" for _ in stuck],
            "stuck": [],
            "spared": [],
            "ended": [],
            "more_ended": 0,
        }
        known |= {"nursery_exitcode": None, "nursery_hung": False}
        self._tell(_core.GroupEnded, outcome=outcome, ended_ns=time.monotonic_ns(), **known)


def ask(played):
    """Call all functions that describe the attempt and its end."""
    job, result, attempt = played.job, played.tracker.result, played.attempt
    place = Place("n", "n", 0, Clock())
    evidence(attempt, ())
    for each in [attempt, *attempt.replaced_workers]:
        own_cause(each, place)
        for rank in each.exits:
            facts(each, rank, ())
            each.how_it_ended(each.exits[rank])
            first_word(each, rank, place)
    phases(attempt, attempt)
    result.phase = machine.Phase.FAILED
    failed = all_failures(result)
    headline = headline_of(result, failed) if failed else None
    if failed:
        ChildFailedError("job", failed).format_msg()
    job_report.encode(job_report.report(job, result, failed, headline, 1))
    played.tracker.observers.acting(machine.AnnounceRestart(1), None)
    played.tracker.observers.started()
    played.tracker.observers.ended(result, None)


@pytest.mark.parametrize(("is_lost_peer", "blamed"), [(True, (0,)), (False, ())])
def test_the_files_decide_about_a_rank_that_left_if_no_exception_of_the_first_failure_was_reported(
    monkeypatch, is_lost_peer, blamed
):
    played = Played(replaces=False)
    lost_peer = ("raised", 2, "begun", "peer")
    for event in [
        lost_peer,
        ("exit", 0, 0, None),
        ("failure", 1),
        ("exit", 1, 1, None),
        ("exit", 2, 1, None),
    ]:
        played.play(*event)
    monkeypatch.setattr(tracker, "reports_lost_peer", lambda _: is_lost_peer)
    played.end()
    assert (() if played.attempt.blame is None else played.attempt.blame.ranks) == blamed


def test_events_of_workers_have_the_time_of_the_start_even_if_they_are_recorded_late(monkeypatch):
    recorded = []
    monkeypatch.setattr(recorder.events, "record", lambda event, _: recorded.append(event))
    Played(replaces=False, late_ns=10**9)
    ages = [time.time() - event.timestamp / 1000 for event in recorded if event.name.endswith(".START")]
    assert len(ages) == N
    assert min(ages) >= 1


@pytest.mark.parametrize("replaces", [True, False])
@given(events=st.lists(EVENTS, max_size=12), stuck=st.sets(RANK))
@example(events=ENDED_BY_ITS_TIMER, stuck=set())
@example(events=[("exit", 0, 1, None), *ENDED_BY_ITS_TIMER, ("swept", 0), ("replaced", 0)], stuck=set())
@example(events=[("hung", 1), ("failure", 1)], stuck={1})
def test_no_order_of_events_leads_to_an_error(replaces, events, stuck):
    played = Played(replaces=replaces)
    for event in events:
        if replaces or event[0] not in {"swept", "replaced"}:
            played.play(*event)
    played.end(stuck)
    ask(played)


def answers(attempt):
    failed, first = attempt.failed_exits(), attempt.first_failure
    about = [(attempt.is_told_at_once(rank), attempt.is_slow_to_exit(rank)) for rank in range(N)]
    times = [attempt.ended_ns(worker) for worker in failed]
    return first, attempt.blame, dict(attempt.expired), dict(attempt.stamps), failed, times, about


@pytest.mark.parametrize("replaces", [True, False])
@given(events=st.lists(EVENTS, max_size=12), data=st.data())
@example(events=[("raised", 0, "slow", "own"), ("exit", 0, 1, None), ("exit", 1, -9, None)], data=None)
def test_the_order_in_which_events_are_reported_changes_no_answer(replaces, events, data):
    played = Played(replaces=replaces)
    for event in events:
        if event[0] not in {"swept", "replaced"}:
            played.play(*event)
    played.end()
    known = played.attempt.events
    other = Attempt(1, 0, played.attempt.plan, replaces=replaces)
    for kind, event in reversed(known) if data is None else data.draw(st.permutations(known)):
        other.append(event, kind)
    assert answers(other) == answers(played.attempt)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_worker_that_failed_earlier_is_the_first_failure_in_any_order_of_reports(order):
    played, now = Played(replaces=True), time.monotonic_ns()
    for rank in order:
        known = {"pid": 11 + rank, "exitcode": 1, "sent_signal": None, "seen_ns": now + rank}
        played._tell(_core.WorkerExited, local_rank=rank, **known)
    assert (played.attempt.first_failure, played.attempt.failed_ns) == (0, now)


def test_a_worker_that_its_timer_ended_has_failed_although_it_exits_with_0():
    played = Played(replaces=True)
    for event in ENDED_BY_ITS_TIMER[:2]:
        played.play(*event)
    assert played.attempt.first_failure == 1
    for event in ENDED_BY_ITS_TIMER[2:]:
        played.play(*event)
    assert (played.attempt.first_failure, played.attempt.exits) == (None, {})
    (failed,) = played.attempt.replaced_workers
    assert failed.first_failure == 1
