"""Parse the options, run the job, and return an exit code; see :mod:`elasticrs.launch`.

Exit codes: 0 if every worker exited with 0, 1 if the job failed or a signal stopped it, 2 if the command line
or its environment contains a mistake. In the last case, nothing was started.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

from elasticrs._engine.process.signals import catch_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.process.signals import SignalPipe
    from elasticrs._engine.supervise.attempt import JobResult
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.run.loop import Agent

WRITE_TIMEOUT = 10.0
"""Maximum number of seconds that the launcher waits for the reader of its stderr to take the text."""

_FIRST_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


def main(
    args: Sequence[str] | None = None,
    *,
    ends_by_sigint: bool = False,
    signal_mask: Iterable[int] | None = None,
) -> int:
    """Launch a job, and return the exit code. ``signal_mask`` replaces the process's mask, unless ``None``.
    If ``ends_by_sigint``, SIGINT still has its default action; see :mod:`elasticrs.launch`.
    """
    _open_standard_descriptors()
    # Install the handlers before the slow imports. Until then, a signal kills the process without cleanup.
    signals = _catch_first_signals(ends_by_sigint)
    if signal_mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    before = None
    try:
        if args is None:
            _leave_input_to_foreground()
            before = _terminal_settings()
        return _main(sys.argv[1:] if args is None else args, signals, owns_process=args is None)
    finally:
        _restore_terminal(before)
        if signals is not None:
            # Ignore signals, because a signal during the interpreter's shutdown would change the exit code.
            signals.close(ignore=args is None)


def _catch_first_signals(ends_by_sigint: bool) -> SignalPipe | None:
    if not ends_by_sigint:
        return catch_signals(_FIRST_SIGNALS)
    # Install Python's default SIGINT handler first, because `catch_signals` saves it for forked workers.
    # Block SIGINT meanwhile, so that Ctrl-C raises no `KeyboardInterrupt`.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return catch_signals(_FIRST_SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _main(argv: Sequence[str], signals: SignalPipe | None, *, owns_process: bool) -> int:
    from elasticrs._engine.cli.arguments import check_limits, resolve
    from elasticrs._engine.job.config import UsageError
    from elasticrs._engine.job.options import TextRequested, parse

    log_prefix = None
    try:
        args = parse(argv, os.environ)
        log_prefix = args.log_prefix
        job = resolve(args, os.environ)
        if owns_process and not job.run_path:
            from elasticrs._engine.workers.process import raise_descriptor_limit

            raise_descriptor_limit()
            _look_here_last()
        check_limits(job)
        if job.report is not None and (folder := _make_report_folder(job.report)):
            _say(f"--report: the folder {folder} did not exist, and was created", log_prefix)
        return _run(job, signals)
    except TextRequested as request:
        return _print_text(request.what, request.words)
    except UsageError as error:
        return _fail(str(error), 2, log_prefix)


def _look_here_last() -> None:
    """Move the working directory to the end of ``sys.path``, so that a user's ``json.py`` hides no module."""
    try:
        here = os.getcwd()
    except OSError:
        return
    if sys.path[:1] == [here]:
        sys.path.append(sys.path.pop(0))


def _run(job: JobSpec, signals: SignalPipe | None) -> int:
    from elasticrs._engine.process.console import END_PATIENCE, Console
    from elasticrs._engine.supervise.run_job import make_decisions

    console = Console(log_prefix=job.log_prefix, is_one_of_several=job.has_peers)
    if signals is None:
        console.say("signals are not handled, because the job does not run in the main thread")
    else:
        signals.catch((*job.signals, *job.forwarded), pauses=True)
    decisions = make_decisions(job, console)
    write = partial(_write_and_wait, console, signals, job.forwarded)
    try:
        code = _run_agent(job, console, signals, decisions, write)
    finally:
        decisions.leave(signals)
    console.flush(END_PATIENCE)
    return code


def _run_agent(
    job: JobSpec,
    console: Console,
    signals: SignalPipe | None,
    decisions: Decisions,
    write: Callable[[str], bool],
) -> int:
    from elasticrs._engine.supervise.run_job import run_job
    from elasticrs._engine.workers.process import SupervisorError

    agents: list[Agent] = []
    try:
        result = run_job(
            *(job, console, signals), owns_process=True, created=agents.append, decisions=decisions
        )
    except (SupervisorError, OSError) as error:
        if not agents:
            raise
        why = f"the job was stopped: {error}"
        console.write(console.prefixed(f"{why}{os.linesep}"), WRITE_TIMEOUT)
        return conclude_stopped(job, agents[0].result, why, console.say)
    headline = None if result.exit_code == 0 else _tell_failure(job, result, console, write)
    return _conclude(job, result, headline, console.say)


def _tell_failure(
    job: JobSpec, result: JobResult, console: Console, write: Callable[[str], bool]
) -> str | None:
    """Print the failure report and a summary line. Return the root cause as one line."""
    headline = None
    is_read = True

    def write_report(text: str) -> None:
        nonlocal is_read
        is_read = write(text)

    from elasticrs._engine.supervise.state_machine import Phase

    is_stopped = result.signum is not None or result.phase is Phase.STOPPED
    if not is_stopped or _has_failed(result):
        from elasticrs._engine.supervise.observe.job_report import print_report

        headline = print_report(job, result, console.say, write_report)
    if result.ending is not None:
        how, more = result.ending
        reasons = dict.fromkeys(filter(None, (result.message if result.is_outside else None, headline)))
        console.say(": ".join(filter(None, (how, ", after ".join(reasons)))) + more)
        if is_read:
            # `say` only queues the line, so wait until it is written. Do not wait if nobody reads stderr.
            write("")
    return headline


def _has_failed(result: JobResult) -> bool:
    """Return true if a rank had already failed when the job was stopped: during a restart delay, or while a
    rank that had raised an exception was still exiting.
    """
    if not result.attempts:
        return False
    attempt = result.attempts[-1]
    if attempt.has_ended and "stopped" not in attempt.stamps:
        return attempt.first_failure is not None
    if not attempt.raised:
        return False
    return attempt.first_failure is None or attempt.was_stopped_by_exception()


def _print_text(what: str, words: Sequence[str]) -> int:
    code = 0
    if what == "help":
        from elasticrs._engine.cli.help import help_text

        text = help_text("elasticrun", *words)
    elif what == "version":
        from elasticrs import __version__

        text = f"elasticrs {__version__}{os.linesep}"
    elif what == "check":
        from elasticrs._engine.cli.help import check
        from elasticrs._engine.job.config import UsageError

        try:
            text, code = check(words, os.environ)
        except UsageError as error:
            return _fail(str(error), 2)
    else:
        from elasticrs._engine.cli.parser import completion

        try:
            text = completion(words[0])
        except ImportError:
            return _fail("--print-completion needs the package shtab: pip install 'elasticrs[completion]'", 1)
    left = text.encode()
    try:
        while left:
            left = left[os.write(1, left) :]
    except OSError as error:
        return _fail(f"cannot write to standard output: {error.strerror}", 1)
    return code


def _fail(message: str, code: int, log_prefix: str | None = None) -> int:
    _say(message, log_prefix)
    return code


def _say(message: str, log_prefix: str | None) -> None:
    from elasticrs._engine.process.console import Console

    console = Console(log_prefix=log_prefix)
    console.write(console.prefixed(message + os.linesep), WRITE_TIMEOUT)


def _write_and_wait(console: Console, signals: SignalPipe | None, others: Sequence[int], text: str) -> bool:
    """Write a text to the console. Return false if a time limit or a stop signal came before its end."""
    from elasticrs._engine.failures.report import painted

    if signals is None:
        return console.write(text, WRITE_TIMEOUT, paint=painted)
    pipe = signals

    def is_asked_to_stop() -> bool:
        taken = pipe.take()
        if signal.SIGTSTP in taken:
            pipe.stop_this_process()
        return any(signum not in {signal.SIGTSTP, *others} for signum in taken)

    return console.write(text, WRITE_TIMEOUT, pipe.fd, is_asked_to_stop, painted)


def _open_standard_descriptors() -> None:
    """Open closed standard descriptors (0 to 2). Otherwise, the next opened files would get their numbers."""
    # The kernel assigns the lowest free number, so this loop ends once descriptors 0 to 2 are all open.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


_STDIN = 0
_LOCAL_FLAGS = 3
"""Index of the local flags, such as ECHO, in the list that ``termios.tcgetattr`` returns."""


def _leave_input_to_foreground() -> None:
    """If this process runs in the background, replace a terminal on stdin by ``/dev/null``, because the
    kernel stops background processes that read from their terminal.
    """
    if not os.isatty(_STDIN) or _is_in_foreground():
        return
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)


def _terminal_settings() -> list[Any] | None:
    if not os.isatty(_STDIN):
        return None
    import termios

    try:
        return termios.tcgetattr(_STDIN)
    except termios.error:
        return None  # The terminal was closed.


def _restore_terminal(before: list[Any] | None) -> None:
    """Restore terminal settings that a worker changed, unless another process is in the foreground now."""
    if before is None or not os.isatty(_STDIN) or not _is_in_foreground():
        return
    import termios

    try:
        if termios.tcgetattr(_STDIN)[_LOCAL_FLAGS] != before[_LOCAL_FLAGS]:
            termios.tcsetattr(_STDIN, termios.TCSANOW, before)
    except termios.error:
        return  # The terminal was closed, so it has no settings.


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        # The terminal is not the controlling terminal, so the kernel does not stop processes that read it.
        return True


TERMINATION_LOG = "/dev/termination-log"

TERMINATION_LOG_VARIABLE = "ELASTICRS_TERMINATION_LOG"
"""Environment variable with the path of the termination log, for pods that set ``terminationMessagePath``. If
it is empty, no termination message is written.
"""


def _make_report_folder(path: str) -> str:
    """Create the report's folder, so that a mistake in the path is noticed before the job runs. Return its
    path; an empty text if it existed before.
    """
    from elasticrs._engine.job.config import UsageError

    if os.path.isdir(path):
        raise UsageError(f"--report: got {path!r}, which is a folder; name a file in it")
    folder = os.path.abspath(os.path.dirname(path))
    had_folder = os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--report: got {path!r}, whose folder cannot be created: {error.strerror}"
        ) from None
    return "" if had_folder else folder


def _conclude(job: JobSpec, result: JobResult, headline: str | None, say: Callable[[str], None]) -> int:
    """Write the JSON report and the termination message. Return the launcher's exit code."""
    from elasticrs._engine.supervise.state_machine import Phase

    path = _termination_log() if result.phase is Phase.FAILED else None
    if job.report is None and path is None and (result.exit_code == 0 or job.exit_codes == "torchrun"):
        return result.exit_code
    from elasticrs._engine.job.config import ExitCodes
    from elasticrs._engine.supervise.observe import job_report
    from elasticrs._engine.supervise.observe.job_report import all_failures

    failed = all_failures(result) if result.phase is Phase.FAILED else {}
    code = job_report.exit_code(ExitCodes.parse(job.exit_codes), result, failed)
    document = job_report.report(job, result, failed, headline, code)
    if job.report is not None:
        _write_outcome(job.report, job_report.encode(document), "--report", say)
    if path is not None:
        _write_outcome(path, job_report.termination_message(document), "the termination message", say)
    return code


def conclude_stopped(job: JobSpec, result: JobResult, why: str, say: Callable[[str], None]) -> int:
    from elasticrs._engine.supervise.state_machine import Phase

    result.phase, result.message = Phase.FAILED, why
    try:
        return _conclude(job, result, why, say)
    except (OSError, ImportError) as error:
        # The imports in `_conclude` fail if no file descriptors are left.
        say(f"the outcome of the job could not be written: {error}")
        return 1


def _termination_log() -> str | None:
    """Return the path of the pod's termination log, unless it is also the launcher's error file."""
    path = os.environ.get(TERMINATION_LOG_VARIABLE, TERMINATION_LOG)
    is_usable = bool(path) and os.path.isfile(path) and os.access(path, os.W_OK)
    return path if is_usable and path != os.environ.get("TORCHELASTIC_ERROR_FILE") else None


def _write_outcome(path: str, text: str, what: str, say: Callable[[str], None]) -> None:
    from elasticrs._engine.inside.error_file import write_whole
    from elasticrs._engine.process.background_call import FILE_LIMIT, FileAccess

    def hangs() -> None:
        say(
            f"{what} could not be written to {path} within {FILE_LIMIT:g} s: its file system does not respond"
        )

    try:
        FileAccess(hangs).run(partial(write_whole, path, text), None)
    except OSError as error:
        say(f"{what} could not be written to {path}: {error.strerror}")
