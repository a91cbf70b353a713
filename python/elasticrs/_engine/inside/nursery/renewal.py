"""Resets per-process state in a worker that was forked from a warm nursery. Loaded by ``nursery.py``."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_SET_BLAS_THREADS = [
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")
]


def last_collection(open_files: Callable[[], dict[int, str]]) -> None:
    """At the exit of a worker, unfreeze the garbage collector if a file is open.

    Only files that it collects are flushed.
    """
    import atexit

    atexit.register(_unfreeze_if_needed, open_files, set(open_files()))


def _unfreeze_if_needed(open_files: Callable[[], dict[int, str]], known: set[int]) -> None:
    import fcntl
    import gc
    import stat

    if "triton._C.libtriton" in sys.modules:  # Unfreeze, because Triton warns about uncollected objects.
        return gc.unfreeze()
    for fd, link in open_files().items():
        # Skip `.fault` files, because they belong to the hook and no Python file object writes to them.
        if fd in known or link.endswith(".fault"):
            continue
        mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_ACCMODE != os.O_RDONLY and (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            return gc.unfreeze()
    return None


def main_module() -> None:
    """Replace the module ``__main__`` with a copy.

    The garbage collector ignores the original and its objects, because it was frozen before the fork.
    """
    main = type(sys)("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main


def environment(entries: list[bytes], done: dict[str, tuple[str | None, str | None]]) -> None:
    """Set the environment to ``entries``, and then apply the changes that the imports have made (``done`` has
    the old and new values).
    """
    os.environ.clear()
    for entry in entries:
        name, _, value = entry.partition(b"=")
        os.environb[name] = value
    for variable, (before, after) in done.items():
        if after is None:
            os.environ.pop(variable, None)
        # Keep the worker's own value, because the value that the import has set is probably only a default.
        elif before is not None or variable not in os.environ:
            os.environ[variable] = after


def arguments(argv: list[bytes], before: list[str]) -> None:
    told = [os.fsdecode(argument) for argument in argv]
    sys.orig_argv[:] = told
    # If an import has changed `sys.argv`, it would have done so in the worker as well.
    if sys.argv == before and len(before) > 1:
        sys.argv[1:] = told[1 - len(before) :]


def streams(standard: Iterable[Any]) -> None:
    """Reinitialize the standard streams in place, because libraries hold references to the stream objects."""
    import io

    unbuffered = os.environ.get("PYTHONUNBUFFERED", "") != "" or "-u" in sys.orig_argv[1:2]
    for fd, stream in enumerate(standard):
        name, mode, encoding, errors = stream.name, stream.mode, stream.encoding, stream.errors
        # Create a new `FileIO`, because the old one has cached whether the descriptor is seekable.
        raw: Any = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
        raw.name = name
        stream.__init__(
            raw if isinstance(stream.buffer, io.FileIO) else type(stream.buffer)(raw),
            *(encoding, errors, None if fd == 0 else "\n"),
            line_buffering=not unbuffered and (fd == 2 or raw.isatty()),
            write_through=unbuffered,
        )
        stream.mode = mode


def seeds(rank_zero: dict[str, str], generators: list[Callable[[], None]] | None) -> None:
    """Seed the random generators again (``None`` if not watched), and reset other values in modules."""
    import time

    # Do not copy the dictionary. This would change reference counts, so the kernel would have to copy memory
    # that is shared with other workers.
    loaded: Any = sys.modules
    for seed in generators or ():
        seed()
    if generators is None and "numpy.random" in loaded:
        loaded["numpy.random"].seed()
    if "torch" in loaded:
        loaded["torch"].default_generator.seed()
    if "multiprocessing.process" in loaded:
        loaded["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "logging" in loaded:
        loaded["logging"]._startTime = time.time()
    if "tempfile" in loaded:
        loaded["tempfile"].tempdir = None
    if "threading" in loaded:
        loaded["threading"].main_thread()._set_native_id()
    time.tzset()
    for name, variable in rank_zero.items():
        if name in loaded:
            loaded[name].rank_zero_only.rank = int(os.environ[variable])


def blas(assigned: dict[str, dict[str, str]]) -> None:
    """Set the thread count of each OpenBLAS library. Before the fork, it was limited to one.

    ``assigned`` has, by path of the library, the variables that the script sets before it loads the library.
    """
    processors = len(os.sched_getaffinity(0))
    for path, overriding in assigned.items():
        variables = {**os.environ, **overriding}
        given = [variables.get(name, "") for name in _BLAS_THREADS]
        counts = [int(text) for text in given if text.isdecimal() and text != "0"]
        # OpenBLAS uses the first of these variables that is positive, and at most one thread per processor.
        count = min([processors, *counts[:1]])
        if count == 1:
            continue
        import ctypes

        library = ctypes.CDLL(path)
        for name in _SET_BLAS_THREADS:
            if hasattr(library, name):
                getattr(library, name)(count)


def output(printed: dict[int, bytes]) -> None:
    for fd, said in printed.items():
        stream = sys.stdout if fd == 1 else sys.stderr
        stream.buffer.write(said)
        stream.flush()
