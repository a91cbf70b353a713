"""Converts a failure that another node has reported into objects for this node's failure report and hang
diagnosis.
"""

from __future__ import annotations

from elasticrs._engine.failures.failure import ProcessFailure
from elasticrs._engine.nodes.protocol.records import silence_of, step_of
from elasticrs._engine.supervise.attempts.state_machine import HungElsewhere

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elasticrs._engine.job.failure_cause import Cause
    from elasticrs._engine.process.clock import Clock


def hung_elsewhere(cause: Mapping[str, Any]) -> HungElsewhere:
    """Return the time since the last heartbeat, the training step and the stack frame of a worker that hung
    on another node. The agent uses them to find the local worker that the hung worker was waiting for.
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
    failure = ProcessFailure(
        -1 if cause.local_rank is None else cause.local_rank,
        -1 if cause.pid is None else cause.pid,
        # A known pid without an exit code means that the worker has failed, so use exit code 1. If the pid is
        # unknown, nothing is known about the worker. Its exit code stays unknown then.
        1 if cause.exitcode is None and cause.pid is not None else cause.exitcode,
        "",
        seen_ns=None if cause.time_ns is None else clock.to_monotonic(cause.time_ns),
        cause=cause.message or None,
        how=cause.how,
        note=f"on node {cause.node}; {_comparable(cause.error_ns, clock.error_ns)}",
        stderr_tail=[str(line) for line in cause.lines],
        host=str(cause.host),
    )
    failure.more_notes = [str(xid) for xid in cause.xids]
    return failure


def _comparable(theirs: int | None, ours: int | None) -> str:
    if theirs is None or ours is None:
        return "times of different nodes may be off: their clocks have not been compared"
    # Round up, because the value is shown as an upper bound.
    tenths = max(1, -(-(theirs + ours) // 100_000))
    return f"times of different nodes are comparable to {tenths / 10:.1f} ms"
