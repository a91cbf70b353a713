"""What a worker makes anew that was forked instead of executed; see ``sitecustomize.py``, which loads it."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_SET_BLAS_THREADS = [
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")
]


def streams(standard: Iterable[Any]) -> None:
    """The same objects, since libraries have kept them, as if they had been made now."""
    import io

    unbuffered = os.environ.get("PYTHONUNBUFFERED", "") != "" or "-u" in sys.orig_argv[1:2]
    for fd, stream in enumerate(standard):
        name, mode, encoding, errors = stream.name, stream.mode, stream.encoding, stream.errors
        # A new one: the old one has kept whether it is seekable.
        raw: Any = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
        raw.name = name
        stream.__init__(
            raw if isinstance(stream.buffer, io.FileIO) else type(stream.buffer)(raw),
            *(encoding, errors, None if fd == 0 else "\n"),
            line_buffering=not unbuffered and (fd == 2 or raw.isatty()),
            write_through=unbuffered,
        )
        stream.mode = mode


def seeds(rank_zero: dict[str, str]) -> None:
    """What a process draws or looks up once; only of modules that are there."""
    import time

    loaded: dict[str, Any] = dict(sys.modules)
    if "numpy.random" in loaded:
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


def blas() -> None:
    """OpenBLAS, which was kept from starting threads, gets the number that it would have read."""
    given = [os.environ.get(name, "") for name in _BLAS_THREADS]
    counts = [int(text) for text in given if text.isdecimal() and text != "0"]
    count = counts[0] if counts else len(os.sched_getaffinity(0))
    if count == 1:
        return
    with open("/proc/self/maps") as maps:
        found = {line.split(maxsplit=5)[-1].rstrip() for line in maps if "openblas" in line}
    if found:
        import ctypes

        for path in found:
            library = ctypes.CDLL(path)
            for name in _SET_BLAS_THREADS:
                if hasattr(library, name):
                    getattr(library, name)(count)
