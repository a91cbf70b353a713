"""Ends a failed worker after its ``atexit`` callbacks, without tearing down its interpreter.

With torch, the other ranks would wait about a second for the teardown. Workers that cannot import elasticrs
execute this file by path, so it uses only the standard library of Python 3.8.
"""

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VARIABLE = "ELASTICRS_FAST_EXIT"

_INJECTED = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Variables of profilers, such as Nsight Systems, that write data in the C library's exit handlers."""


def is_enabled() -> bool:
    is_interactive = sys.flags.inspect or os.environ.get("PYTHONINSPECT")
    is_profiled = any(os.environ.get(name) for name in _INJECTED)
    return os.environ.get(VARIABLE) != "0" and not is_interactive and not is_profiled


def leave(status: int) -> None:
    """Flush all files and exit at once. If that fails, return, so that the interpreter reports the error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except Exception:
                # The interpreter flushes the stream again, and exits with its own code if that fails.
                return
    if written_files():
        _finish_files()
    os._exit(status)


def keep_operators() -> None:
    """Tell torch not to unregister its operators at exit, which takes long and is useless."""
    unregister = getattr(sys.modules.get("torch.library"), "_del_library", None)
    if unregister is None:
        return
    finalize = getattr(sys.modules.get("weakref"), "finalize", None)
    for each in list(getattr(finalize, "_registry", ())):
        alive = each.peek()
        if alive is not None and alive[1] is unregister:
            each.atexit = False


def leave_after_callbacks(status: int) -> None:
    """Call :func:`leave` after all ``atexit`` callbacks that have been registered before this call."""
    keep_operators()
    pid = os.getpid()

    def run_others() -> None:
        if os.getpid() == pid:
            atexit.unregister(run_others)
            atexit._run_exitfuncs()
            leave(status)

    atexit.register(run_others)


def written_files() -> "set[int]":
    """Return the descriptors of files and pipes that are open for writing. Leave out the standard streams and
    the ``.fault`` files with stacks. If nothing else is open, no file object can hold unwritten data.
    """
    import stat
    from fcntl import F_GETFL, fcntl

    found = set()
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            kind = os.fstat(descriptor).st_mode
            if descriptor > 2 and (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
                is_written = fcntl(descriptor, F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                if is_written and not os.readlink("/proc/self/fd/" + name).endswith(".fault"):
                    found.add(descriptor)
        except OSError:
            continue
    return found


def _finish_files() -> None:
    """Flush all files. Close files that write further data when they are closed, such as ``gzip`` files."""
    import gc
    from _io import BufferedRandom, BufferedWriter, TextIOWrapper, _IOBase, _RawIOBase

    gc.unfreeze()  # If the worker was forked with preloaded modules, `get_objects` omits frozen objects.
    temporary = getattr(sys.modules.get("tempfile"), "_TemporaryFileWrapper", TextIOWrapper)
    native = (TextIOWrapper, BufferedWriter, BufferedRandom)
    ranked: list[list[Any]] = [[], [], []]
    for each in gc.get_objects():
        kind = type(each)
        if kind is TextIOWrapper:
            ranked[0].append(each)
        elif kind in native:
            ranked[2].append(each)
        elif issubclass(kind, (_IOBase, temporary)) and not issubclass(kind, _RawIOBase):
            ranked[1].append(each)
    # Keep this order, because a text file writes to a compressed file, which writes to a buffered file.
    for action, files in zip(("flush", "close", "flush"), ranked):  # noqa: B905 -- not in Python 3.8
        for each in _open(files):
            try:
                getattr(each, action)()
            except Exception:  # noqa: PERF203 -- The teardown would ignore the error, too.
                continue


def _open(files: "list[Any]") -> "Iterator[Any]":
    for each in files:
        try:
            is_written = not each.closed and each.writable()
        except Exception:
            continue
        if is_written:
            yield each
