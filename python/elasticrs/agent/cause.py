"""The first failure of a job, as one node tells it to the others: small enough for a record of the store.

On the wire it is a JSON object of those fields that are known. Imported only when something went wrong.
"""

from __future__ import annotations

from elasticrs._value import Value
from elasticrs.agent.state import HungElsewhere
from elasticrs.multiprocessing.errors import ProcessFailure
from elasticrs.rendezvous.elastic.records import silence_of, step_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elasticrs.clock import Clock


class Cause(Value):
    """What is known of a first failure; ``None`` for what is not.

    Args:
        node: where: its name in the rendezvous.
        host: its host name.
        group_rank: its rank.
        round: in which round.
        rank: of the worker; ``None`` when the workers could not be started.
        local_rank: the same, on its node.
        pid: of the worker.
        exitcode: as in ``ProcessFailure``; ``None`` as well if the worker raised and was stopped while it
            exited.
        message: its traceback or what else is known, shortened.
        lines: its last ones on stderr, shortened.
        ground: of a worker that hung: why it of all that were late (see ``WorkerHung``).
        silence: for how many seconds it had given no sign of life.
        step: in which it hung, if it gave heartbeats with steps; -1: it gave none at all.
        frame: where it stood, as in ``RankSeen``.
        time_ns: when, on the wall clock of the store.
        error_ns: how far off that may be.
    """

    node: str | None = None
    host: str | None = None
    group_rank: int | None = None
    round: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    exitcode: int | None = None
    message: str | None = None
    lines: Sequence[str] = ()
    ground: str | None = None
    silence: float | None = None
    step: int | None = None
    frame: str | None = None
    time_ns: int | None = None
    error_ns: int | None = None

    def encoded(self) -> dict[str, Any]:
        """For the wire."""
        return {name: value for name, value in self.fields().items() if value is not None and value != ()}

    @staticmethod
    def decoded(fields: Mapping[str, Any]) -> Cause:
        """Take a cause from the wire, where another release may have added fields.

        Args:
            fields: each of the right kind, or missing; see :func:`.rendezvous.elastic.checked.cause`.
        """
        return Cause(**{name: fields[name] for name in Cause._names if name in fields})


def hung_elsewhere(cause: Mapping[str, Any]) -> HungElsewhere:
    """Return what is to be known of a worker that hung on another node, to look for the one that it waits
    for.
    """
    step, frame = step_of(cause), cause.get("frame")
    return HungElsewhere(
        silence_of(cause) or 0.0,
        step if step is not None and step >= 0 else None,
        frame if isinstance(frame, str) else None,
    )


def remote_failure(cause: Cause, clock: Clock) -> ProcessFailure:
    """Make the failure of a worker on another node, for the report of this one; the cause has a ``rank``."""
    return ProcessFailure(
        -1 if cause.local_rank is None else cause.local_rank,
        -1 if cause.pid is None else cause.pid,
        1 if cause.exitcode is None else cause.exitcode,
        "",
        seen_ns=None if cause.time_ns is None else clock.to_monotonic(cause.time_ns),
        cause=cause.message or None,
        note=f"on node {cause.node}; {_comparable(cause.error_ns, clock.error_ns)}",
        stderr_tail=[str(line) for line in cause.lines],
        host=str(cause.host),
    )


def _comparable(theirs: int | None, ours: int | None) -> str:
    if theirs is None or ours is None:
        return "times of different nodes may be off: their clocks have not been compared"
    # Rounded up: what is shown is a bound.
    tenths = max(1, -(-(theirs + ours) // 100_000))
    return f"times of different nodes are comparable to {tenths / 10:.1f} ms"
