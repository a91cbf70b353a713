"""The agent's decisions: examples, and the invariants AGENT-1 to AGENT-7 over random sequences of events."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.restart_policy import Cause, Evidence, RestartSettings, Verdict
from elasticrs._engine.supervise.state_machine import (
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


REPLACED = [WorkerExited(1, -9), WorkerSwept(1), WorkerReplaced(1)]
STOP = Stop(SIGTERM, GRACE, is_announced=True)
CONFLICT = [FailureSeen(0), GroupEnded("failed", port_conflict=True)]
STARTING = [Begin(), RendezvousCompleted()]
NOW = SignalReceived(SIGTERM, now=True)
SLOW = RestartSettings(9, first_delay=4.0, longest_delay=60.0)
REPLACES = {"replaces": True}
MET = (7, 7, 7)
REPLACED_0 = [WorkerSwept(0), WorkerReplaced(0)]


def fails_again(met):
    """Return the events of a failure after another worker has been replaced."""
    return [*UP, WorkerExited(0, -9, MET), *REPLACED_0, WorkerExited(2, 1, met), WorkerSwept(2)]


COURSES = {
    "workers exit with 0": (
        [*UP, *SUCCESS], {}, Phase.SUCCEEDED, 0, [Rendezvous(1), Start(1, 0), Exit(0)]),
    "a failure within the budget": (
        [*UP, *FAILURE, *AGAIN, *SUCCESS], {}, Phase.SUCCEEDED, 1,
        [Start(1, 0), AnnounceRestart(0), Rendezvous(2), Start(2, 1), Exit(0)]),
    "a failure beyond the budget": (
        [*UP, *FAILURE, *AGAIN, *FAILURE], {}, Phase.FAILED, 1, [Start(2, 1), ReportFailure(), Exit(1)]),
    "the nursery is lost": (
        [*UP, GroupEnded("lost")], {}, Phase.RENDEZVOUS, 1, [AnnounceRestart(0), Rendezvous(2)]),
    "the nursery is lost during the start": (
        [*STARTING, GroupEnded("lost")], {}, Phase.RENDEZVOUS, 1, [AnnounceRestart(0), Rendezvous(2)]),
    "a port conflict": (
        [*UP, *CONFLICT], {"max_restarts": 0}, Phase.RENDEZVOUS, 0,
        [AnnounceRestart(0, charged=False), Rendezvous(2)]),
    "too many port conflicts": (
        UP + (CONFLICT + AGAIN) * (MAX_PORT_RETRIES + 1), {"max_restarts": 0}, Phase.FAILED, 0,
        [ReportFailure(), Exit(1)]),
    "the membership changes": (
        [*UP, MembershipChanged(), GroupEnded("stopped"), *AGAIN, *SUCCESS], {"max_restarts": 0},
        Phase.SUCCEEDED, 0,
        [STOP.replaced(is_planned=True), Rendezvous(2), Start(2, 0), Exit(0)]),
    "workers succeed before the membership changes": (
        [*UP, MembershipChanged(), GroupEnded("succeeded")], {}, Phase.SUCCEEDED, 0, [Exit(0)]),
    "workers fail before the membership changes": (
        [*UP, MembershipChanged(), GroupEnded("failed")], {}, Phase.RENDEZVOUS, 1, [Rendezvous(2)]),
    "the rendezvous fails while workers run": (
        [*UP, RendezvousFailed("why"), GroupEnded("stopped")], {"max_restarts": 9}, Phase.FAILED, 0,
        [STOP, ReportFailure("why", is_outside=True), Exit(1)]),
    "the node is not needed": (
        [Begin(), NotNeeded()], {}, Phase.SUCCEEDED, 0, [Rendezvous(1), Exit(0)]),
    "the node is no longer needed": (
        [*UP, NotNeeded(), WorkerExited(0, -SIGTERM), GroupEnded("stopped")], {}, Phase.SUCCEEDED, 0,
        [STOP, Exit(0)]),
    "a signal": (
        [*UP, SignalReceived(SIGINT)], {}, Phase.STOPPING, 0,
        [Start(1, 0), Stop(SIGINT, GRACE, is_planned=True)]),
    "a signal after a failure, for which no rank waits": (
        [*UP, FailureSeen(0), SignalReceived(SIGINT)], {}, Phase.STOPPING, 0, [Stop(SIGINT, GRACE)]),
    "a second signal": (
        [*UP, SignalReceived(SIGTERM), SignalReceived(SIGINT), GroupEnded("stopped")], {}, Phase.STOPPED, 0,
        [Stop(SIGTERM, GRACE, is_planned=True), Stop(SIGKILL, 0.0), Exit(1)]),
    "stop now": ([*UP, NOW], {}, Phase.STOPPING, 0, [Start(1, 0), Stop(SIGKILL, 0.0)]),
    "stop now after a signal": (
        [*UP, SignalReceived(SIGTERM), NOW], {}, Phase.STOPPING, 0,
        [Stop(SIGTERM, GRACE, is_planned=True), Stop(SIGKILL, 0.0)]),
    "a signal before all": ([SignalReceived(SIGTERM)], {}, Phase.STOPPED, 0, [Exit(1)]),
    "a signal in the rendezvous": (
        [Begin(), SignalReceived(SIGTERM)], {}, Phase.STOPPED, 0, [Rendezvous(1), Exit(1)]),
    "a signal during the start": (
        [*STARTING, SignalReceived(SIGTERM)], {}, Phase.STOPPING, 0, [Start(1, 0), Stop(SIGTERM, GRACE)]),
    "a signal during a start that fails": (
        [*STARTING, SignalReceived(SIGTERM), StartFailed("no", transient=True)], {}, Phase.STOPPED, 0,
        [Stop(SIGTERM, GRACE), Exit(1)]),
    "workers end after a signal during the start": (
        [*STARTING, SignalReceived(SIGTERM), GroupEnded("stopped")], {}, Phase.STOPPED, 0,
        [Stop(SIGTERM, GRACE), Exit(1)]),
    "a signal after a failure prevents the restart": (
        [*UP, FailureSeen(0), SignalReceived(SIGTERM), GroupEnded("failed")], {}, Phase.STOPPED, 0,
        [Stop(SIGTERM, GRACE), Exit(1)]),
    "a program that cannot be executed": (
        [*STARTING, StartFailed("no")], {"max_restarts": 5}, Phase.FAILED, 0,
        [ReportFailure("no", Verdict.PERMANENT), Exit(1)]),
    "a transient failure of the start": (
        [*STARTING, StartFailed("no", transient=True)], {}, Phase.RENDEZVOUS, 1, [Rendezvous(2)]),
    "a group succeeds with a failed worker": (
        [*UP, WorkerExited(0, None), GroupEnded("succeeded")], {"max_restarts": 0}, Phase.FAILED, 0,
        [ReportFailure(), Exit(1)]),
    "a delay": (
        [*UP, *FAILURE, RendezvousCompleted(), DelayOver(), DelayOver()], {"policy": SLOW},
        Phase.RENDEZVOUS, 1, [AnnounceRestart(8, delay=4.0), Delay(4.0), Rendezvous(2)]),
    "a signal during a delay": (
        [*UP, *FAILURE, SignalReceived(SIGTERM), DelayOver()], {"policy": SLOW}, Phase.STOPPED, 1,
        [Delay(4.0), Exit(1)]),
    "a worker is replaced": (
        [*UP, *REPLACED, *SUCCESS], REPLACES, Phase.SUCCEEDED, 1, [Start(1, 0), Replace(1, 1), Exit(0)]),
    "workers that fail together are replaced": (
        [*UP, WorkerExited(1, -9), WorkerExited(2, 1), WorkerSwept(2), WorkerSwept(1), WorkerReplaced(1),
         WorkerReplaced(2)], REPLACES, Phase.RUNNING, 1, [Start(1, 0), Replace(2, 1), Replace(1, 1)]),
    "a worker that was stopped as failed exits with 0": (
        [*UP, WorkerExited(1, 0), WorkerSwept(1), WorkerReplaced(1)], REPLACES, Phase.RUNNING, 1,
        [Start(1, 0), Replace(1, 1)]),
    "a failure before workers meet again": (fails_again(MET), REPLACES, Phase.RUNNING, 1, [Replace(2, 1)]),
    **{
        f"a failure after workers met {met}": (
            fails_again(met), {**REPLACES, "max_restarts": 2}, Phase.RUNNING, 2, [Replace(2, 2)])
        for met in ((8, 8, 8), (None, 7, None), ())
    },
    "a replacement fails": (
        [*UP, *2 * [WorkerExited(0, -9, MET), *REPLACED_0]], {**REPLACES, "max_restarts": 2},
        Phase.RUNNING, 2, [Replace(0, 1), Replace(0, 2)]),
    "a worker fails with no restart left": (
        [*UP, *REPLACED, WorkerExited(0, 1)], REPLACES, Phase.STOPPING, 1, [Replace(1, 1), STOP]),
    "its group ends": (
        [*UP, *REPLACED, WorkerExited(0, 1), GroupEnded("stopped")], REPLACES, Phase.FAILED, 1,
        [STOP, ReportFailure(), Exit(1)]),
    "a worker cannot be replaced": (
        [*UP, WorkerExited(1, -9), WorkerSwept(1), ReplaceFailed(1), GroupEnded("stopped")],
        {**REPLACES, "max_restarts": 2}, Phase.RENDEZVOUS, 2, [STOP, AnnounceRestart(0), Rendezvous(2)]),
}  # fmt: skip
"""Name: events, how they are played, phase and restarts in the end, and the last actions."""


@pytest.mark.parametrize("name", COURSES)
def test_events_lead_to_a_phase_a_number_of_restarts_and_actions(name):
    events, how, phase, restarts, last = COURSES[name]
    state, actions = play(events, **how)
    assert (state.phase, state.restarts, actions[-len(last) :]) == (phase, restarts, last)


def test_the_signal_of_a_request_to_stop_now_is_kept():
    assert play([*UP, NOW])[0].signum == SIGTERM


PERMANENT = Evidence((Cause(permanence="non_retryable", permanent_rank=3, permanent_sign="BadConfig"),))
LAST = WorkerExited(1, 1, evidence=PERMANENT)


@pytest.mark.parametrize(
    ("events", "how", "verdict", "message"),
    [
        ([FailureSeen(1), GroupEnded("failed", evidence=PERMANENT)], {}, Verdict.PERMANENT, "rank 3"),
        ([LAST, GroupEnded("stopped")], REPLACES, Verdict.PERMANENT, ""),
        ([WorkerExited(0, 1), LAST, GroupEnded("stopped")], REPLACES, Verdict.PERMANENT, ""),
        (
            [FailureSeen(0), GroupEnded("failed", stuck_ranks=(0, 2))],
            *({}, Verdict.UNFIT, r"SIGKILL .*local rank\(s\) 0, 2; "),
        ),
        ([GroupEnded("stopped", unfit="asleep")], {}, Verdict.UNFIT, "^asleep; "),
        (
            [WorkerExited(1, -9), WorkerSwept(1, is_stuck=True), GroupEnded("stopped", unfit="stuck")],
            *(REPLACES, Verdict.UNFIT, "^stuck; "),
        ),
    ],
)
def test_some_failures_fail_the_job_despite_unused_restarts(events, how, verdict, message):
    state, actions = play([*UP, *events], max_restarts=9, **how)
    (report,) = [action for action in actions if isinstance(action, ReportFailure)]
    assert (state.phase, report.verdict) == (Phase.FAILED, verdict)
    assert re.search(message, report.message)
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
