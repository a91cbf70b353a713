"""The two concrete subclasses of :class:`~elasticrs.multiprocessing.api.PContext`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticrs._engine.failures.failure import failure_of
from elasticrs._engine.gpus.numa import cpus_of_options
from elasticrs._engine.job.config import check_start_method, default_stop_scope
from elasticrs._engine.job.phrases import SILENT
from elasticrs._engine.job.value import Record, fresh
from elasticrs._engine.workers.functions.supervised_group import SupervisedGroup
from elasticrs._engine.workers.plan import hook_environment, inherited_environment
from elasticrs._engine.workers.process import console_stream, process_spec
from elasticrs.multiprocessing import api
from elasticrs.multiprocessing.api import PContext, RunProcsResult, clean_up, get_std_cm, logger
from elasticrs.multiprocessing.errors import ProcessFailure
from elasticrs.multiprocessing.subprocess_handler import handlers
from elasticrs.multiprocessing.tail_log import replaced_streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs._core import LogStream, WorkerExited
    from elasticrs._engine.gpus.numa import NumaOptions
    from elasticrs._engine.workers.functions.start_methods import FunctionStart
    from elasticrs.multiprocessing.api import LogsSpecs
    from elasticrs.multiprocessing.subprocess_handler import SubprocessHandler

__all__ = ["MultiprocessContext", "SubprocessContext"]

_LOOK = 0.1
"""Seconds between polls of programs that were started by the user's replacement of the handlers."""

_KILL_LIMIT = 10.0
"""Seconds to wait for the exit of programs after SIGKILL.

The wait is limited, because a program may hang in the kernel.
"""


class _SupervisedContext(PContext):
    def __init__(self, *how: Any, numa_options: NumaOptions | None = None) -> None:
        super().__init__(*how)
        self._numa_options = numa_options
        self._group: SupervisedGroup | None = None
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

    def _processes(self) -> SupervisedGroup:
        if self._group is None:
            raise AssertionError("call start() first")
        return self._group

    def _poll(self) -> RunProcsResult | None:
        processes = self._processes()
        processes.poll()
        for line in processes.take_trouble():
            logger.warning("%s", line)
        if self._result is None and processes.log.end is not None:
            # Close the group before unpickling the return values, because that runs code of the user, which
            # may raise an exception.
            self.close()
            self._result = self._make_result(processes)
        return self._result

    def _pause(self, seconds: float) -> None:
        processes = self._processes()
        processes.wait_until(lambda: processes.log.end is not None, seconds)

    def _make_result(self, processes: SupervisedGroup) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        failed = [ended for ended in processes.log.exits.values() if ended.exitcode != 0]
        failed.sort(key=lambda ended: (ended.local_rank != processes.log.first_failure, ended.seen_ns))
        for ended in failed:
            result.failures[ended.local_rank] = self._failure(ended, processes)
        if not failed:
            result.return_values = dict.fromkeys(range(self.nprocs))
        return result

    def _failure(
        self, ended: WorkerExited, processes: SupervisedGroup, cause: str | None = None
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
        """Stop all processes.

        If this is a clean-up after a :class:`SignalException`, a further signal ends the wait early.
        """
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
    """Context whose processes run a program. See :class:`PContext`.

    ``subprocess_handlers`` is keyed by local rank.
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
        self._foreign: ForeignPrograms | None = None

    def _start(self) -> None:
        from elasticrs.multiprocessing.subprocess_handler import SubprocessHandler

        if self._group is not None or self._foreign is not None:
            raise ValueError("start() was called twice")
        make = replaced_factory()
        if make is not None:
            self._foreign = ForeignPrograms(self, self._numa_options)
            self.subprocess_handlers = self._foreign.handlers
            self._foreign.start(make)
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
        self._group = SupervisedGroup(stop_scope=default_stop_scope(self.entrypoint))
        self._group.start(specs, self._streams)
        self.subprocess_handlers = {
            rank: SubprocessHandler.of_group(self._group, rank, command) for rank, command in commands.items()
        }

    def _poll(self) -> RunProcsResult | None:
        if self._foreign is None:
            return super()._poll()
        if self._result is None and self._foreign.has_ended():
            self.close()
            self._result = self._foreign_result(self._foreign)
        return self._result

    def _foreign_result(self, programs: ForeignPrograms) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        for rank, (exitcode, seen_ns) in programs.exits.items():
            if exitcode != 0:
                result.failures[rank] = ProcessFailure(
                    *(rank, programs.handlers[rank].proc.pid, exitcode, self.error_files.get(rank, "")),
                    seen_ns=seen_ns,
                    sent_signal=programs.sent.get(rank),
                )
        if not result.failures:
            result.return_values = dict.fromkeys(range(self.nprocs))
        return result

    def _pause(self, seconds: float) -> None:
        if self._foreign is None:
            super()._pause(seconds)
        else:
            time.sleep(min(seconds, _LOOK))

    def pids(self) -> dict[int, int]:
        if self._foreign is None:
            return super().pids()
        return {rank: handler.proc.pid for rank, handler in self._foreign.handlers.items()}

    def _hurry(self) -> None:
        super()._hurry()
        if self._foreign is not None:
            self._foreign.kill()

    def _close(self, death_sig: signal.Signals, timeout: float = 30) -> None:
        if self._foreign is None:
            super()._close(death_sig, timeout)
        else:
            self._foreign.stop(death_sig, timeout)


class MultiprocessContext(_SupervisedContext):
    """Context whose processes run a function. See :class:`PContext`.

    ``start_method`` is ``spawn``, ``fork`` or ``forkserver``; otherwise, raise ``ValueError``. As in torch,
    processes that were stopped because another one failed are not listed as failures.
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
        self._group = self._functions.start(self._streams)

    def _unknown_end(self) -> str:
        if self._functions is not None and self._functions.has_keeper:
            return "the keeper (the parent process of the functions) was killed, which killed the process"
        return super()._unknown_end()

    def _make_result(self, processes: SupervisedGroup) -> RunProcsResult:
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
    from elasticrs.multiprocessing.errors import record
    from elasticrs.multiprocessing.redirects import redirect_stderr, redirect_stdout

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


def replaced_factory() -> Callable[..., Any] | None:
    found: Callable[..., Any] = api.get_subprocess_handler
    return None if found is getattr(handlers, "_OWN", None) else found


class ForeignPrograms(Record):
    """Programs that were started by the user's replacement of ``get_subprocess_handler``.

    They have to be polled.

    ``exits`` are their exit codes, each with the monotonic time at which the exit was noticed, in this order.
    """

    context: PContext
    numa_options: NumaOptions | None
    handlers: dict[int, Any] = fresh(factory=dict)
    exits: dict[int, tuple[int, int]] = fresh(factory=dict)
    sent: dict[int, int] = fresh(factory=dict)

    def start(self, make: Callable[..., Any]) -> None:
        """Start all programs. If this fails, the caller has to call :meth:`stop`."""
        context = self.context
        for rank in range(context.nprocs):
            self.handlers[rank] = make(
                entrypoint=context.entrypoint,
                args=context.args[rank],
                env=context.envs[rank],
                stdout=context.stdouts[rank],
                stderr=context.stderrs[rank],
                local_rank_id=rank,
                numa_options=self.numa_options,
            )

    def has_ended(self) -> bool:
        """Return true if all programs have exited, or if one has failed."""
        for rank, handler in self.handlers.items():
            if rank not in self.exits:
                exitcode = handler.proc.poll()
                if exitcode is not None:
                    self.exits[rank] = (exitcode, time.monotonic_ns())
        return len(self.exits) == len(self.handlers) or any(code for code, _ in self.exits.values())

    def stop(self, death_sig: signal.Signals, timeout: float) -> None:
        """Send ``death_sig`` to the programs, and after ``timeout`` seconds SIGKILL.

        Limit the wait after that as well.
        """
        self._send(death_sig)
        deadline = time.monotonic() + timeout
        for handler in self.handlers.values():
            with suppress(subprocess.TimeoutExpired):
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        deadline = time.monotonic() + _KILL_LIMIT
        for rank, handler in self.handlers.items():
            try:
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # noqa: PERF203 -- one iteration per worker
                logger.warning(
                    "local rank %d (pid %d) did not exit within %g s after SIGKILL; it is left behind",
                    *(rank, handler.proc.pid, _KILL_LIMIT),
                )
        self.has_ended()

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        self.has_ended()
        for rank in self.handlers.keys() - self.exits.keys():
            self.sent[rank] = signum
            with suppress(ProcessLookupError):
                self.handlers[rank].close(death_sig=signum)
