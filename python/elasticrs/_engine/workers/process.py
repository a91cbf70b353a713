"""Describe worker processes for the supervisor, which starts them, and parse their command lines."""

from __future__ import annotations

import os
import signal
import sys

from elasticrs import _core
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

SupervisorError = _core.SupervisorError
"""Raised when the supervisor itself has failed."""

heartbeat_page = _core.heartbeat_page
raise_descriptor_limit = _core.raise_descriptor_limit


def check_limits(
    nproc: int, hang_timeout: float | str | None, environ: Mapping[str, str], followed: int = 0
) -> None:
    """Check the limits on processes and on open files, before any worker is started. ``followed`` is the
    number of log files to open. Raise ``ValueError`` if a limit is too low.
    """
    # Each worker needs one descriptor for its heartbeat page, and a second one during startup.
    pages = 2 * nproc if hang_timeout is not None else 0
    # Torch's timers need two descriptors for a FIFO, and one per process with a timer: assume all workers.
    timers = nproc + 2 if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1" else 0
    # Each worker also needs one descriptor for the file into which it can copy its training state.
    _core.check_limits(nproc, followed, pages + timers + nproc)


def process_spec(
    local_rank: int,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout: str | None,
    stderr: str | None,
    *,
    cpus: Sequence[int] | None,
    pass_fds: Sequence[int] = (),
    warm: bool = False,
) -> _core.ProcessSpec:
    """Describe a process that the core (the Rust extension) will start. ``env`` is its whole environment. It
    inherits standard streams and CPUs for which nothing is given.
    """
    if not warm and (follower := follower_of(argv)) is not None:
        follower.started()
        argv = follower.command
    files = {"stdout": stdout or None, "stderr": stderr or None}
    return _core.ProcessSpec(local_rank, argv, env=env, cpus=cpus, pass_fds=pass_fds, warm=warm, **files)


def console_stream(local_rank: int, path: str, to: int, prefix: str) -> _core.LogStream:
    """Describe a log file that the core copies to standard output (``to`` is 1) or standard error (2)."""
    return _core.LogStream(local_rank, path, 1 if to == 1 else 2, os.fsencode(prefix))


def adopt(
    supervisor: _core.Supervisor,
    pids: Mapping[int, int],
    statuses: Sequence[int],
    pages: Mapping[int, int] | None = None,
) -> bool:
    """Let the supervisor monitor existing processes. Return false if the supervisor has already finished its
    group. Raise ``ProcessLookupError`` if a process has already exited.
    """
    try:
        for local_rank, pid in pids.items():
            supervisor.adopt(local_rank, pid, statuses[local_rank], (pages or {}).get(local_rank))
    except _core.SupervisorError:
        return False
    return True


def end_at_once(supervisor: _core.Supervisor) -> None:
    supervisor.stop(_core.StopPolicy(signal.SIGKILL, 0.0))


class macros:  # noqa: N801 -- torch's name
    """Macros that are substituted in workers' arguments."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Return the arguments with ``${local_rank}`` replaced. Keep other macros and non-strings."""
        from string import Template  # loads re, which other launches need not

        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]


class Follower(Value):
    """Debugger or tracer that follows a Python program into the child processes that it starts. Such a tool
    replaces the functions with which Python creates processes. Elasticrs does not use these functions for
    workers, so it asks the tool for the ``command`` to run, and calls ``started`` after the start.
    """

    name: str
    command: Sequence[str]
    started: Callable[[], object]


def follower_of(command: Sequence[str]) -> Follower | None:
    """Return the debugger or tracer that would follow a child with this command line, or ``None``."""
    given = list(command)
    for module, ask in (("_pydev_bundle.pydev_monkey", _of_pydevd), ("subprocess", _of_subprocess)):
        # Look only at imported modules: a tool that has replaced a function has imported the module with it.
        loaded = sys.modules.get(module)
        found = None if loaded is None else ask(loaded, given)
        if found is not None and list(found.command) != given:
            return found
    return None


def is_script_file(program: str) -> bool:
    """Return true if a program is a script; false if it is a binary or cannot be read."""
    import shutil

    try:
        with open(shutil.which(program) or program, "rb") as file:
            return file.read(4) != b"\x7fELF"
    except OSError:
        return False  # Ignore the error, because a script that cannot be read cannot be started either.


def _of_pydevd(monkey: ModuleType, command: list[str]) -> Follower | None:
    """Return the debugger of PyCharm, PyDev or VS Code (debugpy), if it follows child processes."""
    holder: Any = getattr(sys.modules.get("pydevd"), "SetupHolder", None)
    setup = getattr(holder, "setup", None) or {}
    if not setup.get("multiprocess"):
        return None
    name = "debugpy" if "debugpy" in sys.modules else "pydevd"
    return Follower(name, monkey.patch_args(command), monkey.send_process_created_message)


def _of_subprocess(subprocess: ModuleType, command: list[str]) -> Follower | None:
    """Return a tool that has replaced ``subprocess.Popen.__init__``, such as VizTracer."""
    replaced: Any = subprocess.Popen.__init__
    code = getattr(replaced, "__code__", None)
    if code is not None and code.co_filename == subprocess.Popen._execute_child.__code__.co_filename:
        return None
    home = getattr(replaced, "__globals__", {}).get("__name__") or type(replaced).__module__
    return Follower(str(home).partition(".")[0], _recorded(subprocess, command), lambda: None)


def _recorded(subprocess: ModuleType, command: list[str]) -> list[str]:
    """Return the command line that ``subprocess.Popen`` would execute, without executing it."""
    from contextlib import suppress

    found: list[list[str]] = []

    class Recorder(subprocess.Popen):  # type: ignore[misc, name-defined]
        def _execute_child(self, args: Any, *_: Any, **_more: Any) -> None:
            if isinstance(args, (list, tuple)) and all(isinstance(each, str) for each in args):
                found.append(list(args))
            raise NotStarted

    class NotStarted(Exception):  # noqa: N818 -- not an error
        """Raised instead of executing the command line."""

    with suppress(NotStarted):
        Recorder(command)
    return found[0] if found else command


_WITH_VALUE = "cmWX"
_LETTERS = frozenset("bBdEhiIJOPqRsStuvVxX?") | frozenset(_WITH_VALUE)
_LONG_WITH_VALUE = "--check-hash-based-pycs"


class PythonCommand(Value):
    """Parsed command line of Python. ``kind`` is what it runs: ``script``, ``m`` (a module), ``c`` (a string
    of code), ``stdin``, or empty (nothing). ``options`` are those of the interpreter, without their values.
    ``letters`` has the letters of all short options in one string.
    """

    kind: str
    program: str | None
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    letters: str = ""

    @property
    def unknown(self) -> str | None:
        for option in self.options:
            is_long = option.startswith("--")
            if option != _LONG_WITH_VALUE if is_long else not _LETTERS.issuperset(option[1:]):
                return option
        return None


def parse_python(words: Sequence[str]) -> PythonCommand:
    """Parse the arguments of a Python interpreter. Invalid arguments do not raise an error."""
    options: list[str] = []
    letters = ""
    rest = list(words)

    def found(kind: str, program: str | None) -> PythonCommand:
        return PythonCommand(kind, program, tuple(rest), tuple(options), letters)

    while rest:
        word = rest.pop(0)
        if word == "-":
            return found("stdin", word)
        if word == "--":
            return found("script", rest.pop(0) if rest else None)
        if not word.startswith("-"):
            return found("script", word)
        if word.startswith("--"):
            options.append(word)
            if word == _LONG_WITH_VALUE and rest:
                rest.pop(0)
            continue
        index = next((index for index, letter in enumerate(word) if letter in _WITH_VALUE), len(word))
        letters += word[1 : index + 1]
        options.append(word[: index + 1])
        if index == len(word):
            continue
        value = word[index + 1 :] or (rest.pop(0) if rest else None)
        if word[index] in "cm":
            return found(word[index], value)
    return found("", None)
