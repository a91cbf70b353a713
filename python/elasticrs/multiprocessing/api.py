"""Start worker processes and redirect their output, with torch's names.

Unlike in torch, no attempt's directory is deleted, signal handlers are restored at the end, and all processes
and their descendants are stopped in parallel with one deadline.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any, TextIO

from elasticrs import lazy
from elasticrs._engine.failures.files import discard_unused_files
from elasticrs._engine.job.config import DEFAULT_SIGNALS, LogSettings, parse_streams
from elasticrs._engine.process.signals import StopRequests
from elasticrs._engine.workers import logs
from elasticrs._engine.workers.functions import interrupts
from elasticrs.multiprocessing.tail_log import TailLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from elasticrs.multiprocessing.errors import ProcessFailure

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",  # noqa: F822 -- imported by `__getattr__`
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",  # noqa: F822 -- imported by `__getattr__`
    "get_std_cm",
    "to_map",
]

logger = logging.getLogger(__name__)

IS_WINDOWS = False
"""Constant of torch's module, for programs that read it."""

_NO_HANDLERS = (
    "Failed to register signal handlers since torchelastic is running on a child thread. "
    "This could lead to orphaned worker processes if the torchrun is terminated."
)
"""Torch's text of the message, which tests compare.

The warning is for users' subclasses that start processes themselves.
"""

_HOMES = {
    "elasticrs.multiprocessing.contexts": ("MultiprocessContext", "SubprocessContext", "_wrap"),
    "elasticrs.multiprocessing.errors": ("ProcessFailure", "record"),
    "elasticrs.multiprocessing.subprocess_handler": ("SubprocessHandler", "get_subprocess_handler"),
    "elasticrs.multiprocessing.redirects": ("redirect_stderr", "redirect_stdout"),
}


def __getattr__(name: str) -> Any:
    # Import lazily, because these modules import this one.
    return lazy(__name__, name, _HOMES)


class SignalException(Exception):  # noqa: N818 -- torch's name
    """Raised when the signal ``sigval`` asks the program to stop the workers."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class Std(IntFlag):
    """Output streams of a process, as flags."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse ``"3"`` (for all ranks) or ``"0:3,1:0"`` (by local rank). Raise ``ValueError`` otherwise."""
        try:
            found = parse_streams(vm)
        except ValueError as error:
            raise ValueError(f"{vm} does not match: {error}") from None
        if isinstance(found, int):
            return cls(found)
        return {local_rank: cls(bits) for local_rank, bits in found.items()}


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return the streams for each local rank. Ranks that are missing from a mapping get ``NONE``."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {local_rank: val_or_map.get(local_rank, Std.NONE) for local_rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Paths of log files, keyed by local rank. An empty path means the console."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Base class of objects that choose the log files of workers.

    Args:
        log_dir: base directory of the log files.
        redirects: streams that are written to files, for all ranks or by local rank.
        tee: streams that are written to files and to the console.
        local_ranks_filter: local ranks whose output is printed on the console; ``None`` for all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the log files of an attempt, and add ``TORCHELASTIC_ERROR_FILE`` to the variables."""

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """Base directory of the log files."""


class DefaultLogsSpecs(LogsSpecs):
    """Files ``<log_dir>/<run_id>_<host>_XXXX/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}``.

    Raise ``NotADirectoryError`` if ``log_dir`` is a file.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._is_temporary = not log_dir
        if not log_dir:
            log_dir = logs.make_private_directory(logs.temporary_directory(), "elasticrs_")
        elif os.path.isfile(log_dir):
            raise NotADirectoryError(f"log_dir: {log_dir} is a file")
        elif log_dir != os.devnull:
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        some = envs.get(0, {})
        directory = ""
        if self._root_log_dir != os.devnull:
            directory = self._attempt_directory(some)
            for local_rank in range(len(envs)):
                os.mkdir(os.path.join(directory, str(local_rank)))
        paths = logs.layout(self._settings(), directory, len(envs))
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = paths.error_files[local_rank]
        found = paths.fields()
        del found["are_new"]
        return LogsDest(**found)

    def _remove_if_empty(self, attempt: str | None = None) -> None:
        """Remove the base directory, or ``attempt``, if it is temporary and contains no files."""
        if self._is_temporary:
            logs.remove_if_empty(attempt or self.root_log_dir, levels=2 if attempt else 0)

    def _settings(self) -> LogSettings:
        chosen = self._local_ranks_filter
        return LogSettings(
            self._root_log_dir, self._redirects, self._tee, frozenset(chosen) if chosen else None
        )

    def _attempt_directory(self, env: Mapping[str, str]) -> str:
        if self._run_log_dir is None:
            run_id = env.get("TORCHELASTIC_RUN_ID", "").replace(os.sep, "_")
            self._run_log_dir = logs.make_private_directory(self.root_log_dir, logs.run_prefix(run_id))
        # An earlier job may have removed the empty directory.
        logs.make_again(self._run_log_dir, is_temporary=self._is_temporary)
        attempt = os.path.join(self._run_log_dir, f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        if os.path.exists(attempt) and env.get("ELASTICRS_ROUND"):
            attempt = f"{attempt}_r{env['ELASTICRS_ROUND']}"
        path, again = attempt, 0
        while os.path.exists(path):
            again += 1
            path = f"{attempt}_{again}"
        os.mkdir(path)
        return path

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLogsSpecs) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._root_log_dir)

    def _key(self) -> tuple[Any, ...]:
        return (self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter)


@dataclass
class RunProcsResult:
    """Result of a group of processes, keyed by local rank."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return len(self.failures) > 0


def _terminate_process_handler(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 -- signal handler's signature
    """Raise :class:`SignalException` as soon as it is safe. If a clean-up is running, only make it faster."""
    if _clean_ups:
        hurry, requests = _clean_ups[-1]
        if requests.is_new(signum, time.monotonic()):
            interrupts.when_safe(hurry)
        return
    sigval = signal.Signals(signum)
    interrupts.raise_when_safe(
        SignalException(f"Process {os.getpid()} got signal: {sigval.value}", sigval=sigval)
    )


def _validate_full_rank(d: dict[int, Any], nprocs: int, what: str) -> None:
    actual_keys = set(d.keys())
    expected_keys = set(range(nprocs))
    if actual_keys != expected_keys:
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {expected_keys}, actual: {actual_keys}"
        )


def get_std_cm(
    std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Return ``redirect_fn(std_rd)``, or a context manager that does nothing if the path is empty."""
    return redirect_fn(std_rd) if std_rd else nullcontext()


caught_signals = interrupts.CaughtSignals()
"""Signal handlers of all contexts in this process."""


_clean_ups: list[tuple[Callable[[], None], StopRequests]] = []
"""Functions that make the running clean-ups faster. The last one belongs to the innermost clean-up."""


@contextmanager
def clean_up(hurry: Callable[[], None]) -> Iterator[None]:
    """Mark a block that cleans up after a :class:`SignalException`.

    A further signal in the block only calls ``hurry``.
    """
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, SignalException):
        error = error.__context__
    if error is None:
        yield
        return
    requests = StopRequests()
    requests.is_new(error.sigval, time.monotonic())
    _clean_ups.append((hurry, requests))
    try:
        yield
    finally:
        _clean_ups.pop()


def _catch(names: str) -> list[int]:
    caught: list[int] = []
    for name in names.split(","):
        try:
            signum = getattr(signal, name.strip())
            caught_signals.catch(signum, _terminate_process_handler)
        except (AttributeError, TypeError, ValueError, OSError):
            logger.warning("no handler for signal %s: there is none, or it cannot be caught", name)
            continue
        caught.append(signum)
        logger.info("Registered signal handler for %s", name)
    return caught


def _release(caught: list[int]) -> None:
    if caught and threading.current_thread() is not threading.main_thread():
        logger.warning("signal handlers stay: only the main thread can put back what was there before")
        return
    caught_signals.release(caught)
    caught.clear()


class PContext(ABC):
    """Base class for a group of processes that are started, monitored and stopped together.

    The arguments are those of :func:`start_processes`. Raise ``RuntimeError`` if ``logs_specs`` has no log
    files for one of the ranks.
    """

    # Mocks of the class need this attribute.
    _caught: list[int] = []  # noqa: RUF012 -- `__init__` sets it for each object

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self.name = name
        nprocs = len(args)
        logs_dest = logs_specs.reify(envs)
        _validate_full_rank(logs_dest.stdouts, nprocs, "stdouts")
        _validate_full_rank(logs_dest.stderrs, nprocs, "stderrs")
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.stdouts = logs_dest.stdouts
        self.stderrs = logs_dest.stderrs
        self.error_files = logs_dest.error_files
        self.nprocs = nprocs
        self._logs_specs = logs_specs
        self._caught = []
        self._prefixes = log_line_prefixes or {}
        stdouts, stderrs = _followed(logs_dest.tee_stdouts), _followed(logs_dest.tee_stderrs)
        self._stdout_tail = TailLog(name, stdouts, sys.stdout, self._prefixes)
        self._stderr_tail = TailLog(name, stderrs, sys.stderr, self._prefixes)
        self._tail_logs = [self._stdout_tail, self._stderr_tail]
        # A user's class that was written for older releases may lack these fields.
        filtered = [getattr(logs_dest, name, "") for name in ("filtered_stdout", "filtered_stderr")]
        self.filtered_stdout = self._copy(stdouts, filtered[0], duplicate_stdout_filters)
        self.filtered_stderr = self._copy(stderrs, filtered[1], duplicate_stderr_filters)

    def _copy(self, files: dict[int, str], path: str, needles: list[str] | None) -> TextIO | None:
        # No file can be created below `/dev/null`. Torch fails in this case.
        if not needles or not path or path.startswith(os.devnull + os.sep):
            return None
        copy = open(path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115 -- see `close`
        is_wanted = lambda line: any(needle in line for needle in needles)  # noqa: E731 -- used once
        self._tail_logs.append(TailLog(self.name, files, copy, self._prefixes, log_line_filter=is_wanted))
        return copy

    def start(self) -> None:
        """Start the processes. In the main thread, signals raise :class:`SignalException` from now on."""
        with interrupts.held():
            if threading.current_thread() is threading.main_thread():
                names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE") or DEFAULT_SIGNALS
                self._caught += _catch(names)
            else:
                logger.warning(_NO_HANDLERS)
            self._start()
            for tail_log in self._tail_logs:
                tail_log.start()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """Return the result if a process has failed or all have succeeded; otherwise ``None``."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""

    @abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None: ...

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all processes have succeeded, or one has failed and the others have been stopped.

        Args:
            timeout: seconds to wait; 0 polls once, and a negative number waits without limit.
            period: seconds between polls in a subclass that only has ``_poll``.

        Returns:
            The result, or ``None`` if processes are still running.

        Raises:
            SignalException: a signal arrived. The processes run until :meth:`close` is called.
        """
        deadline = time.monotonic() + timeout if timeout >= 0 else None
        while True:
            result = self._poll()
            left = period if deadline is None else min(period, deadline - time.monotonic())
            if result is not None or left <= 0:
                return result
            self._pause(left)

    def _pause(self, seconds: float) -> None:
        """Wait before the next poll. A subclass that receives events may shorten the wait."""
        time.sleep(seconds)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop all processes and their descendants, and release all resources. Idempotent.

        Args:
            death_sig: signal to send first; SIGTERM if ``None``.
            timeout: seconds until SIGKILL, for all processes together.
        """
        with interrupts.held():
            try:
                self._close(death_sig or signal.SIGTERM, timeout)
            finally:
                for tail_log in self._tail_logs:
                    tail_log.stop()
                for copy in (self.filtered_stdout, self.filtered_stderr):
                    if copy is not None:
                        copy.close()
                _release(self._caught)
                for path in self.error_files.values():
                    discard_unused_files(path)
                    if isinstance(self._logs_specs, DefaultLogsSpecs):
                        self._logs_specs._remove_if_empty(os.path.dirname(os.path.dirname(path)))


def _followed(tees: dict[int, str]) -> dict[int, str]:
    return {local_rank: path for local_rank, path in tees.items() if path and path != os.devnull}


_UNGUARDED = (
    "elasticrs: the main module launched workers again while a worker imported it. "
    'Put the launch under `if __name__ == "__main__":`.'
)


def refuse_while_main_is_imported() -> None:
    """Exit with a one-line message if this process is a worker that is still importing the main module.

    A main module without a ``__name__`` guard would launch workers again in each worker. Python's own check
    for this comes too late.
    """
    # Do not import `multiprocessing`, which is slow. In such a worker, the module is already loaded.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        sys.exit(_UNGUARDED)
