"""Attempts for tests. Events of workers are written to an attempt's event log, as the agent does it."""

from types import SimpleNamespace
from typing import Any

from elasticrs import _core
from elasticrs._engine.supervise.attempt import Attempt
from elasticrs._engine.workers.event_log import Adopted, Stamp


def attempt_of(round_number: int, restarts: int, **options: Any) -> Attempt:
    """Return an attempt without workers."""
    plan: Any = SimpleNamespace(ranks=())
    return Attempt(round_number, restarts, plan, **options)


def ended(attempt: Attempt, at_ns: int = 0, **known: Any) -> None:
    """Record that all processes of the attempt have ended."""
    about = {"ended_ns": at_ns, "nursery_exitcode": None, "nursery_hung": False, **known}
    attempt.append(SimpleNamespace(**about), _core.GroupEnded)


def exited(
    attempt: Attempt, local_rank: int, exitcode: int | None, sent: int | None = None, **known: Any
) -> Any:
    """Record the exit of a worker, and return the event. ``known`` contains its other attributes."""
    about = {"local_rank": local_rank, "pid": 100 + local_rank, "exitcode": exitcode, "sent_signal": sent}
    event = SimpleNamespace(**{**about, "seen_ns": 9, **known})
    attempt.append(event, _core.WorkerExited)


def raised(attempt: Attempt, local_rank: int, **known: Any) -> None:
    """Record an uncaught exception of a worker."""
    about = {"pid": 100 + local_rank, "seen_ns": 1, "text": "", "origin": "unknown", "exit": "begun"}
    event = SimpleNamespace(**{**about, "limit": None, **known, "local_rank": local_rank})
    attempt.append(event, _core.WorkerRaised)


def failed(attempt: Attempt, local_rank: int, seen_ns: int = 1, signalled_ns: int = 1) -> None:
    """Record that the agent has seen the first failure."""
    about = {"local_rank": local_rank, "seen_ns": seen_ns, "signalled_ns": signalled_ns, "siblings": 1}
    attempt.append(SimpleNamespace(**about), _core.FailureSeen)


def stamped(attempt: Attempt, **stamps: int) -> Attempt:
    """Record these times of the agent's actions, and the end of the processes (see ``EventLog.stamps``)."""
    for name, at_ns in stamps.items():
        if name == "ended":
            ended(attempt, at_ns)
        else:
            attempt.append(Stamp(name, at_ns))
    return attempt


def adopted(attempt: Attempt, *pids: int) -> Attempt:
    """Record the pids of the workers."""
    attempt.append(Adopted(pids))
    return attempt


def beat(
    local_rank: int, at_ns: int, step: int | None = None, section: str | None = None, **known: Any
) -> Any:
    """Return the last heartbeat of a rank."""
    about = {"is_global": False, "is_automatic": False, "has_returned": False, **known}
    return SimpleNamespace(local_rank=local_rank, at_ns=at_ns, step=step, section=section, **about)


def seen(local_rank: int, heartbeat: Any, frame: str | None = None, **known: Any) -> Any:
    """Return what the core knows of a rank when it reports a hang."""
    about = {"state": "S", "wait_channel": "", **known}
    return SimpleNamespace(local_rank=local_rank, heartbeat=heartbeat, frame=frame, **about)


def hung(local_rank: int, ranks: list[Any], since_ns: int, seen_ns: int, **known: Any) -> Any:
    """Return the core's event about a rank that hangs. ``ranks`` are made by :func:`seen`."""
    about = {"missed": "step", "limit": 60.0, "ground": "behind", **known}
    return SimpleNamespace(local_rank=local_rank, ranks=ranks, since_ns=since_ns, seen_ns=seen_ns, **about)
