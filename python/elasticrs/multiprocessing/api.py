"""Start worker processes and redirect their output, with torch's names.

Unlike in torch, no attempt's directory is deleted, signal handlers are restored at the end, and all processes
and their descendants are stopped in parallel with one deadline.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from elasticrs._engine.failures.failure import discard_unused_files, failure_of
from elasticrs._engine.gpus.numa import cpus_of_options
from elasticrs._engine.job.config import DEFAULT_SIGNALS, check_start_method, default_stop_scope
from elasticrs._engine.job.phrases import SILENT
from elasticrs._engine.process.signals import StopRequests
from elasticrs._engine.workers.functions import interrupts
from elasticrs._engine.workers.functions.supervised_group import PolledGroup, SupervisedGroup
from elasticrs._engine.workers.plan import hook_environment, inherited_environment
from elasticrs._engine.workers.process import console_stream, process_spec
from elasticrs.multiprocessing.errors import ProcessFailure, record
from elasticrs.multiprocessing.logs_specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from elasticrs.multiprocessing.redirects import redirect_stderr, redirect_stdout
from elasticrs.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler, handlers
from elasticrs.multiprocessing.subprocess_handler.subprocess_handler import GroupMember
from elasticrs.multiprocessing.tail_log import TailLog, replaced_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from elasticrs._core import LogStream, WorkerExited
    from elasticrs._engine.gpus.numa import NumaOptions
    from elasticrs._engine.workers.functions.start_methods import FunctionStart

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
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
"""Torch's text, which tests compare. The warning is for users' subclasses that start processes themselves."""


class SignalException(Exception):  # noqa: N818 -- torch's name
    """Raised when the signal ``sigval`` asks the program to stop the workers."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


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
    """Let a further signal only call ``hurry`` in a block that cleans up after a :class:`SignalException`."""
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
    """Base class for a group of processes that are started, monitored and stopped together. The arguments are
    those of :func:`start_processes`. Raise ``RuntimeError`` if ``logs_specs`` has no log files for one of the
    ranks.
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
    """Exit with a one-line message if this process is a worker that is still importing the main module. A
    main module without a ``__name__`` guard would launch workers again in each worker. Python's own check for
    this comes too late.
    """
    # Do not import `multiprocessing`, which is slow. In such a worker, the module is already loaded.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        sys.exit(_UNGUARDED)


class _SupervisedContext(PContext):
    def __init__(self, *how: Any, numa_options: NumaOptions | None = None) -> None:
        super().__init__(*how)
        self._numa_options = numa_options
        self._group: SupervisedGroup | PolledGroup | None = None
        self._result: RunProcsResult | None = None

    def _show_by_core(self) -> None:
        """Let the core copy the output to those standard streams that the program has not replaced."""
        self._streams: list[LogStream] = []
        replaced = replaced_streams()
        for to, tail_log in ((1, self._stdout_tail), (2, self._stderr_tail)):
            if to in replaced:
                continue
            for local_rank, path in tail_log.take_files().items():
                prefix = self._prefixes.get(local_rank, f"[{self.name}{local_rank}]:")
                self._streams.append(console_stream(local_rank, path, to, prefix))

    def _processes(self) -> SupervisedGroup | PolledGroup:
        if self._group is None:
            raise AssertionError("call start() first")
        return self._group

    def _poll(self) -> RunProcsResult | None:
        processes = self._processes()
        processes.wait(0.0)
        if self._result is None and processes.has_ended:
            # Close the process group before return values are unpickled by the user's code, which may raise.
            self.close()
            self._result = self._make_result(processes)
        return self._result

    def _pause(self, seconds: float) -> None:
        self._processes().wait(seconds)

    def _make_result(self, processes: SupervisedGroup | PolledGroup) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        failed = [ended for ended in processes.log.exits.values() if ended.exitcode != 0]
        failed.sort(key=lambda ended: (ended.local_rank != processes.log.first_failure, ended.seen_ns))
        for ended in failed:
            result.failures[ended.local_rank] = self._failure(ended, processes)
        if not failed:
            result.return_values = dict.fromkeys(range(self.nprocs))
        return result

    def _failure(
        self, ended: WorkerExited, processes: SupervisedGroup | PolledGroup, cause: str | None = None
    ) -> ProcessFailure:
        rank = ended.local_rank
        if ended.exitcode is None:
            end = processes.log.end
            lost = end is not None and end.nursery_exitcode is not None
            cause = "the nursery was lost, which killed the process" if lost else self._unknown_end()
        files = (self.stdouts[rank], self.stderrs[rank], self.error_files.get(rank, ""))
        return failure_of(ended, *files, cause=cause)

    def _unknown_end(self) -> str:
        return "its exit status is unknown"

    def _environment(self, rank: int) -> dict[str, str]:
        return {**inherited_environment(), **self.envs[rank]}

    def _cpus(self) -> list[list[int]] | None:
        return cpus_of_options(self._numa_options, self.nprocs)

    def pids(self) -> dict[int, int]:
        return dict(enumerate(self._processes().log.pids))

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop all processes. If a :class:`SignalException` is the reason, more signals shorten the wait."""
        with clean_up(self._hurry):
            super().close(death_sig, timeout)

    def _hurry(self) -> None:
        if self._group is not None:
            self._group.hurry()

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        if self._group is None:
            return
        try:
            self._group.stop(death_sig, timeout)
        finally:
            self._group.close()


class SubprocessContext(_SupervisedContext):
    """Context whose processes run a program. See :class:`PContext`. ``subprocess_handlers`` is keyed by local
    rank.
    """

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        super().__init__(
            *(name, entrypoint, args, envs, logs_specs, log_line_prefixes),
            *(duplicate_stdout_filters, duplicate_stderr_filters),
            numa_options=numa_options,
        )
        self.subprocess_handlers: dict[int, SubprocessHandler] = {}

    def _start(self) -> None:
        if self._group is not None:
            raise ValueError("start() was called twice")
        if get_subprocess_handler is not handlers._OWN:
            self._start_by_replacement()
            return
        self._show_by_core()
        cpus = self._cpus()
        commands = {rank: [str(self.entrypoint), *map(str, self.args[rank])] for rank in range(self.nprocs)}
        specs = [
            process_spec(
                *(rank, command, hook_environment(self._environment(rank))),
                *(self.stdouts[rank], self.stderrs[rank]),
                cpus=None if cpus is None else cpus[rank],
            )
            for rank, command in commands.items()
        ]
        self._group = group = SupervisedGroup(stop_scope=default_stop_scope(self.entrypoint))
        group.start(specs, self._streams)
        self.subprocess_handlers = {
            rank: GroupMember(group, rank, command) for rank, command in commands.items()
        }

    def _start_by_replacement(self) -> None:
        """Start the programs by calling ``get_subprocess_handler``, which the user has replaced."""
        self._group = group = PolledGroup(self.subprocess_handlers)
        for rank in range(self.nprocs):
            handler = get_subprocess_handler(
                entrypoint=str(self.entrypoint),
                args=self.args[rank],
                env=self.envs[rank],
                stdout=self.stdouts[rank],
                stderr=self.stderrs[rank],
                local_rank_id=rank,
                numa_options=self._numa_options,
            )
            group.add(rank, handler)


class MultiprocessContext(_SupervisedContext):
    """Context whose processes run a function. See :class:`PContext`. ``start_method`` is ``spawn``, ``fork``
    or ``forkserver``; otherwise, raise ``ValueError``. As in torch, processes that were stopped because
    another one failed are not listed as failures.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        check_start_method(start_method)
        super().__init__(
            *(name, entrypoint, args, envs, logs_specs, log_line_prefixes),
            *(duplicate_stdout_filters, duplicate_stderr_filters),
            numa_options=numa_options,
        )
        self.start_method = start_method
        self._function = entrypoint
        self._functions: FunctionStart | None = None

    def _start(self) -> None:
        from elasticrs._engine.workers.functions.start_methods import BY_METHOD, Functions

        if self._functions is not None:
            raise ValueError("start() was called twice")
        self._show_by_core()
        environments = {rank: self._environment(rank) for rank in range(self.nprocs)}
        files = (self.stdouts, self.stderrs)
        functions = Functions(self.name, self._function, self.args, environments, *files, cpus=self._cpus())
        self._functions = BY_METHOD[self.start_method](functions)
        specs = self._functions.prepare()
        # `prepare` forks the keeper (the process that forks the workers), so call it before starting threads.
        self._group = group = SupervisedGroup(stop_scope="worker")
        group.on_fd = self._functions.fd_ready
        group.start(specs, self._streams)
        self._functions.run_in(group)

    def _unknown_end(self) -> str:
        if self._functions is not None and self._functions.has_keeper:
            return "the keeper (the parent process of the functions) was killed, which killed the process"
        return super()._unknown_end()

    def _make_result(self, processes: SupervisedGroup | PolledGroup) -> RunProcsResult:
        result = super()._make_result(processes)
        values = {} if self._functions is None else self._functions.values
        own = {rank: failure for rank, failure in result.failures.items() if failure.sent_signal is None}
        result.failures = own or {
            rank: self._failure(ended, processes, SILENT)
            for rank, ended in processes.log.exits.items()
            if not values.get(rank)
        }
        if result.is_failed():
            result.return_values = {}
        result.return_values = {rank: pickle.loads(values[rank]) for rank in result.return_values}
        return result

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        try:
            super()._close(death_sig, timeout)
        finally:
            if self._functions is not None:
                self._functions.close()


def _wrap(
    local_rank: int,
    fn: Callable[..., Any],
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    stdout_redirects: dict[int, str],
    stderr_redirects: dict[int, str],
    ret_vals: dict[int, Any],
    queue_finished_reading_event: Any,
    numa_options: NumaOptions | None = None,
) -> None:
    """Run a function in this process as a worker, for programs that call torch's function of this name."""
    os.environ.update(envs[local_rank])
    cpus = cpus_of_options(numa_options, len(args))
    if cpus is not None:
        os.sched_setaffinity(0, cpus[local_rank])
    with (
        get_std_cm(stdout_redirects[local_rank], redirect_stdout),
        get_std_cm(stderr_redirects[local_rank], redirect_stderr),
    ):
        value = record(fn)(*args[local_rank])
    ret_vals[local_rank].put(value)
    queue_finished_reading_event.wait()
