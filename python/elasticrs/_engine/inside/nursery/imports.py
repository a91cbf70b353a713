"""Watches what imports do to a warm nursery (the process that forks workers): environment variables, output
and descriptors, children, random number generators, and changed files. Loaded by ``nursery.py``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any, NoReturn

_ARROW = "JE_ARROW_MALLOC_CONF"
_QUIET = {"OPENBLAS_NUM_THREADS": "1", _ARROW: "background_thread:false"}
"""Variables that keep libraries from starting threads at import. They are set only in the C environment, so
that Python modules read the same values as in a worker.
"""

_OF_ATTEMPTS = frozenset(
    b"RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    b"MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT".split()
)
"""Variables whose values differ between attempts or workers. The nursery does not have them, so an import
that reads one cannot be preloaded.
"""


class Variables(dict):  # type: ignore[type-arg]
    """Dictionary that replaces the data of ``os.environ`` during the imports. Records each read of a variable
    that only workers have.

    Args:
        hidden: variables with a value that only C code sees, in addition to :data:`_QUIET`.
        rank_zero: names of modules that may read the rank.

    Attributes:
        asked: worker variables that a module has tried to read.
        assigned: variables that the script has set so far, and their values.
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
        """Set the environment variables that only C code may see, such as the thread limit of OpenBLAS. Call
        this after each assignment to ``os.environ``, because an assignment may overwrite such a variable.
        """
        for name, value in self._hidden.items():
            os.putenv(name, value)

    def assign(self, name: str, value: str) -> None:
        # Read the old value with `self.get`. A lookup in `os.environ` would call `__missing__`, which may
        # wrongly record that an imported module reads the variable.
        self._before.setdefault(name, self.get(os.fsencode(name)))
        self.assigned[name] = os.environ[name] = value
        # If the script configures Arrow's allocator, remove the preset `JE_ARROW_MALLOC_CONF`.
        #
        # Keep the preset thread count of OpenBLAS, because workers set their own thread count after the fork.
        if name == _ARROW:
            self._hidden.pop(name, None)
        self.hide()

    def changed(self) -> str | None:
        """Return the name of a variable that an import has changed after the script had set it. Return
        ``None`` if there is no such variable.

        Such an import cannot be preloaded, because the script in the worker would overwrite the changed
        value.
        """
        now = {name: self.get(os.fsencode(name)) for name in self.assigned}
        changed = [name for name, value in self.assigned.items() if now[name] != os.fsencode(value)]
        return changed[0] if changed else None

    def end(self) -> None:
        """Restore the environment variables for the start of the script: undo the assignments of the preload
        steps, and stop recording which variables are read.
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
    """Captures stdout and stderr until :meth:`end` is called.

    Args:
        lowest: lowest file descriptor that may be used to keep the original streams.
    """

    def __init__(self, lowest: int) -> None:
        import fcntl

        self._kept = {}
        for fd in (1, 2):
            memory = os.memfd_create("imports")
            # Keep a descriptor of the memory file, because an import may close or replace the descriptor of
            # the stream.
            self._kept[fd] = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, lowest) for each in (fd, memory)]
            os.dup2(memory, fd)
            os.close(memory)

    def end(self) -> dict[int, bytes]:
        from contextlib import suppress

        printed = {}
        for fd, (kept, memory) in self._kept.items():
            # Ignore errors, because an import may have closed the stream or its descriptor.
            with suppress(ValueError, OSError):
                (sys.stdout if fd == 1 else sys.stderr).flush()
            printed[fd] = os.pread(memory, os.fstat(memory).st_size, 0)
            os.dup2(kept, fd)
            os.close(kept)
            os.close(memory)
        return printed


def reserve(limit: int) -> list[int]:
    """Open all free descriptors below ``limit``, so that imported modules cannot get them. Return the
    descriptors.
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
    """Kill the children that do not exit within half a second, and reap all children.

    Resource trackers are never killed, because the files that they still have to remove would stay in
    ``/dev/shm``. A tracker exits once no process holds its pipe, so it exits at the latest after all other
    children. This function has no timeout, because the agent limits the total time of the imports.
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
    """Return the modification time and the size of a file, or an empty list if the file is missing.

    If the file has changed since the imports started, the nursery may have imported the old contents. In this
    case, return an impossible time, so that the agent treats the file as changed. Ignore a change time in the
    future, because the clock of the file system may be wrong.

    Args:
        file: path of the file.
        since: wall-clock time at which the imports started, in nanoseconds. ``None`` if changes during the
            imports do not matter.
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
"""Length of a seed that numpy takes from the operating system, in bytes."""


class _Entropy:
    """Wrapper around ``os.urandom`` that records each value that may have become a numpy seed.

    It is a callable object, because a function would become a method if a class stored it.
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
    """Records which generators of ``random`` and numpy take their seed from the operating system, until
    :meth:`end` is called. Each forked worker reseeds them, because otherwise all workers would get the same
    numbers.
    """

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
        # Search all objects for further numpy generators only if more than one seed was recorded, because the
        # search is slow. The first seed belongs to numpy's shared generator, which is already known.
        if len(self._entropy.drawn) > 1:
            import gc

            # Use `type` instead of `isinstance`, because reading `__class__` of a proxy may import a module.
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
