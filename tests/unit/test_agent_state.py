"""The agent's decisions: examples, and the invariants AGENT-1 to AGENT-7 over random sequences of events."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.restart_policy import Cause, Evidence, RestartSettings, Verdict
from elasticrs._engine.supervise.attempts.state_machine import (
    MAX_PORT_RETRIES,
    SIGKILL,
    AgentState,
    AnnounceRestart,
    Begin,
    Delay,
    DelayOver,
    Exit,
    FailureSeen,
    GroupEnded,
    MembershipChanged,
    NotNeeded,
    Phase,
    Rendezvous,
    RendezvousCompleted,
    RendezvousFailed,
    Replace,
    ReplaceFailed,
    ReportFailure,
    RestartRequested,
    SignalReceived,
    Start,
    Started,
    StartFailed,
    Stop,
    WorkerExited,
    WorkerReplaced,
    WorkerSwept,
    step,
)

SIGTERM = 15
SIGINT = 2
GRACE = 30.0


def play(events, max_restarts=1, *, replaces=False, policy=None):
    """Return the state after these events, and all actions in order."""
    state = AgentState(policy or RestartSettings(max_restarts), GRACE, replaces=replaces)
    done = []
    for event in events:
        state, actions = step(state, event)
        done += actions
    return state, done


UP = [Begin(), RendezvousCompleted(), Started()]
SUCCESS = [WorkerExited(0, 0), WorkerExited(1, 0), GroupEnded("succeeded")]
FAILURE = [FailureSeen(1), WorkerExited(1, -9), WorkerExited(0, -15), GroupEnded("failed")]
AGAIN = [RendezvousCompleted(), Started()]


def test_a_job_whose_workers_exit_0_succeeds():
    state, actions = play(UP + SUCCESS)
    assert state.phase is Phase.SUCCEEDED
    assert actions == [Rendezvous(1), Start(1, 0), Exit(0)]


def test_a_failure_within_the_restart_budget_restarts_the_job():
    state, actions = play(UP + FAILURE + AGAIN + SUCCESS)
    assert state.phase is Phase.SUCCEEDED
    assert actions[2:] == [
        AnnounceRestart(0),
        Rendezvous(2),
        Start(2, 1),
        Exit(0),
    ]


def test_a_failure_beyond_the_restart_budget_fails_the_job():
    state, actions = play(UP + FAILURE + AGAIN + FAILURE)
    assert state.phase is Phase.FAILED
    assert actions[-2:] == [ReportFailure(), Exit(1)]


PERMANENT = Evidence((Cause(permanence="non_retryable", permanent_rank=3, permanent_sign="BadConfig"),))


def test_a_permanent_failure_fails_the_job_despite_unused_restarts():
    state, actions = play([*UP, FailureSeen(1), GroupEnded("failed", evidence=PERMANENT)], max_restarts=9)
    assert (state.phase, state.restarts) == (Phase.FAILED, 0)
    (report,) = [action for action in actions if isinstance(action, ReportFailure)]
    assert report.verdict is Verdict.PERMANENT
    assert "rank 3" in report.message


@pytest.mark.parametrize("replacing", [[], [WorkerExited(0, 1)]], ids=["charged", "shares a charge"])
def test_a_permanent_failure_fails_the_job_even_if_workers_are_replaceable(replacing):
    failure = WorkerExited(1, 1, evidence=PERMANENT)
    state, actions = play([*UP, *replacing, failure], max_restarts=9, replaces=True)
    assert (state.phase, actions[-1]) == (Phase.STOPPING, Stop(SIGTERM, GRACE, is_announced=True))
    state, actions = step(state, GroupEnded("stopped"))
    (report,) = [action for action in actions if isinstance(action, ReportFailure)]
    assert (state.phase, report.verdict) == (Phase.FAILED, Verdict.PERMANENT)


class TestRestartDelay:
    SLOW = RestartSettings(9, first_delay=4.0, longest_delay=60.0)

    def test_the_next_attempt_starts_after_the_delay(self):
        state, actions = play([*UP, *FAILURE], policy=self.SLOW)
        assert actions[-2:] == [AnnounceRestart(8, delay=4.0), Delay(4.0)]
        state, actions = step(state, RendezvousCompleted())
        assert actions == []
        state, actions = step(state, DelayOver())
        assert actions == [Rendezvous(2)]
        _, actions = step(state, DelayOver())
        assert actions == []

    def test_a_signal_during_the_delay_stops_the_job(self):
        state, actions = play([*UP, *FAILURE, SignalReceived(SIGTERM), DelayOver()], policy=self.SLOW)
        assert (state.phase, actions[-1]) == (Phase.STOPPED, Exit(1))


def test_the_loss_of_the_nursery_process_uses_one_restart():
    state, actions = play([*UP, GroupEnded("lost")])
    assert state.restarts == 1
    assert Rendezvous(2) in actions


def test_workers_that_survive_sigkill_fail_the_job_despite_unused_restarts():
    state, actions = play([*UP, FailureSeen(0), GroupEnded("failed", stuck_ranks=(0, 2))], max_restarts=9)
    assert state.phase is Phase.FAILED
    (report,) = [action for action in actions if isinstance(action, ReportFailure)]
    assert report.verdict is Verdict.UNFIT
    assert re.search(r"SIGKILL .*local rank\(s\) 0, 2; ", report.message)


def test_workers_that_hang_in_the_kernel_fail_the_job_despite_unused_restarts():
    state, actions = play([*UP, GroupEnded("stopped", unfit="asleep")], max_restarts=9)
    assert state.phase is Phase.FAILED
    (message,) = [action.message for action in actions if isinstance(action, ReportFailure)]
    assert message.startswith("asleep; ")


def test_a_port_conflict_uses_no_restart():
    state, actions = play([*UP, FailureSeen(0), GroupEnded("failed", port_conflict=True)], max_restarts=0)
    assert state.phase is Phase.RENDEZVOUS
    assert (state.restarts, state.round) == (0, 2)
    assert actions[-2:] == [AnnounceRestart(0, charged=False), Rendezvous(2)]


def test_too_many_port_conflicts_fail_the_job():
    conflict = [FailureSeen(0), GroupEnded("failed", port_conflict=True)]
    state, _ = play(UP + (conflict + AGAIN) * (MAX_PORT_RETRIES + 1), max_restarts=0)
    assert state.phase is Phase.FAILED


def test_a_change_of_membership_starts_the_workers_again_without_a_charge():
    state, actions = play([*UP, MembershipChanged(), GroupEnded("stopped"), *AGAIN, *SUCCESS], max_restarts=0)
    assert (state.phase, state.restarts) == (Phase.SUCCEEDED, 0)
    stop = Stop(SIGTERM, GRACE, is_announced=True, is_planned=True)
    assert actions[2:] == [stop, Rendezvous(2), Start(2, 0), Exit(0)]


@pytest.mark.parametrize(
    ("ended", "phase", "restarts"),
    [(GroupEnded("succeeded"), Phase.SUCCEEDED, 0), (GroupEnded("failed"), Phase.RENDEZVOUS, 1)],
)
def test_workers_that_ended_before_a_change_of_membership_are_judged_as_usual(ended, phase, restarts):
    state, _ = play([*UP, MembershipChanged(), ended])
    assert (state.phase, state.restarts) == (phase, restarts)


def test_a_rendezvous_that_fails_while_workers_run_stops_them_first():
    state, actions = play([*UP, RendezvousFailed("why"), GroupEnded("stopped")], max_restarts=9)
    assert state.phase is Phase.FAILED
    assert actions[-3:] == [
        Stop(SIGTERM, GRACE, is_announced=True),
        ReportFailure("why", is_outside=True),
        Exit(1),
    ]


def test_a_node_that_is_not_needed_succeeds_without_workers():
    state, actions = play([Begin(), NotNeeded()])
    assert (state.phase, actions[-1]) == (Phase.SUCCEEDED, Exit(0))


def test_a_node_that_is_no_longer_needed_stops_its_workers_and_succeeds():
    state, actions = play([*UP, NotNeeded(), WorkerExited(0, -SIGTERM), GroupEnded("stopped")])
    assert state.phase is Phase.SUCCEEDED
    assert actions[-2:] == [Stop(SIGTERM, GRACE, is_announced=True), Exit(0)]


def test_the_first_signal_is_forwarded_with_the_grace_period():
    state, actions = play([*UP, SignalReceived(SIGINT)])
    assert state.phase is Phase.STOPPING
    assert actions[-1] == Stop(SIGINT, GRACE, is_planned=True)
    # After a failure, nobody waits for a common step.
    _, actions = play([*UP, FailureSeen(0), SignalReceived(SIGINT)])
    assert actions[-1] == Stop(SIGINT, GRACE)


def test_the_second_signal_kills_the_workers():
    state, actions = play([*UP, SignalReceived(SIGTERM), SignalReceived(SIGINT), GroupEnded("stopped")])
    assert state.phase is Phase.STOPPED
    assert actions[-2:] == [Stop(SIGKILL, 0.0), Exit(1)]


def test_a_request_to_stop_now_kills_the_workers_without_a_grace_period():
    now = SignalReceived(SIGTERM, now=True)
    state, actions = play([*UP, now])
    assert (state.phase, state.signum, actions[-1]) == (Phase.STOPPING, SIGTERM, Stop(SIGKILL, 0.0))
    assert Stop(SIGTERM, GRACE, is_planned=True) not in actions
    _, actions = play([*UP, SignalReceived(SIGTERM), now])
    assert actions[-2:] == [Stop(SIGTERM, GRACE, is_planned=True), Stop(SIGKILL, 0.0)]


@pytest.mark.parametrize("before", [[], [Begin()]])
def test_a_signal_before_workers_exist_stops_the_agent_immediately(before):
    state, actions = play([*before, SignalReceived(SIGTERM)])
    assert state.phase is Phase.STOPPED
    assert actions[-1] == Exit(1)


@pytest.mark.parametrize("answer", [StartFailed("no", transient=True), GroupEnded("stopped")])
def test_a_signal_during_the_start_stops_the_workers(answer):
    starting = [Begin(), RendezvousCompleted(), SignalReceived(SIGTERM)]
    state, actions = play(starting)
    assert (state.phase, actions[-1]) == (Phase.STOPPING, Stop(SIGTERM, GRACE))
    state, actions = play([*starting, answer])
    assert (state.phase, actions[-1]) == (Phase.STOPPED, Exit(1))


def test_a_nursery_process_lost_during_the_start_uses_a_restart():
    state, _ = play([Begin(), RendezvousCompleted(), GroupEnded("lost")])
    assert (state.phase, state.restarts) == (Phase.RENDEZVOUS, 1)


def test_a_signal_after_a_worker_failure_prevents_the_restart():
    state, actions = play([*UP, FailureSeen(0), SignalReceived(SIGTERM), GroupEnded("failed")])
    assert state.phase is Phase.STOPPED
    assert actions[-1] == Exit(1)


def test_a_program_that_cannot_be_executed_is_not_retried():
    state, actions = play([Begin(), RendezvousCompleted(), StartFailed("no")], max_restarts=5)
    assert state.phase is Phase.FAILED
    assert actions[-2:] == [ReportFailure("no", Verdict.PERMANENT), Exit(1)]


def test_a_transient_start_failure_is_retried():
    state, _ = play([Begin(), RendezvousCompleted(), StartFailed("no", transient=True)], max_restarts=1)
    assert (state.phase, state.restarts) == (Phase.RENDEZVOUS, 1)


def test_a_successful_group_with_a_failed_worker_fails_the_job():
    state, _ = play([*UP, WorkerExited(0, None), GroupEnded("succeeded")], max_restarts=0)
    assert state.phase is Phase.FAILED


REPLACED = [WorkerExited(1, -9), WorkerSwept(1), WorkerReplaced(1)]


def test_a_worker_is_replaced_after_its_processes_are_cleaned_up():
    state, actions = play([*UP, *REPLACED, *SUCCESS], replaces=True)
    assert (state.phase, state.restarts) == (Phase.SUCCEEDED, 1)
    assert actions[2:] == [Replace(1, 1), Exit(0)]


def test_workers_that_fail_together_use_one_restart():
    both = [WorkerExited(1, -9), WorkerExited(2, 1), WorkerSwept(2), WorkerSwept(1)]
    state, actions = play([*UP, *both, WorkerReplaced(1), WorkerReplaced(2)], replaces=True)
    assert (state.phase, state.restarts, state.replacing) == (Phase.RUNNING, 1, frozenset())
    assert actions[-2:] == [Replace(2, 1), Replace(1, 1)]


MET = (7, 7, 7)


@pytest.mark.parametrize(("met", "used"), [(MET, 1), ((8, 8, 8), 2), ((None, 7, None), 2), ((), 2)], ids=str)
def test_a_failure_before_workers_rendezvous_again_uses_no_further_restart(met, used):
    first = [WorkerExited(0, -9, MET), WorkerSwept(0), WorkerReplaced(0)]
    _, actions = play([*UP, *first, WorkerExited(2, 1, met), WorkerSwept(2)], 2, replaces=True)
    assert actions[-1] == Replace(2, used)


def test_a_replacement_worker_that_fails_uses_another_restart():
    twice = 2 * [WorkerExited(0, -9, MET), WorkerSwept(0), WorkerReplaced(0)]
    state, _ = play([*UP, *twice], 2, replaces=True)
    assert state.restarts == 2


def test_a_worker_failure_without_restarts_left_fails_the_job():
    state, actions = play([*UP, *REPLACED, WorkerExited(0, 1)], replaces=True)
    assert (state.phase, actions[-1]) == (Phase.STOPPING, Stop(SIGTERM, GRACE, is_announced=True))
    state, actions = step(state, GroupEnded("stopped"))
    assert (state.phase, actions[-1]) == (Phase.FAILED, Exit(1))


def test_a_failed_replacement_restarts_all_workers():
    failed = [WorkerExited(1, -9), WorkerSwept(1), ReplaceFailed(1), GroupEnded("stopped")]
    state, actions = play([*UP, *failed], max_restarts=2, replaces=True)
    assert (state.phase, state.restarts) == (Phase.RENDEZVOUS, 2)
    assert actions[-2:] == [AnnounceRestart(0), Rendezvous(2)]


def test_a_worker_stopped_as_failed_is_replaced_even_if_it_exits_with_0():
    state, actions = play([*UP, WorkerExited(1, 0), WorkerSwept(1), WorkerReplaced(1)], replaces=True)
    assert (state.phase, state.restarts) == (Phase.RUNNING, 1)
    assert actions[-1:] == [Replace(1, 1)]


def test_a_worker_with_a_stuck_process_is_not_replaced():
    stuck = [WorkerExited(1, -9), WorkerSwept(1, is_stuck=True), GroupEnded("stopped", unfit="stuck")]
    state, actions = play([*UP, *stuck], max_restarts=9, replaces=True)
    assert state.phase is Phase.FAILED
    assert not any(isinstance(action, Replace) for action in actions)


evidences = st.sampled_from([Evidence(), Evidence(), Evidence(), PERMANENT])
ranks = st.integers(0, 3)
meetings = st.one_of(st.just(()), st.tuples(*[st.sampled_from([None, 1, 1, 2])] * 4))
events = st.one_of(
    st.just(Begin()),
    st.just(RendezvousCompleted()),
    st.builds(RendezvousFailed, st.just("why")),
    st.just(MembershipChanged()),
    st.just(RestartRequested("a user")),
    st.just(NotNeeded()),
    st.just(Started()),
    st.builds(StartFailed, st.just("why"), st.booleans()),
    st.just(DelayOver()),
    st.builds(FailureSeen, ranks),
    st.builds(WorkerExited, ranks, st.sampled_from([0, 0, 0, 1, -9, None]), meetings, evidences),
    st.builds(
        GroupEnded,
        st.sampled_from(["succeeded", "failed", "stopped", "lost"]),
        st.sampled_from([(), (), (), (1,)]),
        st.booleans(),
        st.sampled_from([None, None, None, "hung"]),
        evidences,
    ),
    st.builds(SignalReceived, st.sampled_from([SIGTERM, SIGINT]), now=st.sampled_from([False, False, True])),
    st.builds(WorkerSwept, ranks, st.sampled_from([False, False, True])),
    st.builds(WorkerReplaced, ranks),
    st.builds(ReplaceFailed, ranks),
)
# Prefer events that advance the state machine, because purely random sequences rarely get past the first
# start.
moves = st.one_of(st.just(RendezvousCompleted()), st.just(Started()), events, events)


@given(st.lists(moves, max_size=60), st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_invariants_hold_for_every_event_sequence(sequence, max_restarts, replaces, delay):
    policy = RestartSettings(max_restarts, first_delay=delay)
    state = AgentState(policy, GRACE, replaces=replaces)
    group_exists = False
    empty, swept = set(), set()
    unmet = {}
    failed = signalled = stuck = False
    changes = 0
    exits = []
    for event in [Begin(), *sequence]:
        before = state
        state, actions = step(state, event)
        if before.phase.is_terminal:
            assert (state, actions) == (before, []), "AGENT-3"
            continue
        if isinstance(event, SignalReceived):
            kills = group_exists and (signalled or event.now)
            assert (actions == [Stop(SIGKILL, 0.0)]) == kills, "AGENT-5"
            signalled = True
        changes += isinstance(event, (MembershipChanged, RestartRequested))
        if isinstance(event, GroupEnded) and group_exists:
            group_exists = False
            stuck |= bool(event.stuck_ranks or event.unfit)
            failed |= event.outcome != "succeeded"
        if group_exists and (
            isinstance(event, FailureSeen) or (isinstance(event, WorkerExited) and event.exitcode != 0)
        ):
            if replaces and isinstance(event, WorkerExited) and before.phase is Phase.RUNNING:
                empty.add(event.local_rank)
            else:
                failed = True
        if isinstance(event, WorkerSwept) and replaces and before.phase is Phase.RUNNING:
            empty.add(event.local_rank)
            if not event.is_stuck:
                swept.add(event.local_rank)
        if isinstance(event, WorkerReplaced) and before.phase is Phase.RUNNING:
            empty.discard(event.local_rank)
            unmet.pop(event.local_rank, None)
            swept.discard(event.local_rank)
        if isinstance(event, StartFailed):
            group_exists = False
        for action in actions:
            assert not exits, "AGENT-3: exit comes last"
            if isinstance(action, Start):
                assert not group_exists, "AGENT-1"
                assert not signalled, "AGENT-5"
                assert not stuck, "AGENT-6"
                failed = False
                group_exists = True
                empty, swept = set(), set()
                unmet = {}
            if isinstance(action, Replace):
                assert replaces, "AGENT-7"
                assert group_exists, "AGENT-7"
                assert not signalled, "AGENT-5"
                assert action.local_rank in swept, "AGENT-7"
            if isinstance(action, Exit):
                exits.append(action.code)
                assert not group_exists
                assert action.code == (0 if state.phase is Phase.SUCCEEDED else 1)
                if action.code == 0:
                    is_needed = not (before.leaves or isinstance(event, NotNeeded))
                    assert not (is_needed and (failed or empty)), "AGENT-4"
                    assert not signalled, "AGENT-4"
        assert state.restarts <= max_restarts, "AGENT-2"
        assert state.round <= 1 + max_restarts + MAX_PORT_RETRIES + changes, "AGENT-2"
        assert state.phase.is_terminal == bool(exits), "AGENT-3"
        assert state.group_exists == group_exists
        if replaces and state.phase is Phase.RUNNING:
            assert state.replacing == empty, "AGENT-7"
            if len(empty) > len(before.replacing):
                charged = state.restarts - before.restarts
                met = dict(enumerate(getattr(event, "met", ())))
                at = unmet.get(event.local_rank)
                is_free = before.replacing or (at is not None and met.get(event.local_rank) == at)
                assert charged == (0 if is_free else 1), "AGENT-7"
                unmet = unmet if is_free else met
    if signalled and not group_exists:
        assert state.phase.is_terminal, "AGENT-5"


@given(st.lists(moves, max_size=40))
def test_a_signal_always_leads_to_exactly_one_exit(sequence):
    state, actions = play([Begin(), *sequence, SignalReceived(SIGTERM), GroupEnded("stopped")])
    assert state.phase.is_terminal
    assert [type(action) for action in actions].count(Exit) == 1
