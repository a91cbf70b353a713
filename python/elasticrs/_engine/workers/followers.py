"""Debuggers and tracers that follow the child processes of a Python program.

Such a tool replaces the functions with which Python creates processes, and changes the command lines of
Python children so that they run under the tool. Elasticrs does not create the workers with these functions,
so it asks the tool for the command line with which the tool would start them.
"""

from __future__ import annotations

import sys

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any


class Follower(Value):
    """Tool that follows the workers.

    Args:
        name: name of the tool.
        command: command line with which the tool starts a worker.
        started: function that tells the tool that a worker was started.
    """

    name: str
    command: Sequence[str]
    started: Callable[[], object]


def follower_of(command: Sequence[str]) -> Follower | None:
    """Return the tool in this process that would follow a child process with this command line; ``None`` if
    there is no such tool. No process is started.
    """
    given = list(command)
    for module, ask in (("_pydev_bundle.pydev_monkey", _of_pydevd), ("subprocess", _of_subprocess)):
        # Do not import the modules, because a tool that has replaced a function of a module has already
        # imported it.
        loaded = sys.modules.get(module)
        found = None if loaded is None else ask(loaded, given)
        if found is not None and list(found.command) != given:
            return found
    return None


def is_script_file(program: str) -> bool:
    """Return true if a program is a script. Return false if the program is a binary or cannot be read."""
    import shutil

    try:
        with open(shutil.which(program) or program, "rb") as file:
            return file.read(4) != b"\x7fELF"
    except OSError:
        return False  # Ignore the error, because a script that cannot be read cannot be started either.


def _of_pydevd(monkey: ModuleType, command: list[str]) -> Follower | None:
    """Return the debugger of PyCharm, PyDev or VS Code (debugpy) with its command line for a worker. Return
    ``None`` if the debugger is not attached, or if the user has configured it not to follow child processes.
    """
    holder: Any = getattr(sys.modules.get("pydevd"), "SetupHolder", None)
    setup = getattr(holder, "setup", None) or {}
    if not setup.get("multiprocess"):
        return None
    name = "debugpy" if "debugpy" in sys.modules else "pydevd"
    return Follower(name, monkey.patch_args(command), monkey.send_process_created_message)


def _of_subprocess(subprocess: ModuleType, command: list[str]) -> Follower | None:
    """Return a tool that has replaced ``subprocess.Popen.__init__``, such as VizTracer, with its command line
    for a worker. Return ``None`` if no tool has replaced it.
    """
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
