"""When the agent's loop ends, it releases all resources even if a step raises an exception, and reports every
event.
"""

import os

import pytest
from helpers.attempts import adopted, exited

from elasticrs import _core
from elasticrs._engine.job.config import JobSpec
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.attempt import Attempt
from elasticrs._engine.supervise.decide.decisions import Decisions
from elasticrs._engine.supervise.run.loop import Agent
from elasticrs._engine.supervise.run.workers import CommandWorkers, WorkerSetup
from elasticrs._engine.workers.plan import Plan

REAL = _core.Supervisor


class Ends(Decisions):
    """Decisions that end the job in the first step."""

    phase, signum = machine.Phase.SUCCEEDED, None

    def __init__(self, closed):
        self._closed = closed

    def step(self, _event):
        return [machine.Exit(0)]

    def close(self):
        self._closed.append("rendezvous")


class NoWorkers(CommandWorkers):
    def __init__(self, closed):
        super().__init__(WorkerSetup(JobSpec(1, "job"), None, {}), [])
        self._closed = closed

    def close(self):
        self._closed.append("workers")


def agent(closed):
    return Agent(JobSpec(1, "job"), NoWorkers(closed), Ends(closed), signals=None, owns_process=False)


class Wrapped:
    """Base class for supervisors in which a test replaces some methods."""

    def __init__(self, **how):
        self._inner = REAL(**how)

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Raises(Wrapped):
    def close(self, **how):
        self._inner.close(**how)
        raise _core.SupervisorError("the nursery could not be ended")


def test_resources_are_released_even_if_closing_the_supervisor_fails(monkeypatch):
    monkeypatch.setattr(_core, "Supervisor", Raises)
    closed = []
    with pytest.raises(_core.SupervisorError, match="ended"):
        agent(closed).run()
    assert closed == ["workers", "rendezvous"]


def test_final_events_are_reported_despite_an_unread_descriptor(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.write(writer, b"x")

    class Found(Wrapped):
        def drain(self, timeout):
            self._inner.watch_fd(reader)
            self._asked = False
            return self._inner.drain(timeout)

        def next_event(self, timeout):
            event = self._inner.next_event(timeout)
            if event is None and not self._asked:
                self._asked = True
                return Trouble()
            return event

    class Trouble:
        local_rank, path, errno = 0, "stdout.log", 28

    told = []
    monkeypatch.setattr(_core, "Supervisor", Found)
    monkeypatch.setattr(_core, "LogTrouble", Trouble)
    from elasticrs._engine.supervise.run import tracker

    monkeypatch.setitem(tracker._RECORDERS, Trouble, lambda _tracker, event: told.append(event.path))
    agent([]).run()
    assert told == ["stdout.log"]
    os.close(reader)
    os.close(writer)


def test_an_exited_worker_is_not_listed_as_running():
    attempt = Attempt(1, 0, Plan([], "a", 1))
    adopted(attempt, 11, 12, 13)
    exited(attempt, 1, 0)
    assert attempt.running() == {0: 11, 2: 13}
