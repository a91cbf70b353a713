"""Start and monitor the worker processes of one node."""

from __future__ import annotations

from elasticrs import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elasticrs._engine.gpus.numa import NumaOptions
    from elasticrs.multiprocessing.api import (
        DefaultLogsSpecs,
        LogsDest,
        LogsSpecs,
        MultiprocessContext,
        PContext,
        RunProcsResult,
        SignalException,
        Std,
        SubprocessContext,
        to_map,
    )
    from elasticrs.multiprocessing.errors import ProcessFailure

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]

_SUBMODULES = ("api", "errors", "redirects", "subprocess_handler", "tail_log")


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start a program or function for each local rank. After an error, no process is left.

    Signals are handled only if the caller is the main thread.

    Args:
        name: name in the prefix of the processes' lines on the console.
        entrypoint: a program, or a function (importable by name, except with ``fork``).
        args: arguments by local rank ``0..n-1``. Arguments of a program are converted to strings.
        envs: variables added to the environment, by local rank.
        logs_specs: destination of the output.
        log_line_prefixes: prefixes by local rank, instead of ``[<name><local_rank>]:``.
        start_method: start method of functions: ``spawn``, ``fork`` or ``forkserver``.
        numa_options: binding of the processes to CPUs.
        duplicate_stdout_filters: texts that select tee'd lines to copy to ``filtered_stdout.log`` as well.
        duplicate_stderr_filters: the same for standard error and ``filtered_stderr.log``.

    Raises:
        RuntimeError: ``args`` or ``envs`` lacks a local rank, or the processes could not be started. If the
            program does not exist or is not executable, this error is also a ``FileNotFoundError`` or
            ``PermissionError``.
        ValueError: the start method is unknown.
        SystemExit: this process is a worker that imports a main module without a ``__name__`` guard.
    """
    from elasticrs._engine.workers.functions import interrupts
    from elasticrs.multiprocessing import api

    api.refuse_while_main_is_imported()
    nprocs = len(args)
    api._validate_full_rank(args, nprocs, "args")
    api._validate_full_rank(envs, nprocs, "envs")
    logs = (logs_specs, log_line_prefixes)
    filters = (duplicate_stdout_filters, duplicate_stderr_filters)
    context: PContext | None = None
    try:
        # If a signal arrives inside this block, its exception is raised at the end of the block.
        with interrupts.held():
            if isinstance(entrypoint, str):
                context = api.SubprocessContext(name, entrypoint, args, envs, *logs, numa_options, *filters)
            else:
                context = api.MultiprocessContext(
                    name, entrypoint, args, envs, start_method, *logs, numa_options, *filters
                )
            context.start()
        # Return inside the `try`, so that the processes are stopped even if a signal arrives at this moment.
        return context
    except BaseException:
        if context is not None:
            context.close()
        raise


def __getattr__(name: str) -> object:
    # Import lazily, because workers need only the error classes of this package.
    homes = {"elasticrs.multiprocessing.api": (*__all__, "_validate_full_rank")}
    return lazy(__name__, name, homes, _SUBMODULES)
