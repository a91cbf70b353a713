"""Failures of workers: the files that describe a failure, its text, and the root cause of several failures.

Workers import this module, so imports that are needed only after a failure are in functions.

The root cause is the failure that came first and caused the others:

- **ROOT-0** The nodes' agreement on a root cause takes precedence over what a single node saw first.
- **ROOT-1** The root cause is the worker whose exit was noticed first. If times are equal, the one that comes
  first in the argument of :func:`root_cause` counts.
- **ROOT-2** A worker that elasticrs had signalled before it exited is a victim. A victim is chosen as root
  cause only if no other worker failed.
- **ROOT-3** A worker that recorded an uncaught error *before* the first exit was noticed is not a victim. It
  failed at the time of the record, because with torch, a process often takes longer to exit than its peers
  take to notice its closed connections. A program that runs for another minute has survived the error.
- **ROOT-4** If a worker exits by itself without an exception (``os._exit``, a crash), exceptions that
  only report a lost peer are consequences if they were raised in the five seconds before this exit, because
  a process closes its connections before the kernel reports its exit.
- **ROOT-5** If these times are missing (in failures that code written for torch creates), the smallest
  timestamp in seconds counts, as in torch. If timestamps are equal, the first in the argument counts.
- **ROOT-6** An exception that only reports a lost or silent peer is a consequence, unless no other worker
  failed by itself within five seconds.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import more modules
import os
import time

from elasticrs._engine import public
from elasticrs._engine.job.phrases import describe_exit, headline, how_it_ended, printable, summarize
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elasticrs._core import WorkerExited
    from elasticrs._engine.job.restart_policy import Cause

# --- the files of a worker, whose paths begin with the path of its error file ---

_STACK_LIMIT = 16384
_ERROR_FILE_LIMIT = 1 << 20
"""Maximum number of bytes to read of an error file, because a restart waits until it is read. Of a larger
file, only the first line of the message and elasticrs's data at the end are used.
"""
_TEXT_LIMIT = 1 << 16
"""Maximum number of characters of a text in an error file. Longer texts are shortened in the middle."""
_LINE_LIMIT = 1000
_BEGINNING = rb'\s*\{\s*"message"\s*:\s*(?:\{\s*"message"\s*:\s*)?"'
_PART_OF_STRING = r'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*'
_OWN_DATA = b'"elasticrs": {'

OWN_THREAD = "/elasticrs/_engine/inside/flight.py"
"""The source file of the thread that elasticrs runs in a worker. Reports omit this thread's stack."""


def hang_file(error_file: str) -> str:
    """Return the path of the file for the stacks of a hung worker. ``error_file`` is its error file."""
    folder, name = os.path.split(error_file)
    return os.path.join(folder, "hang.txt" if name == "error.json" else f"{name}.hang.txt")


def fault_file(error_file: str) -> str:
    """Return the path to which :mod:`faulthandler` writes after a fault, such as SIGSEGV."""
    return f"{error_file}.fault"


def flight_record_file(error_file: str) -> str:
    """Return the path of the flight record (torch's log of collectives) that the agent asks a worker for."""
    return f"{error_file}.flight"


def last_record_file(error_file: str) -> str:
    """Return the path of torch's log of collectives that a worker writes when it loses another worker."""
    return f"{error_file}.flight_at_exit"


def flight_requests_file(error_file: str) -> str:
    """Return the path of the FIFO through which the agent asks a worker for its flight record (torch's log of
    collectives). The FIFO exists while the worker reads it.
    """
    return f"{error_file}.flight_requests"


def flight_dumps(error_file: str) -> str:
    """Return the path to which NCCL adds a rank to name its logs (``TORCH_FR_DUMP_TEMP_FILE``)."""
    return f"{error_file}.flight_dump_"


def flight_records(error_file: str, rank: int, since: float = 0.0) -> list[str]:
    """Return the existing files with a worker's flight records (torch's logs of collectives): the one that
    the agent requested, the one that the worker wrote when it failed, and the one of NCCL's watchdog. Leave
    out files that were last modified before ``since`` (seconds since 1970).
    """
    dump = f"{flight_dumps(error_file)}{rank}"
    paths = flight_record_file(error_file), last_record_file(error_file), dump
    return [path for path in paths if _is_file(path, since)]


def _is_file(path: str, since: float) -> bool:
    import stat

    try:
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_mtime >= since
    except OSError:
        return False  # The file does not exist or cannot be accessed.


def error_file_of(error_file: str, pid: int) -> str:
    """Return the path to which the error file of a worker is renamed when another worker replaces it."""
    folder, name = os.path.split(error_file)
    return os.path.join(folder, f"of_{pid}_{name}")


def set_aside(error_file: str, kept: str, rank: int) -> OSError | None:
    """Rename a worker's error file to ``kept``. Rename its flight records and its fault file (the output of
    :mod:`faulthandler`) to names that match. Otherwise, the agent would take these files for those of the
    worker that replaces this one. Return the last error, or ``None`` if all files were renamed.
    """
    failed = None
    for path, to in (
        (error_file, kept),
        (fault_file(error_file), fault_file(kept)),
        (flight_record_file(error_file), flight_record_file(kept)),
        (last_record_file(error_file), last_record_file(kept)),
        (f"{flight_dumps(error_file)}{rank}", f"{flight_dumps(kept)}{rank}"),
    ):
        try:
            if os.path.exists(path):
                os.rename(path, to)
        except OSError as error:  # noqa: PERF203 -- the other files are still to be renamed
            failed = error
    return failed


def last_bytes(path: str, limit: int) -> bytes:
    """Return the last bytes of a file, at most ``limit``; no bytes if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read()
    except OSError:
        return b""


def last_lines(path: str, count: int) -> list[str]:
    """Return the last lines of a log file. If it cannot be read, return a line that says why."""
    from elasticrs import _core

    try:
        lines = _core.last_lines(path, count)
    except OSError as error:
        return [f"(the file cannot be read: {error.strerror})"]
    return [line.decode(errors="replace") for line in lines]


def discard_unused_files(error_file: str) -> None:
    fault, requests = fault_file(error_file), flight_requests_file(error_file)
    for path in (fault, requests):
        try:
            if path == requests or os.path.getsize(path) == 0:
                os.unlink(path)
        except OSError:  # noqa: PERF203 -- only two iterations
            # The file does not exist, or the disk has failed. Continue, because this does not affect the job.
            continue


class EmptyFileError(ValueError):
    """Raised if the worker created its error file, but could not write to it."""


def message_of(data: Mapping[str, Any]) -> tuple[str | dict[str, Any], int]:
    """Return the message and the timestamp (seconds since 1970) from an error file. It has these in one of
    two forms: as torch writes them, in an object ``message``, or directly. Raise ``ValueError`` for others.
    """
    if "message" not in data:
        raise ValueError("no `message` in it")
    message = data["message"]
    try:
        if isinstance(message, str):
            return message, int(data.get("timestamp", 0))
        return message, int(message["extraInfo"]["timestamp"])
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise ValueError(f"no timestamp in it: {problem!r}") from None


def load_object(path: str) -> dict[str, Any]:
    """Read the JSON object in an error file, which may be damaged. Raise :class:`EmptyFileError` for an empty
    file, and ``ValueError`` if no JSON object is found.
    """
    import json

    with open(path, "rb") as file:
        content = file.read(_ERROR_FILE_LIMIT + 1)
        if len(content) > _ERROR_FILE_LIMIT:
            found = os.fstat(file.fileno())
            file.seek(max(_ERROR_FILE_LIMIT, found.st_size - _TEXT_LIMIT))
            return _parts(content, file.read(_TEXT_LIMIT), found.st_mtime, found.st_size)
    if not content:
        raise EmptyFileError("it is empty")
    try:
        data = json.loads(content.decode("utf-8", errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object, so there is no `message` in it")
    _shorten(data)
    return data


def _parts(beginning: bytes, end: bytes, written: float, size: int) -> dict[str, Any]:
    """Return the parts that the report needs of an error file above :data:`_ERROR_FILE_LIMIT`."""
    import json
    import re

    found = re.match(_BEGINNING, beginning)
    if found is None:
        raise ValueError(f"it has {size:,} bytes, and no `message` at its beginning")
    text = beginning[found.end() : found.end() + _TEXT_LIMIT].decode("utf-8", "replace")
    message = json.loads(f'"{re.match(_PART_OF_STRING, text)[0]}"', strict=False)  # type: ignore[index]
    line = message.lstrip().split("\n", 1)[0][:_LINE_LIMIT]
    # Put the line that names the exception last, because it is the last one in a traceback.
    told = f"[the error file has {size:,} bytes; only the first line of its message is shown]\n{line}"
    data = {"message": {"message": told, "extraInfo": {"timestamp": str(int(written))}}}
    own = end.rpartition(_OWN_DATA)[2].decode("utf-8", "replace")
    try:
        data["elasticrs"], _ = json.JSONDecoder().raw_decode("{" + own)
    except (ValueError, RecursionError):
        return data
    return data


def _shorten(data: dict[str, Any]) -> None:
    message = data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    for each, name in ((data, "message"), (message, "message"), (extra, "py_callstack")):
        if isinstance(each, dict) and isinstance(each.get(name), str):
            each[name] = shortened(each[name])


def shortened(text: str) -> str:
    """Return the text. Omit the middle of a text that is longer than :data:`_TEXT_LIMIT` characters."""
    left_out = len(text) - _TEXT_LIMIT
    if left_out <= 0:
        return text
    first, last = text[: _TEXT_LIMIT // 4], text[-(3 * _TEXT_LIMIT // 4) :]
    return f"{first}\n[{left_out:,} characters are left out; the error file has them]\n{last}"


def fault_stack(error_file: str) -> str | None:
    # The file is missing or empty if the program is not Python, or has not run elasticrs's code at its start.
    text = last_bytes(fault_file(error_file), _STACK_LIMIT).decode("utf-8", "replace")
    # Use the last entry, because forked children may have written earlier entries to the same file.
    last = text[max(0, text.rfind("Fatal Python error")) :]
    last = "\n\n".join(part for part in last.split("\n\n") if f'{OWN_THREAD}", line ' not in part)
    # Remove the list of extension modules, because it is long and does not help to explain the crash.
    return last.partition("\nExtension modules:")[0].rstrip() or None


# --- the failure ---

NOT_AVAILABLE = "<N/A>"
"""Placeholder for the path of a missing error file."""

_NO_MESSAGE = "<NONE>"
TORCH_HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
"""Message of a worker that recorded no exception, as in torch."""
_FAULTS = {_signal.SIGILL, _signal.SIGABRT, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGSEGV}
"""Signals for which :mod:`faulthandler` writes the stack."""
_TAIL_LINES = 50


class ProcessFailure:
    """Failure of a worker. Only the first seven attributes, those of torch, are compared for equality.

    Unlike in torch, an unreadable or invalid error file is reported in ``message`` and raises no exception.

    Args:
        local_rank: local rank of the worker.
        pid: pid of the worker.
        exitcode: exit code, or the negative number of the signal that killed the worker; ``None`` if unknown.
        error_file: path at which the worker would write its error file.
        seen_ns: time at which the exit was noticed, in monotonic nanoseconds.
        sent_signal: last signal that elasticrs sent to the worker before its exit; ``None`` if it sent none.
        cause: cause of the failure, if neither the worker's error file nor its exit code shows it.
        how: phrase that :func:`.how_it_failed` returns; ``None`` to derive it from the other arguments.
        note: additional line for the report, for example about the OOM killer.
        log_paths: log files by name of the stream.
        stderr_tail: last lines of the worker's stderr.
        host: host name of the worker's machine; ``None`` for this machine.
        unread: reason why the worker's files cannot be read. If a reason is given, no file is accessed.

    Attributes:
        error_file: path of the error file, or ``"<N/A>"`` if the worker has not written one.
        error_file_data: contents of the error file.
        message: ``message`` of the error file (text, or torch's nested form), or a text about the exit code.
        timestamp: time of the failure, in seconds since the epoch.
        recorded_ns: when the worker recorded its error, in monotonic nanoseconds; ``None`` if it did not.
        recorded_pid: pid of the process that recorded the error: the worker, or a process that it started.
        exception: qualified name of the recorded exception's type; ``None`` if unknown.
        place: where the exception was raised, such as ``train.py:88``; ``None`` if unknown.
        errno: error number of the recorded ``OSError``; ``None`` for other exceptions.
        python: path of the interpreter that recorded the exception; ``None`` if unknown.
        is_start_error: true if the program cannot be parsed, or lacks a module that it imports at top level.
        is_transient: true if the exception only reports a lost connection or a timeout.
        is_lost_peer: true if the exception only reports that another worker is lost or does not answer.
        member: text of the exception that represents an exception group; ``None`` for other exceptions.
        more_members: number of the group's other exceptions.
        is_retryable: false if another attempt would be useless, because the worker has raised
            :class:`elasticrs.errors.NonRetryable` or written ``"retryable": false`` to its error file.
        stack: stacks of all threads after a fault such as SIGSEGV, or of a hung thread; ``None`` if unknown.
        more_notes: further lines for the report.
        named: text for the report's field ``rank`` if several ranks may be to blame; ``None`` for this rank.
        is_first: true if this failure is the root cause even if another worker failed earlier.
        cause_outside: reason for this failure that is outside of the workers, such as a lost node. The reason
            is then the root cause of the job, and not this failure. ``None`` if there is none.
    """

    __match_args__ = ("local_rank", "pid", "exitcode", "error_file")
    __hash__ = None  # type: ignore[assignment]  # mutable objects have no hash

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
        how: str | None = None,
        note: str | None = None,
        log_paths: Mapping[str, str] | None = None,
        stderr_tail: Sequence[str] = (),
        host: str | None = None,
        unread: str = "",
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
        self.how = how
        self.note = note
        self.log_paths = dict(log_paths or {})
        self.stderr_tail = tuple(stderr_tail)
        self.recorded_ns: int | None = None
        self.recorded_pid: int | None = None
        self.exception: str | None = None
        self.place: str | None = None
        self.errno: int | None = None
        self.python: str | None = None
        self.is_start_error = False
        self.is_transient = False
        self.is_lost_peer = False
        self.member: str | None = None
        self.more_members = 0
        self.is_retryable = True
        has_stack = self.signal_number() in _FAULTS and error_file and not unread
        self.stack = fault_stack(error_file) if has_stack else None

        self.more_notes: Sequence[str] = ()
        self.named: str | None = None
        self.is_first = False
        self.cause_outside: str | None = None

        age_ns = 0 if seen_ns is None else time.monotonic_ns() - seen_ns
        self.wall_ns = time.time_ns() - age_ns
        self.timestamp = self.wall_ns // 1_000_000_000
        self._read(error_file, unread)

    def _read(self, path: str, trouble: str) -> None:
        if not trouble and os.path.isfile(path):
            self.error_file = path
            try:
                data = load_object(path)
                # Read the facts first, as the restart policy needs them even if the message is invalid.
                self._read_facts(data)
                message, timestamp = message_of(data)
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
                self._find_exception_behind()
        if not self.message:
            self.message = self._made_up_message(trouble)

    def _read_facts(self, data: Mapping[str, Any]) -> None:
        match data.get("elasticrs"):
            case {"failure": {"exception": str(exception), **facts}}:
                self.exception = exception
                for name, kind in (("place", str), ("errno", int), ("python", str)):
                    if isinstance(facts.get(name), kind):
                        setattr(self, name, facts[name])
                for name in ("is_start_error", "is_transient", "is_lost_peer"):
                    setattr(self, name, facts.get(name) is True)
                member, more = facts.get("member"), facts.get("more")
                if isinstance(member, str) and isinstance(more, int):
                    self.member, self.more_members = member, more
                self.is_retryable = facts.get("is_retryable") is not False
        message = data.get("message")
        extra = message.get("extraInfo") if isinstance(message, dict) else None
        for each in (data, message, extra):
            if isinstance(each, dict) and "retryable" in each:
                self._read_mark(each["retryable"])

    def _find_exception_behind(self) -> None:
        """Store the type and place of the original exception, by which failures are told apart, if the
        worker's exception only contains it: as an exception group, or as the error of a child process.
        """
        extra = self.message.get("extraInfo") if isinstance(self.message, dict) else None
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
        if self.exception is None or not isinstance(callstack, str):
            return
        found = summarize(callstack)
        if found is None or found.exception is None:
            return
        told = found if self.member is None else summarize(self.member)
        self.place = (told and told.place) or self.place
        if found.exception.rpartition(".")[2] != self.exception.rpartition(".")[2]:
            self.exception = found.exception

    def _read_mark(self, value: object) -> None:
        """Read the error file's field ``retryable``. In ``extraInfo``, torch writes it as a string."""
        mark = value.strip().lower() if isinstance(value, str) else value
        if mark is False or mark == "false":
            self.is_retryable = False
        elif mark is not True and mark != "true":
            shown = printable(repr(value), 40)
            self.more_notes = [
                f"`retryable` in its error file is {shown}, which is neither true nor false, so it is ignored"
            ]

    def _made_up_message(self, trouble: str) -> str:
        known = self.cause
        if known:
            self.error_file_data["message"] = known
        elif self.signal_number():
            known = f"Signal {self.signal_number()} ({self.signal_name()}) received by PID {self.pid}"
        if not known:
            traits = {"category": "system_terminated_error", "retryability": "False"}
            self.error_file_data["errorTraits"] = traits
            # There is an error file already, so omit torch's hint on how to get one.
            known = describe_exit(self.exitcode) if trouble else TORCH_HINT
        return f"{known}; {trouble}" if trouble else known

    def signal_number(self) -> int:
        """Return the number of the signal that killed the worker; 0 if no signal killed it."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else 0

    def signal_name(self) -> str:
        """Return the name of the signal that killed the worker; ``"<N/A>"`` if there is no name."""
        if not self.signal_number():
            return NOT_AVAILABLE
        import signal

        try:
            return signal.Signals(self.signal_number()).name
        except ValueError:
            return NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the local time of the failure, as ``YYYY-MM-DD_HH:MM:SS``."""
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


def failure_of(
    ended: WorkerExited, stdout: str | None, stderr: str | None, error_file: str, **known: Any
) -> ProcessFailure:
    """Describe a failed process by its exit and its files. ``known`` overrides what the exit shows."""
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


class Clock(Value):
    """Wall clock of the machine that hosts the nodes' common store. ``offset_ns`` is its time minus that of
    this node's wall clock. ``error_ns`` is the possible error of this offset; ``None`` if it is unknown.
    """

    offset_ns: int = 0
    error_ns: int | None = 0

    def from_monotonic(self, ns: int) -> int:
        return ns + _wall_minus_monotonic() + self.offset_ns

    def to_monotonic(self, ns: int) -> int:
        return ns - self.offset_ns - _wall_minus_monotonic()


def _wall_minus_monotonic() -> int:
    """Return wall clock minus monotonic clock, in ns. Of three measurements, the fastest is most precise."""
    found = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1]


def remote_failure(cause: Cause, clock: Clock) -> ProcessFailure:
    """Return a failure on another node; ``cause.rank`` must be known."""
    failure = ProcessFailure(
        -1 if cause.local_rank is None else cause.local_rank,
        -1 if cause.pid is None else cause.pid,
        # A worker with a pid has failed, even if its exit code is unknown. Without a pid, nothing is known.
        1 if cause.exitcode is None and cause.pid is not None else cause.exitcode,
        "",
        seen_ns=None if cause.time_ns is None else clock.to_monotonic(cause.time_ns),
        cause=cause.message or None,
        how=cause.how,
        note=f"on node {cause.node}; {_comparable(cause.error_ns, clock.error_ns)}",
        stderr_tail=[str(line) for line in cause.lines],
        host=str(cause.host),
    )
    failure.is_lost_peer = bool(cause.is_consequence)
    failure.more_notes = [str(xid) for xid in cause.xids]
    return failure


def _comparable(theirs: int | None, ours: int | None) -> str:
    if theirs is None or ours is None:
        return "times of different nodes may be off: their clocks have not been compared"
    # Round up, because the value is shown as an upper bound.
    tenths = max(1, -(-(theirs + ours) // 100_000))
    return f"times of different nodes are comparable to {tenths / 10:.1f} ms"


# --- words ---


def traceback_text(failure: ProcessFailure) -> str:
    """Return the traceback, or a message that describes the failure if there is none."""
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = str(callstack or message.get("message", NOT_AVAILABLE)).rstrip()
    elif failure.error_file == NOT_AVAILABLE and failure.seen_ns is not None and not failure.signal_number():
        message = failure.cause or _silent(failure)
    if failure.signal_number():
        message = _enriched(message, failure)
    if failure.stack:
        message = f"{message}\n{failure.stack}"
    return message


def how_it_failed(failure: ProcessFailure) -> str:
    """Return a phrase to append to the worker's name, such as ``: KeyError: 1`` or `` died by SIGKILL``. All
    messages to the user, on all nodes, use this phrase.
    """
    if failure.how is not None:
        return failure.how
    said = None if _ended_by_itself(failure) else _headline(failure)
    return f" {how_it_ended(failure.exitcode)}" if said is None else f": {said}"


def _ended_by_itself(failure: ProcessFailure) -> bool:
    """Return true if a signal killed the worker, unless elasticrs had signalled the worker before. A worker
    that elasticrs had signalled may have been exiting after an exception.
    """
    return failure.sent_signal is None and bool(failure.signal_number())


def _headline(failure: ProcessFailure) -> str | None:
    if failure.error_file == NOT_AVAILABLE and not failure.cause:
        return None
    if failure.member is not None:
        return headline(failure.member, failure.more_members)
    return headline(traceback_text(failure))


def _silent(failure: ProcessFailure) -> str:
    keep = "" if "stderr" in failure.log_paths else "; use --capture-stderr to see its last lines here"
    return (
        f"{describe_exit(failure.exitcode)}, and no exception was recorded; possible reasons: sys.exit,"
        " os._exit, a program that is not Python, or a framework that catches exceptions (Hydra: set"
        f" HYDRA_FULL_ERROR=1){keep}"
    )


def _enriched(message: str, failure: ProcessFailure) -> str:
    try:
        handler = public("multiprocessing.errors.get_error_handler")()
        return str(handler.maybe_enrich_signal_failure_message(message, failure.error_file))
    # Continue if the user's error handler fails, because the failure report must still be printed.
    except Exception as problem:
        return f"{message}\n(the error handler could not add to this: {problem!r})"


# --- the root cause ---

RECORD_WINDOW_NS = 60_000_000_000
WAVE_NS = 5_000_000_000


def failed_ns(failure: ProcessFailure) -> int | None:
    """Return when a worker recorded its error, or when its exit was noticed, in monotonic nanoseconds."""
    seen, recorded = failure.seen_ns, failure.recorded_ns
    if seen is None:
        return None
    if recorded is None or failure.recorded_pid != failure.pid:
        return seen
    return recorded if seen - RECORD_WINDOW_NS <= recorded <= seen else seen


def failed_wall_ns(failure: ProcessFailure) -> int:
    """Return the time of :func:`failed_ns` on this node's wall clock, in nanoseconds since 1970."""
    return failure.wall_ns + (failed_ns(failure) or 0) - (failure.seen_ns or 0)


def _times(failures: Mapping[int, ProcessFailure]) -> dict[int, int | None]:
    """Return the time at which each worker failed by ROOT-3 and ROOT-4; ``None`` if it is unknown."""
    found = {rank: failed_ns(failure) for rank, failure in failures.items()}
    silent = [failure.seen_ns for failure in failures.values() if _is_silent(failure)]
    for rank, failure in failures.items():
        recorded = found[rank]
        if recorded is None or recorded != failure.recorded_ns:
            continue
        later = [end for end in silent if end is not None and recorded < end <= recorded + WAVE_NS]
        if later and failure.is_lost_peer:
            found[rank] = min(later) + 1
    return found


def _is_silent(failure: ProcessFailure) -> bool:
    return failure.sent_signal is None and failure.recorded_ns is None and failure.cause is None


def in_order(failures: Mapping[int, ProcessFailure]) -> list[int]:
    known = _times(failures)
    if None in known.values():
        return sorted(failures, key=lambda rank: failures[rank].timestamp)
    return sorted(failures, key=lambda rank: known[rank] or 0)


def victims(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Return the workers that exited because elasticrs stopped them."""
    unprompted = (f.seen_ns for f in failures.values() if f.sent_signal is None and f.seen_ns is not None)
    first, known = min(unprompted, default=0), _times(failures)

    def failed_before(rank: int) -> bool:
        failed = known[rank]
        return failed is not None and failed != failures[rank].seen_ns and failed < first

    return [rank for rank in failures if failures[rank].sent_signal is not None and not failed_before(rank)]


def root_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank of the root cause. Raise ``ValueError`` if there are no failures."""
    for rank, failure in failures.items():
        if failure.is_first:
            return rank
    spared = set(victims(failures))
    order = in_order(failures)
    if not order:
        raise ValueError("no failures")
    own = [rank for rank in order if rank not in spared]
    first = own[0] if own else order[0]
    if failures[first].is_lost_peer:
        known = _times(failures)
        latest = (known[first] or 0) + WAVE_NS
        causes = (rank for rank in own if not failures[rank].is_lost_peer)
        return next((rank for rank in causes if (known[rank] or 0) <= latest), first)
    return first
