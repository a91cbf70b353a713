"""What is known of a process that has failed, from how it ended and from its files."""

from __future__ import annotations

import os

from elasticrs.multiprocessing.errors import ProcessFailure
from elasticrs.workers import last_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elasticrs._core import WorkerExited

_TAIL_LINES = 50


def failure_of(
    ended: WorkerExited, stdout: str | None, stderr: str | None, error_file: str, **known: Any
) -> ProcessFailure:
    """The failure of one process.

    Args:
        ended: how it ended.
        stdout: the file of its standard output, if there is one.
        stderr: the same for standard error.
        error_file: where its error file would be.
        known: what else :class:`ProcessFailure` takes, and what is not as ``ended`` says.
    """
    both = (("stdout", stdout), ("stderr", stderr))
    logs = {stream: path for stream, path in both if path and path != os.devnull}
    return ProcessFailure(
        ended.local_rank,
        ended.pid,
        ended.exitcode,
        error_file,
        log_paths=logs,
        stderr_tail=last_lines(logs["stderr"], _TAIL_LINES) if "stderr" in logs else (),
        **{"seen_ns": ended.seen_ns, "sent_signal": ended.sent_signal, **known},
    )
