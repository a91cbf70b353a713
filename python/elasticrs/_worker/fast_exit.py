"""Ends a worker whose program has failed, without tearing down its interpreter.

With torch, the teardown takes about a second of processor time, in which the other ranks wait for the
restart. Everything that a program can rely on has run before: ``finally`` blocks, non-daemon threads and
``atexit`` callbacks. Workers that cannot import elasticrs execute this file by path, so it uses only the
standard library of Python 3.8.
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
"""Variables with which a profiler such as Nsight Systems loads its library. It writes its data in an exit
handler of the C library, which :func:`leave` does not run.
"""


def is_enabled() -> bool:
    """Return true if a worker that has failed may leave without tearing down its interpreter."""
    is_interactive = sys.flags.inspect or os.environ.get("PYTHONINSPECT")
    is_profiled = any(os.environ.get(name) for name in _INJECTED)
    return os.environ.get(VARIABLE) != "0" and not is_interactive and not is_profiled


def leave(status: int) -> None:
    """Write out all buffered data and exit at once. Return if the data cannot be written, so that the
    interpreter reports that while it exits.

    Args:
        status: exit code with which the interpreter would exit.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except Exception:
                # The interpreter flushes the stream again, and exits with its own code if that fails.
                return
    if _has_files():
        _finish_files()
    os._exit(status)


def leave_after_callbacks(status: int) -> None:
    """Call :func:`leave` after the ``atexit`` callbacks, and before the interpreter is torn down.

    Call this function when nothing else registers callbacks any more.
    """
    pid = os.getpid()

    def run_others() -> None:
        if os.getpid() == pid:
            atexit.unregister(run_others)
            atexit._run_exitfuncs()
            leave(status)

    atexit.register(run_others)


def _has_files() -> bool:
    """Return true if this process has opened a file or a pipe for writing. Only then can a Python object hold
    data that is not written yet.
    """
    import stat
    from fcntl import F_GETFL, fcntl

    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            kind = os.fstat(descriptor).st_mode
            if descriptor > 2 and (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
                is_written = fcntl(descriptor, F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                if is_written and not os.readlink("/proc/self/fd/" + name).endswith(".fault"):
                    return True
        except OSError:
            continue
    return False


def _finish_files() -> None:
    """Flush the open file objects, and close those that write more when they are closed, such as ``gzip``
    files. The teardown of the interpreter would have closed them.
    """
    import gc
    from _io import BufferedRandom, BufferedWriter, TextIOWrapper, _IOBase, _RawIOBase

    gc.unfreeze()  # A warm nursery has frozen the objects of the modules that it imported.
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
    # Text is written to the compressed file below it, and that to its buffered file.
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
