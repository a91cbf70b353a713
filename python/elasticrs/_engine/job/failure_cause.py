"""Description of a failure. The restart policy, messages between nodes, events, the status page and reports
all use it.
"""

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
    """A worker raised :class:`elasticrs.errors.NonRetryable`, or its error file contains
    ``"retryable": false``.
    """
    EXIT_CODE = "exit_code"
    """A worker exited with one of ``--fatal-exit-codes``."""
    START_ERROR = "start_error"
    """All workers of this node that failed on their own were unable to start their program: it does not
    exist, cannot be parsed, lacks a module, or rejected its arguments.
    """

    __str__ = str.__str__


class Verdict(str, Enum):
    """Verdict on a failed job, for the scheduler that has started the job."""

    FAILED = "failed"
    """The job failed; another attempt may succeed."""
    PERMANENT = "permanent"
    """Another attempt would fail in the same way."""
    UNFIT = "unfit"
    """This node cannot run the job, but another node may."""

    __str__ = str.__str__


class Cause(Value):
    """Description of the first failure in a rendezvous round. Unknown fields are ``None``.

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
        how: phrase that says how the worker failed, to append to its name; see :func:`.how_it_failed`. The
            worker's node words it, because only that node knows all the evidence.
        lines: last lines of the worker's stderr, shortened.
        xids: Xids (errors of NVIDIA's driver) of that node during the attempt, one line of text for each.
        ground: for a hung worker, the reason for blaming it instead of another worker that missed its
            deadline (see ``WorkerHung``).
        silence: seconds since the worker's last heartbeat.
        step: training step in which the worker hung, if its heartbeats contained steps; -1 if it never sent a
            step.
        frame: stack frame in which the worker hung, as in ``RankSeen``.
        time_ns: time of the failure, in nanoseconds of the store's wall clock.
        error_ns: maximum error of ``time_ns``.
        exception: qualified name of the type of the worker's uncaught exception.
        place: file name and line of the program in which the exception was raised, such as ``train.py:88``.
        permanence: why another attempt would fail in the same way, as a value of :class:`Permanence`.
        permanent_rank: global rank of the worker whose failure determined ``permanence``. It may differ from
            ``rank``.
        permanent_sign: failure of that worker as text, such as ``ValueError at train.py:88`` or ``exit code
            3``.
        is_consequence: true if the exception only reports that a peer is lost or does not answer; otherwise
            ``None``.
        is_transient: true if the exception only reports a lost connection or a timeout; otherwise ``None``.
        was_killed: true if ``exitcode`` shows only that elasticrs or the loss of the nursery has killed the
            worker; otherwise ``None``.
        reached: last training step that any worker of the node has completed; ``None`` without heartbeats.
        is_global: true if ``reached`` is counted across restarts (``heartbeat(step, across_restarts=True)``);
            otherwise ``None``.
        ran: seconds from the start of the workers until the failure, or until the hang began.
        diagnosis: text that says which ranks kept the others waiting, according to the evidence from all
            nodes; see :mod:`elasticrs._engine.hangs`. ``None`` if no diagnosis was possible.
        blamed: text that names the ranks to blame for a hang, such as ``ranks 1, 2`` or ``undecided,
            candidates: ranks 0, 1``; ``None`` if it is ``rank`` alone.
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
        """Create a cause from a received message. Ignore unknown fields, because the other node may run a
        different release.

        Args:
            fields: fields of the right types, some of which may be missing; see
                :func:`.records.checked_cause`.
        """
        return Cause(**{name: fields[name] for name in Cause._names if name in fields})


NO_CAUSE = Cause()
"""Placeholder for a failure about which nothing is known."""
