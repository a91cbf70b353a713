"""Watches what imports do to a warm nursery (the process that forks workers). Loaded by ``nursery.py``."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any, NoReturn

_ARROW = "JE_ARROW_MALLOC_CONF"
_QUIET = {"OPENBLAS_NUM_THREADS": "1", _ARROW: "background_thread:false"}
"""Environment variables that keep libraries from starting threads.

Only C code sees them; Python code is not affected.
"""

_OF_ATTEMPTS = frozenset(
    b"RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    b"MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT".split()
)
"""Environment variables that only workers have.

A module that reads one of them during its import cannot be preloaded.
"""


class Variables(dict):  # type: ignore[type-arg]
    """Data of ``os.environ`` during the imports. Reads of the workers' variables are recorded in ``asked``.

    Only C code sees the values of the variables in ``hidden``. The modules in ``rank_zero`` may read the
    rank.
    """

    def __init__(self, hidden: dict[str, str], rank_zero: Collection[str]) -> None:
        self._hidden = {**_QUIET, **hidden}
        self._rank_zero = rank_zero
        self.assigned: dict[str, str] = {}
        self._before: dict[str, bytes | None] = {}
        self._environments: list[Any] = [os.environ, os.environb]
        for name in _OF_ATTEMPTS:
            os.environb.pop(name, None)
        self._real = self._environments[0]._data
        super().__init__(self._real)
        self.asked: list[str] = []
        self._use(self)

    def __missing__(self, name: bytes) -> NoReturn:
        if name in _OF_ATTEMPTS:
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "<module>":
                frame = frame.f_back
            if frame is None or frame.f_globals.get("__name__") not in self._rank_zero:
                self.asked.append(name.decode())
        raise KeyError(name)

    def hide(self) -> None:
        """Set the variables that only C code may see.

        Call this after each assignment, which may have undone it.
        """
        for name, value in self._hidden.items():
            os.putenv(name, value)

    def assign(self, name: str, value: str) -> None:
        # Use `get`, because a lookup in `os.environ` would count as a read of this variable by the module.
        self._before.setdefault(name, self.get(os.fsencode(name)))
        self.assigned[name] = os.environ[name] = value
        # Let C code see how the script itself configures Arrow's allocator. OpenBLAS's thread count stays
        # hidden, because workers set it after the fork.
        if name == _ARROW:
            self._hidden.pop(name, None)
        self.hide()

    def changed(self) -> str | None:
        """Return the name of a variable that the script had set before, and that an import has changed since.

        In a worker, the script would run after the import, and would overwrite the changed value.
        """
        now = {name: self.get(os.fsencode(name)) for name in self.assigned}
        changed = [name for name, value in self.assigned.items() if now[name] != os.fsencode(value)]
        return changed[0] if changed else None

    def end(self) -> None:
        """Undo the assignments, so that the script starts with the original environment.

        Stop recording reads.
        """
        for name, value in self._before.items():
            del os.environ[name]
            os.environb.update({} if value is None else {os.fsencode(name): value})
        self._real.clear()
        self._real.update(self)
        self._use(self._real)
        for name in self._hidden:
            os.unsetenv(name)
            if name in os.environ:
                os.putenv(name, os.environ[name])

    def _use(self, data: dict[bytes, bytes]) -> None:
        for environ in self._environments:
            environ._data = data


class Captured:
    """Captures stdout and stderr until :meth:`end`.

    Meanwhile, the original streams have descriptors from ``lowest`` on.
    """

    def __init__(self, lowest: int) -> None:
        import fcntl

        self._kept = {}
        for fd in (1, 2):
            memory = os.memfd_create("imports")
            # Keep a second descriptor of the file that captures the output, because an import may close the
            # stream's descriptor.
            self._kept[fd] = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, lowest) for each in (fd, memory)]
            os.dup2(memory, fd)
            os.close(memory)

    def end(self) -> dict[int, bytes]:
        from contextlib import suppress

        printed = {}
        for fd, (kept, memory) in self._kept.items():
            # Ignore errors here: an import may have closed the stream or its descriptor.
            with suppress(ValueError, OSError):
                (sys.stdout if fd == 1 else sys.stderr).flush()
            printed[fd] = os.pread(memory, os.fstat(memory).st_size, 0)
            os.dup2(kept, fd)
            os.close(kept)
            os.close(memory)
        return printed


def reserve(limit: int) -> list[int]:
    """Open all free descriptors below ``limit``, so that imported modules cannot get them.

    Return the descriptors.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    free = [fd for fd in range(3, limit) if fd != null and not os.path.exists(f"/proc/self/fd/{fd}")]
    for fd in free:
        os.dup2(null, fd, inheritable=False)
    return [null, *free]


def child_pids() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def end_children() -> None:
    """Reap all children of this process. Kill those that do not exit within half a second.

    Do not kill multiprocessing's resource trackers, which remove files from ``/dev/shm``. They exit after all
    other children. Wait for them without a time limit, because the agent limits the total time of the
    imports.
    """
    import select
    import signal
    import time

    deadline = time.monotonic() + 0.5
    while listed := child_pids():
        others = [pid for pid in listed if not _is_resource_tracker(pid)]
        left = deadline - time.monotonic()
        if left <= 0:
            for pid in others:
                os.kill(pid, signal.SIGKILL)
        poll, pidfds = select.poll(), [os.pidfd_open(pid) for pid in listed]
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        poll.poll(1000 * left if others and left > 0 else None)
        for pid, pidfd in zip(listed, pidfds, strict=True):
            os.close(pidfd)
            os.waitpid(pid, os.WNOHANG)


def _is_resource_tracker(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()


def stamp(file: str, since: int | None = None) -> list[int]:
    """Return the modification time and the size of a file; an empty list if it is missing.

    ``since`` is the start of the imports in wall-clock nanoseconds. If the file has changed after it, return
    an impossible time, because the old contents may have been imported. Ignore a change time in the future,
    because it results from a wrong clock.
    """
    import time

    try:
        found = os.stat(file)
    except OSError:
        return []
    is_new = since is not None and since <= found.st_ctime_ns <= time.time_ns()
    return [-1 if is_new else found.st_mtime_ns, found.st_size]


NEEDED = ("random", "bisect", "hashlib", "math", "operator", "warnings")
"""Modules that :class:`GeneratorWatch` imports, directly or indirectly."""
_SEED_BYTES = 16
"""Length, in bytes, of the seed that numpy's generators take from the operating system."""


class _Entropy:
    """Replacement for ``os.urandom`` that also records possible numpy seeds.

    It is an object, because a function would become a method if a class stores it.
    """

    def __init__(self, real: Callable[[int], bytes]) -> None:
        self._real = real
        self.is_watched = True
        self.drawn: set[int] = set()

    def __call__(self, size: int) -> bytes:
        data = self._real(size)
        if self.is_watched and size == _SEED_BYTES:
            self.drawn.add(int.from_bytes(data, "big"))
        return data


class GeneratorWatch:
    """Records which generators of ``random`` and numpy seed themselves, because workers must reseed them."""

    def __init__(self) -> None:
        self._urandom = os.urandom
        self._entropy = _Entropy(os.urandom)
        vars(os)["urandom"] = self._entropy
        import random

        self._random: Any = random
        vars(self._random)["_urandom"] = self._entropy
        self._seed = random.Random.seed
        self._unseeded: dict[int, Any] = {}
        self._random.Random.seed = self._noting()

    def _noting(self) -> Callable[..., None]:
        real, unseeded = self._seed, self._unseeded

        def seed(self: Any, a: Any = None, version: int = 2) -> None:
            real(self, a, version)
            unseeded.pop(id(self), None)
            if a is None:
                unseeded[id(self)] = self

        return seed

    def end(self) -> list[Callable[[], None]]:
        """Stop recording. Return functions that reseed the recorded random generators in each worker."""
        self._entropy.is_watched = False
        if vars(os)["urandom"] is self._entropy:
            vars(os)["urandom"] = self._urandom
        vars(self._random)["_urandom"] = self._urandom
        self._random.Random.seed = self._seed
        return [*(generator.seed for generator in self._unseeded.values()), *self._of_numpy()]

    def _of_numpy(self) -> list[Callable[[], None]]:
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is None:
            return []
        shared = numpy.mtrand._rand._bit_generator
        found = [shared]
        # Search for other generators only if there is a second seed, because the search is slow. The first
        # seed belongs to numpy's shared generator.
        if len(self._entropy.drawn) > 1:
            import gc

            # Use `type` instead of `isinstance`, because `isinstance` reads `__class__`, which may import a
            # module if the object is a proxy.
            every = [each for each in gc.get_objects() if issubclass(type(each), numpy.BitGenerator)]
            found += [each for each in every if each is not shared]
        unseeded = [each for each in found if self._is_unseeded(each)]
        return [numpy.seed if each is shared else _renewal(each) for each in unseeded]

    def _is_unseeded(self, generator: Any) -> bool:
        # The attribute is named `_seed_seq` before numpy 1.25, and `seed_seq` in later versions.
        sequence = getattr(generator, "_seed_seq", None) or getattr(generator, "seed_seq", None)
        return getattr(sequence, "entropy", None) in self._entropy.drawn


def _renewal(generator: Any) -> Callable[[], None]:
    def renew() -> None:
        generator.state = type(generator)().state

    return renew
