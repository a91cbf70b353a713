"""The first failure of a node, small enough to be told to every other node, and back to a failure there.

A cause is a dictionary that can be written as JSON::

    node, host, group_rank        where
    round, rank, local_rank, pid  which worker; no ``rank`` when the workers could not be started
    exitcode                      as in ``ProcessFailure``
    message, lines                its traceback or what else is known, and its last lines on stderr; shortened
    ground, silence               only of a worker that hung: why it of all that were late (see
                                  ``WorkerHung``), and for how many seconds it had given no sign of life
    step                          in which it hung, if it gave heartbeats with steps; -1: it gave none at all
    frame                         where it stood, as in ``RankSeen``, if that is known
    time_ns, error_ns             when, on the wall clock of the store, and how far off that may be, if known

Imported only when something went wrong.
"""

from __future__ import annotations

import time

from elasticrs._value import Value
from elasticrs.agent.report import failures
from elasticrs.agent.state import HungElsewhere
from elasticrs.multiprocessing.errors import ProcessFailure
from elasticrs.multiprocessing.errors.report import traceback_text
from elasticrs.multiprocessing.errors.root_cause import failed_ns, root_cause, victims
from elasticrs.rendezvous.elastic.records import silence_of, step_of
from elasticrs.texts import how_the_nursery_ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elasticrs._core import WorkerExited
    from elasticrs.agent.attempt import Attempt
    from elasticrs.clock import Clock

MAX_MESSAGE = 1400
"""Characters of the message: the end of a traceback says most."""

BEFORE_ALL_STEPS = -1
"""The step of a rank that gave no heartbeat in time after its start."""

MAX_LINES = 8
MAX_LINE = 120


class Place(Value):
    """Which node this is in a round.

    Args:
        node: its name in the rendezvous.
        host: its host name.
        group_rank: its rank.
    """

    node: str
    host: str
    group_rank: int

    def fields(self) -> dict[str, Any]:
        """As they stand in a cause."""
        return {"node": self.node, "host": self.host, "group_rank": self.group_rank}


def first_word(attempt: Attempt, worker: WorkerExited, place: Place, clock: Clock) -> dict[str, Any]:
    """What can be said at once of the worker that failed first, without reading any file.

    Args:
        attempt: the attempt.
        worker: its end.
        place: where.
        clock: of the store.
    """
    return {
        **place.fields(),
        "round": attempt.round,
        "rank": attempt.plan.ranks[worker.local_rank].global_rank,
        "local_rank": worker.local_rank,
        "pid": worker.pid,
        "exitcode": worker.exitcode,
        **_why(attempt, worker.local_rank),
        **_hang(attempt, worker.local_rank),
        "time_ns": clock.from_monotonic(attempt.failed_ns(worker)),
        "error_ns": clock.error_ns,
    }


def own_cause(attempt: Attempt, place: Place, clock: Clock) -> dict[str, Any] | None:
    """What failed first on this node, in full; ``None`` when its workers only ended because of a stop.

    Workers that end with their nursery have failed.

    Args:
        attempt: that has ended.
        place: where.
        clock: of the store.
    """
    failed = failures(attempt)
    is_nursery_lost = attempt.nursery_exitcode is not None or attempt.nursery_hung
    if not failed and is_nursery_lost:
        how = how_the_nursery_ended(attempt.nursery_exitcode, attempt.nursery_hung)
        return not_started(f"the nursery {how}", place, clock)
    if not failed:
        return None
    rank = root_cause(failed)
    first = failed[rank]
    # Nobody had asked those to end that went with their nursery, though it was a signal of ours.
    if rank in victims(failed) and not is_nursery_lost:
        return None
    at = failed_ns(first)
    return {
        **place.fields(),
        "round": attempt.round,
        "rank": rank,
        "local_rank": first.local_rank,
        "pid": first.pid,
        "exitcode": first.exitcode,
        "message": _end(_message(attempt, first), MAX_MESSAGE),
        "lines": [_end(line, MAX_LINE) for line in first.stderr_tail[-MAX_LINES:]],
        **_hang(attempt, first.local_rank),
        "time_ns": clock.from_monotonic(at if at is not None else time.monotonic_ns()),
        "error_ns": clock.error_ns,
    }


def _hang(attempt: Attempt, local_rank: int) -> dict[str, Any]:
    """What tells apart those that are named by nodes which wait for each other."""
    overdue = attempt.expired.get(local_rank)
    event = overdue.hung if overdue is not None else None
    if event is None:
        return {}
    told: dict[str, Any] = {
        "ground": event.ground,
        "silence": round((event.seen_ns - event.since_ns) / 1e9, 3),
    }
    own = next((rank for rank in event.ranks if rank.local_rank == local_rank), None)
    if own is not None and own.frame:
        told["frame"] = own.frame
    if event.missed == "startup":
        told["step"] = BEFORE_ALL_STEPS
    elif own is not None and own.heartbeat is not None and own.heartbeat.step is not None:
        told["step"] = own.heartbeat.step
    return told


def hung_elsewhere(cause: Mapping[str, Any]) -> HungElsewhere:
    """What is to be known of a worker that hung on another node, to look for the one that it waits for.

    Args:
        cause: of a worker that hung.
    """
    step, frame = step_of(cause), cause.get("frame")
    return HungElsewhere(
        silence_of(cause) or 0.0,
        step if step is not None and step >= 0 else None,
        frame if isinstance(frame, str) else None,
    )


def _why(attempt: Attempt, local_rank: int) -> dict[str, str]:
    why = attempt.why_expired(local_rank)
    return {} if why is None else {"message": _end(why, MAX_MESSAGE)}


def _message(attempt: Attempt, first: ProcessFailure) -> str:
    """What is known of it, with what says most at the end."""
    text = traceback_text(first)
    why = attempt.why_expired(first.local_rank)
    return text if why is None else f"{text.removeprefix(why).strip()}\n{why}".strip()


def not_started(message: str, place: Place, clock: Clock) -> dict[str, Any]:
    """The cause when the workers of this node could not be started.

    Args:
        message: why.
        place: where.
        clock: of the store.
    """
    return {
        **place.fields(),
        "message": message[:MAX_MESSAGE],
        "time_ns": clock.from_monotonic(time.monotonic_ns()),
        "error_ns": clock.error_ns,
    }


def remote_failure(cause: dict[str, Any], clock: Clock) -> ProcessFailure:
    """A worker's failure on another node, for the report of this one.

    Args:
        cause: with a ``rank``.
        clock: of the store.
    """
    exitcode, time_ns = cause.get("exitcode"), cause.get("time_ns")
    return ProcessFailure(
        cause.get("local_rank", -1),
        cause.get("pid", -1),
        1 if exitcode is None else exitcode,
        "",
        seen_ns=None if time_ns is None else clock.to_monotonic(time_ns),
        cause=str(cause["message"]) if cause.get("message") else None,
        note=f"on node {cause.get('node')}; {_comparable(cause.get('error_ns'), clock.error_ns)}",
        stderr_tail=[str(line) for line in cause.get("lines", ())],
        host=str(cause.get("host")),
    )


def _comparable(theirs: int | None, ours: int | None) -> str:
    if theirs is None or ours is None:
        return "times of different nodes may be off: their clocks had not been compared yet"
    # Rounded up: what is shown is a bound.
    tenths = max(1, -(-(theirs + ours) // 100_000))
    return f"times of different nodes are comparable to {tenths / 10:.1f} ms"


def _end(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[-limit + 1 :]
