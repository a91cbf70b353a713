"""One failed worker, with everything that is known about its end."""

from __future__ import annotations

import os
import time

from elasticrs.logs import fault_file, last_bytes
from elasticrs.texts import describe_exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

NOT_AVAILABLE = "<N/A>"
"""What stands in place of an error file's path when there is no such file."""

_NO_MESSAGE = "<NONE>"
_TORCH_HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_FAULTS = frozenset({4, 6, 7, 8, 11})
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: those for which :mod:`faulthandler` writes the stack."""
_STACK_LIMIT = 16384
_ERROR_FILE_LIMIT = 1 << 26
"""Bytes; the agent must not run out of memory for what a program has left in place of an error file."""


class ProcessFailure:
    """A worker that has failed. The first seven attributes are torch's, and decide equality.

    Different from torch: an error file that cannot be read, or makes no sense, is reported in ``message``,
    not raised.

    Args:
        local_rank: its index on the node.
        pid: its process id.
        exitcode: its exit code, or the negative number of a signal; ``None`` when nobody can tell.
        error_file: where its error file would be.
        seen_ns: when its end was seen, monotonic.
        sent_signal: the last signal that we had sent to it before that; ``None`` when it ended by itself.
        cause: what ended it, when neither it nor its exit code can say so.
        note: a line for the report, such as a word on the OOM killer.
        log_paths: by name of the stream, where its output went.
        stderr_tail: its last lines on stderr.
        host: the name of its machine; ``None`` for this one.

    Attributes:
        error_file: the path, or ``"<N/A>"`` when the worker has written none.
        error_file_data: its contents.
        message: the ``message`` of the error file (text, or torch's nested form), otherwise made up from the
            exit code.
        timestamp: of the failure, in seconds since the epoch.
        recorded_ns: when the worker itself recorded its error, monotonic; ``None`` when it has not.
        recorded_pid: the process that did; not ``pid`` when the worker is a wrapper around it.
        stack: of all threads when a fault such as SIGSEGV struck, or of one that hung.
        more_notes: further lines for the report.
        is_first: all nodes have agreed that it is the root cause.
    """

    __match_args__ = ("local_rank", "pid", "exitcode", "error_file")
    __hash__ = None  # type: ignore[assignment]  # as for any mutable value

    def __init__(
        self,
        local_rank: int,
        pid: int,
        exitcode: int | None,
        error_file: str,
        *,
        seen_ns: int | None = None,
        sent_signal: int | None = None,
        cause: str | None = None,
        note: str | None = None,
        log_paths: Mapping[str, str] | None = None,
        stderr_tail: Sequence[str] = (),
        host: str | None = None,
    ) -> None:
        self.host = host
        self.local_rank = local_rank
        self.pid = pid
        self.exitcode = exitcode
        self.error_file = NOT_AVAILABLE
        self.error_file_data: dict[str, Any] = {"message": _NO_MESSAGE}
        self.message: str | dict[str, Any] = ""
        self.seen_ns = seen_ns
        self.sent_signal = sent_signal
        self.cause = cause
        self.note = note
        self.log_paths = dict(log_paths or {})
        self.stderr_tail = tuple(stderr_tail)
        self.recorded_ns: int | None = None
        self.recorded_pid: int | None = None
        self.stack = _read_stack(error_file) if self.signal_number() in _FAULTS else None

        self.more_notes: Sequence[str] = ()
        self.is_first = False

        age_ns = 0 if seen_ns is None else time.monotonic_ns() - seen_ns
        self.wall_ns = time.time_ns() - age_ns
        self.timestamp = self.wall_ns // 1_000_000_000
        self._read(error_file)

    def _read(self, path: str) -> None:
        trouble = ""
        if os.path.isfile(path):
            self.error_file = path
            try:
                data, message, timestamp = read_error_file(path)
            except EmptyFileError as problem:
                trouble = f"its error file could not be written ({problem}, as on a full disk)"
            except (OSError, ValueError) as problem:
                trouble = f"its error file cannot be read ({problem})"
            else:
                self.error_file_data, self.timestamp = data, timestamp
                self.message = message
                match data.get("elasticrs"):
                    case {"monotonic_ns": int(recorded_ns), "pid": int(pid)}:
                        self.recorded_ns, self.recorded_pid = recorded_ns, pid
        if not self.message:
            self.message = self._made_up_message(trouble)

    def _made_up_message(self, trouble: str) -> str:
        known = self.cause
        if known:
            # There is no error file that could say more.
            self.error_file_data["message"] = known
        elif self.signal_number():
            known = f"Signal {self.signal_number()} ({self.signal_name()}) received by PID {self.pid}"
        if not known:
            traits = {"category": "system_terminated_error", "retryability": "False"}
            self.error_file_data["errorTraits"] = traits
            # How to get an error file is no advice for somebody who has one.
            known = describe_exit(self.exitcode) if trouble else _TORCH_HINT
        return f"{known}; {trouble}" if trouble else known

    def signal_number(self) -> int:
        """The signal that ended it; 0 when none did."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else 0

    def signal_name(self) -> str:
        """The name of the signal that ended it; ``"<N/A>"`` when none did, or it has no name."""
        if not self.signal_number():
            return NOT_AVAILABLE
        import signal

        try:
            return signal.Signals(self.signal_number()).name
        except ValueError:
            return NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """``YYYY-MM-DD_HH:MM:SS``, local time."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))

    def _torch_fields(self) -> dict[str, Any]:
        names = (*self.__match_args__, "error_file_data", "message", "timestamp")
        return {name: getattr(self, name) for name in names}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessFailure):
            return NotImplemented
        return self._torch_fields() == other._torch_fields()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._torch_fields().items())
        return f"{type(self).__name__}({fields})"


class EmptyFileError(ValueError):
    """The worker opened its error file, and could write nothing."""


def read_error_file(path: str) -> tuple[dict[str, Any], str | dict[str, Any], int]:
    """An error file in either form: torch's nested one, or flat with ``message`` and ``timestamp``.

    Returns:
        All of it, its message, its timestamp in seconds.

    Raises:
        EmptyFileError: nothing is in it.
        ValueError: not JSON (perhaps half-written), neither of the two forms, or far too large.
        OSError: it cannot be read.
    """
    data = load_object(path)
    if "message" not in data:
        raise ValueError("no `message` in it")
    message = data["message"]
    try:
        if isinstance(message, str):
            return data, message, int(data.get("timestamp", 0))
        return data, message, int(message["extraInfo"]["timestamp"])
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise ValueError(f"no timestamp in it: {problem!r}") from None


def load_object(path: str) -> dict[str, Any]:
    """A JSON object that another program has written.

    Raises:
        EmptyFileError: nothing is in it.
        ValueError: it is something else, or far too large.
        OSError: it cannot be read.
    """
    import json

    with open(path, "rb") as file:
        content = file.read(_ERROR_FILE_LIMIT + 1)
    if len(content) > _ERROR_FILE_LIMIT:
        raise ValueError(f"more than {_ERROR_FILE_LIMIT >> 20} MiB")
    if not content:
        raise EmptyFileError("it is empty")
    try:
        data = json.loads(content.decode("utf-8", errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object, so there is no `message` in it")
    return data


def _read_stack(error_file: str) -> str | None:
    # Nothing is there of a program that is not Python, or runs without our hook.
    text = last_bytes(fault_file(error_file), _STACK_LIMIT).decode("utf-8", "replace")
    # A child that was forked from the worker writes to the same file; the worker's own end came last.
    last = text[max(0, text.rfind("Fatal Python error")) :]
    # Hundreds of names, none of which ended the worker.
    return last.partition("\nExtension modules:")[0].rstrip() or None
