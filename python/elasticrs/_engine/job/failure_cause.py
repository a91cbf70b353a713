"""Description of a failure, for the restart policy, other nodes, events, the status page and reports."""

from __future__ import annotations

from enum import Enum

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class Permanence(str, Enum):
    """Reason why another attempt would fail in the same way."""

    NON_RETRYABLE = "non_retryable"
    """A worker raised ``NonRetryable``, or its error file contains ``"retryable": false``."""
    EXIT_CODE = "exit_code"
    """A worker exited with one of ``--fatal-exit-codes``."""
    START_ERROR = "start_error"
    """No failed worker could start its program, because it is missing or broken, or rejected its arguments.
    """

    __str__ = str.__str__


class Verdict(str, Enum):
    """Advice on a failed job to the scheduler that has started it."""

    FAILED = "failed"
    PERMANENT = "permanent"
    UNFIT = "unfit"
    """This node cannot run the job, but another node may."""

    __str__ = str.__str__


class Cause(Value):
    """First failure in a rendezvous round. Unknown fields are ``None``.

    Args:
        node: name of the failed worker's node in the rendezvous.
        rank: global rank of the worker; ``None`` if the workers could not be started.
        exitcode: as in ``ProcessFailure``, but ``None`` for a worker that was stopped after an exception.
        message: shortened traceback or other description.
        how: phrase to append to the worker's name; see :func:`.how_it_failed`.
        lines: last lines of the worker's stderr, shortened.
        xids: errors of NVIDIA's driver on that node during the attempt, one line each.
        ground: why a hung worker is blamed, instead of another that missed its deadline (see ``WorkerHung``).
        silence: seconds since the worker's last heartbeat, if it hung.
        step: training step in which the worker hung; -1 if it never sent a step.
        frame: text about the stack frame in which the worker hung, as in ``RankSeen``.
        time_ns: time of the failure, in nanoseconds of the store's wall clock.
        error_ns: maximum error of ``time_ns``.
        exception: qualified name of the type of the worker's uncaught exception.
        place: file and line of the program that raised it, such as ``train.py:88``.
        permanence: value of :class:`Permanence`.
        permanent_rank: global rank of the worker that determined ``permanence``; may differ from ``rank``.
        permanent_sign: that worker's failure, such as ``ValueError at train.py:88`` or ``exit code 3``.
        is_consequence: true if the exception only reports that a peer is lost or silent; otherwise ``None``.
        is_transient: true if the exception only reports a lost connection or a timeout; otherwise ``None``.
        was_killed: true if the worker was killed only by elasticrs, or because the nursery (the process that
            starts the workers) was lost; otherwise ``None``.
        reached: last training step that any worker of the node has completed; ``None`` without heartbeats.
        is_global: true if ``reached`` is counted across restarts (``heartbeat(step, across_restarts=True)``).
        ran: seconds from the start of the workers until the failure, or until the hang began.
        diagnosis: text about the ranks that kept the other ranks waiting, by the evidence of all nodes.
        blamed: ranks to blame for a hang, if not ``rank``, such as ``undecided, candidates: ranks 0, 1``.
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
    how: str | None = None
    lines: Sequence[str] = ()
    xids: Sequence[str] = ()
    ground: str | None = None
    silence: float | None = None
    step: int | None = None
    frame: str | None = None
    time_ns: int | None = None
    error_ns: int | None = None
    exception: str | None = None
    place: str | None = None
    permanence: str | None = None
    permanent_rank: int | None = None
    permanent_sign: str | None = None
    is_consequence: bool | None = None
    is_transient: bool | None = None
    was_killed: bool | None = None
    reached: int | None = None
    is_global: bool | None = None
    ran: float | None = None
    diagnosis: str | None = None
    blamed: str | None = None

    def encoded(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields().items() if value is not None and value != ()}

    @staticmethod
    def decoded(fields: Mapping[str, Any]) -> Cause:
        """Create a cause from checked fields. Ignore unknown fields, which another release may send."""
        return Cause(**{name: fields[name] for name in Cause._names if name in fields})


NO_CAUSE = Cause()
