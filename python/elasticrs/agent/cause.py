"""Description of a job's first failure, in the form in which it is sent to other nodes. It is small enough
for a record in the store.

The message is a JSON object that contains only the known fields. Imported only after a failure.
"""

from __future__ import annotations

from elasticrs.agent.state_machine import HungElsewhere
from elasticrs.job.value import Value
from elasticrs.multiprocessing.errors import ProcessFailure
from elasticrs.rendezvous.elastic.records import silence_of, step_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elasticrs.host.clock import Clock


class Cause(Value):
    """Facts about the first failure of a round. Each unknown fact is ``None``.

    Args:
        node: name of the failed worker's node in the rendezvous.
        host: host name of that node.
        group_rank: rank of that node.
        round: number of the round.
        rank: global rank of the worker; ``None`` if the workers could not be started.
        local_rank: local rank of the worker.
        pid: pid of the worker.
        exitcode: exit code as in ``ProcessFailure``; also ``None`` if the worker raised an exception and was
            stopped while it was exiting.
        message: shortened traceback or other description of the failure.
        lines: last lines of the worker's stderr, shortened.
        ground: for a hung worker, why it was blamed among all workers that missed their deadline (see
            ``WorkerHung``).
        silence: seconds since the worker's last heartbeat.
        step: training step in which the worker hung, if its heartbeats contained steps; -1 if it never sent a
            step.
        frame: stack frame in which the worker hung, as in ``RankSeen``.
        time_ns: time of the failure, in nanoseconds of the store's wall clock.
        error_ns: maximum error of ``time_ns``.
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
        """Return the known facts as a dictionary that can be sent as JSON."""
        return {name: value for name, value in self.fields().items() if value is not None and value != ()}

    @staticmethod
    def decoded(fields: Mapping[str, Any]) -> Cause:
        """Build a cause from a received message. Ignore unknown fields, because another node may run a
        different release.

        Args:
            fields: fields of the right types, some of which may be missing; see
                :func:`.rendezvous.elastic.checked.cause`.
        """
        return Cause(**{name: fields[name] for name in Cause._names if name in fields})


def hung_elsewhere(cause: Mapping[str, Any]) -> HungElsewhere:
    """Return the facts about a worker that hung on another node. They help to find a worker on this node that
    the hung worker was waiting for.
    """
    step, frame = step_of(cause), cause.get("frame")
    return HungElsewhere(
        silence_of(cause) or 0.0,
        step if step is not None and step >= 0 else None,
        frame if isinstance(frame, str) else None,
    )


def remote_failure(cause: Cause, clock: Clock) -> ProcessFailure:
    """Build the ``ProcessFailure`` of a worker on another node, for this node's failure report.
    ``cause.rank`` must be known.
    """
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
    # Round up, because the value is shown as an upper bound.
    tenths = max(1, -(-(theirs + ours) // 100_000))
    return f"times of different nodes are comparable to {tenths / 10:.1f} ms"
