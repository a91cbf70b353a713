"""Create a :class:`ProcessFailure` from the exit and the output files of a failed process."""

from __future__ import annotations

import os

from elasticrs._engine.workers.failures.failure import ProcessFailure
from elasticrs._engine.workers.process import last_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs._core import WorkerExited

_TAIL_LINES = 50


def failure_of(
    ended: WorkerExited, stdout: str | None, stderr: str | None, error_file: str, **known: Any
) -> ProcessFailure:
    """Create a :class:`ProcessFailure` for a failed process.

    Args:
        ended: exit of the process.
        stdout: path of the file with its standard output; ``None`` if there is none.
        stderr: path of the file with its standard error; ``None`` if there is none.
        error_file: path at which the worker would write its error file.
        known: further arguments of :class:`ProcessFailure`. They override the arguments that come from
            ``ended``.
    """
    is_read = not known.get("unread")
    both = (("stdout", stdout), ("stderr", stderr))
    logs = {stream: path for stream, path in both if path and path != os.devnull}
    return ProcessFailure(
        ended.local_rank,
        ended.pid,
        ended.exitcode,
        error_file,
        log_paths=logs,
        stderr_tail=last_lines(logs["stderr"], _TAIL_LINES) if is_read and "stderr" in logs else (),
        **{"seen_ns": ended.seen_ns, "sent_signal": ended.sent_signal, **known},
    )
