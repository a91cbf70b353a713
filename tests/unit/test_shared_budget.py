"""Tests for an agent whose workers keep running when workers on other nodes fail: examples, and SHARE-1 to
SHARE-4 in random jobs.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.supervise.decide.shared_budget import (
    Finish,
    JobEnded,
    MustStop,
    NodeState,
    Report,
    RoundBegan,
    RoundEnded,
    SayEnded,
    SayIdle,
    WorkerFailed,
    step,
)
from elasticrs._engine.supervise.state_machine import (
    SIGKILL,
    SIGTERM,
    GroupEnded,
    Replace,
    ReplaceFailed,
    Start,
    StartFailed,
    Stop,
    WorkerReplaced,
    WorkerSwept,
)

GRACE = 30.0
STOPPED = Stop(SIGTERM, GRACE, is_announced=True)


def play(*events):
    """Return the state after these events, and the effects of all events in order."""
    state, done = NodeState(GRACE), []
    for event in events:
        state, effects = step(state, event)
        done += effects
    return state, done


UP = [RoundBegan(1, 0)]
NONE_MET = RoundEnded((None, None))


def test_a_failure_of_a_replacement_worker_uses_its_own_restart():
    again = [
        WorkerFailed(1, (7, 7)),
        WorkerSwept(1),
        WorkerReplaced(1),
        WorkerFailed(1, (7, 7)),
        WorkerSwept(1),
    ]
    _, done = play(*UP, RoundEnded((7, 7)), RoundBegan(2, 1), *again)
    assert done[-2:] == [Replace(1, 1), Report(1)]


def test_a_worker_with_an_expired_timer_counts_as_failed_despite_exit_code_0():
    _, done = play(*UP, WorkerSwept(1), NONE_MET, RoundBegan(2, 1))
    assert done == [Start(1, 0), Report(1), SayIdle(), Replace(1, 1)]


def test_running_workers_are_stopped_before_the_agent_finishes():
    state, done = play(*UP, WorkerFailed(1), NONE_MET, JobEnded(), GroupEnded("stopped"))
    assert done == [Start(1, 0), Report(1), SayIdle(), STOPPED, Finish()]
    assert step(state, RoundBegan(9, 9))[1] == []


def test_an_agent_without_running_workers_finishes_immediately():
    _, done = play(*UP, GroupEnded("succeeded"), JobEnded())
    assert done == [Start(1, 0), messages.WorkersDone(), Finish()]


def test_a_node_that_loses_its_lease_kills_and_restarts_its_workers():
    _, done = play(*UP, MustStop(SIGKILL, is_fence=True), GroupEnded("stopped"), RoundBegan(2, 0))
    assert done == [Start(1, 0), Stop(SIGKILL, 0.0, is_announced=True), SayEnded(), Start(2, 0)]


def test_a_stuck_worker_makes_the_node_unfit():
    stuck = GroupEnded("stopped", (1,))
    found = [WorkerFailed(1), WorkerSwept(1, is_stuck=True), stuck]
    assert play(*UP, *found)[1] == [Start(1, 0), Report(1), STOPPED, SayEnded(stuck.why_unfit)]
    _, done = play(*UP, WorkerFailed(1), NONE_MET, *found[1:], RoundBegan(2, 1))
    assert done == [Start(1, 0), Report(1), SayIdle(), STOPPED, SayEnded(stuck.why_unfit)]


def test_a_failed_replacement_stops_the_group():
    ended = [WorkerFailed(1), NONE_MET, WorkerSwept(1), RoundBegan(2, 1), ReplaceFailed(1)]
    meanwhile = [RoundEnded(), RoundBegan(3, 1)]
    _, done = play(*UP, *ended, *meanwhile, GroupEnded("stopped"), NONE_MET, RoundBegan(4, 2))
    assert done[-5:] == [Replace(1, 1), STOPPED, SayIdle(), SayEnded(), Start(4, 2)]


def test_a_failed_start_of_workers_is_reported():
    assert play(*UP, StartFailed("no memory", True))[1][-1] == messages.StartFailed("no memory", True)


class Course:
    """One node in a random job. Simulates the core and the rendezvous, and checks every effect that the node
    requests.
    """

    def __init__(self, size):
        self.state = NodeState(GRACE)
        self.places = {}
        self.size = size
        self.group = "none"
        self.rendezvous = "idle"
        self.number = self.restarts = self.known = self.meeting = 0
        self.met = {}
        # Number of replacements that have been charged but not yet started, by local rank.
        self.credit = dict.fromkeys(range(size), 0)
        self.has_succeeded = self.is_over = False
        self.finished = 0

    def enabled(self):
        """Return the names of the events that can happen next."""
        found = []
        if self.is_over:
            return ["group_ends"] if self.group != "none" else []
        if self.rendezvous == "idle":
            found += ["begin", "job_ends"]
        else:
            found += ["end_failure", "end_planned", "fence", "leave"]
        if self.group == "running":
            found += [f"fail {place}" for place, at in self.places.items() if at == "runs"]
            found += [f"sweep {place}" for place, at in self.places.items() if at == "left"]
            found += [f"take {place}" for place, at in self.places.items() if at == "promised"]
            found += [f"refuse {place}" for place, at in self.places.items() if at == "promised"]
            found += ["meet", "succeed", "lose_nursery"]
        if self.group == "stopping":
            found.append("group_ends")
        return found

    def do(self, what):
        name, _, rest = what.partition(" ")
        place = int(rest) if rest else -1
        match name:
            case "begin":
                self.rendezvous, self.number = "run", self.number + 1
                self.known = self.restarts
                self.tell(RoundBegan(self.number, self.restarts))
            case "end_failure":
                self.end()
            case "end_planned":
                self.rendezvous = "idle"
                self.tell(RoundEnded())
            case "fence":
                self.rendezvous = "stopping"
                self.tell(MustStop(SIGKILL, is_fence=True))
            case "leave":
                self.rendezvous = "stopping"
                self.tell(MustStop(SIGTERM))
            case "job_ends":
                self.is_over = True
                self.tell(JobEnded())
            case "fail":
                self.places[place] = "left"
                self.tell(WorkerFailed(place, self.meetings()))
            case "sweep":
                self.places[place] = "free"
                self.tell(WorkerSwept(place))
            case "take":
                self.places[place] = "runs"
                self.met.pop(place, None)
                self.tell(WorkerReplaced(place))
            case "refuse":
                self.places[place] = "free"
                self.tell(ReplaceFailed(place))
            case "meet":
                self.meeting += 1
                self.met.update({place: self.meeting for place, at in self.places.items() if at == "runs"})
            case "succeed":
                is_whole = set(self.places.values()) == {"runs"}
                self.group, self.has_succeeded = "none", is_whole
                self.tell(GroupEnded("succeeded"))
            case "lose_nursery":
                self.group = "none"
                self.tell(GroupEnded("lost"))
            case "group_ends":
                self.group = "none"
                self.tell(GroupEnded("stopped"))

    def end(self):
        self.rendezvous = "idle"
        self.restarts += 1
        self.pay()
        self.tell(RoundEnded(self.meetings()))

    def meetings(self):
        return tuple(self.met.get(place) for place in range(self.size))

    def pay(self):
        """Allow one more replacement for each local rank. An unused allowance is kept only while the failed
        worker has not been replaced.
        """
        for place, left in self.credit.items():
            is_owed = left and self.places.get(place) in ("left", "free")
            self.credit[place] = 2 if is_owed else 1

    def tell(self, event):
        self.state, effects = step(self.state, event)
        for effect in effects:
            self.check(effect)

    def check(self, effect):
        assert not self.finished
        match effect:
            case Start():
                assert self.group == "none"
                assert not self.has_succeeded
                assert effect == Start(self.number, self.restarts)
                self.group, self.places = "running", dict.fromkeys(range(self.size), "runs")
                self.met = {}
            case Replace():
                place = effect.local_rank
                assert self.group == "running"
                assert self.places[place] == "free"
                assert effect.restarts == self.known > 0
                self.credit[place] -= 1
                assert self.credit[place] >= 0
                self.places[place] = "promised"
            case Report():
                assert (self.group, self.rendezvous) == ("running", "run")
                assert self.places[effect.local_rank] != "runs"
                self.end()
            case Stop():
                self.group = "stopping"
            case SayIdle():
                assert self.rendezvous == "idle"
            case messages.WorkersDone():
                assert self.has_succeeded
                assert self.rendezvous == "run"
            case SayEnded():
                assert self.group == "none"
                assert self.rendezvous in ("run", "stopping")
                if self.rendezvous == "run":
                    # The end of the worker group is charged as a failure, even without a separate report.
                    self.restarts += 1
                    self.pay()
                self.rendezvous = "idle"
            case Finish():
                assert self.is_over
                assert self.group == "none"
                self.finished += 1


@settings(max_examples=300)
@given(st.integers(1, 3), st.data())
def test_invariants_share_1_to_4_hold_in_random_jobs(size, data):
    course = Course(size)
    for _ in range(data.draw(st.integers(0, 40))):
        enabled = course.enabled()
        if not enabled:
            break
        course.do(data.draw(st.sampled_from(enabled)))
    # Run all pending steps of the core and the rendezvous. Then all workers must be running, or the group or
    # the agent must have finished.
    for _ in range(100):
        owed = ("begin", "group_ends", "sweep", "take")
        due = [each for each in course.enabled() if each.split()[0] in owed]
        if not due or (due == ["begin"] and course.rendezvous == "run"):
            break
        course.do(due[-1])
    if course.is_over:
        assert course.finished == 1
    elif course.group == "running":
        assert set(course.places.values()) == {"runs"}
    else:
        assert course.has_succeeded
