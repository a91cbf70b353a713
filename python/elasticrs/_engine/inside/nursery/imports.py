"""Runs the imports of a warm nursery, the process that imports modules once and then forks workers.

After each import, it checks whether forked workers would lose or wrongly share an effect of the import
(WARM-1 in ``nursery.py``, which loads this file).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any, NoReturn

    Done = tuple[
        dict[int, bytes],
        dict[str, tuple["str | None", "str | None"]],
        dict[str, dict[str, str]],
        "list[Callable[[], None]] | None",
    ]
    """Results of the imports, which each worker needs: the printed output by descriptor; the changed
    environment variables with their values before and after; for each OpenBLAS library, the variables that
    the script had set when it was loaded; and functions that reseed the random generators (``None`` if not
    watched).
    """

SETTINGS = "ELASTICRS_WARM"
"""Environment variable with the nursery's settings as JSON: ``steps``, ``is_explicit``, ``folders``."""
AGENT, REPORT = (3, 4, 5), 6
"""Descriptors of the connections to the agent (first a socket), and of the report. See ``launch.rs``."""
_PID = "ELASTICRS_NURSERY_PID"
"""Environment variable with this process's pid, to notice that an import has executed another program."""
SINCE = "ELASTICRS_WARM_SINCE"
"""Environment variable with the offset of the lines of earlier nurseries in the report."""

_RESERVED = min(256, os.sysconf("SC_OPEN_MAX") // 2)
"""Descriptors below this number are reserved for workers. Modules cannot open such descriptors."""

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED

RANK_ZERO = {
    "lightning.fabric.utilities.rank_zero": "RANK",
    "lightning_fabric.utilities.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules that may read the rank at import, because each worker sets it again from these variables."""

CURRENT: list[str] = []
"""Name of the module that is being imported now, if any."""

_exit, _execv, _execve = os._exit, os.execv, os.execve  # Keep the originals, because imports may patch `os`.


def report(**line: object) -> None:
    import json

    os.write(REPORT, json.dumps(line).encode() + b"\n")


_ARROW = "JE_ARROW_MALLOC_CONF"
_QUIET = {"OPENBLAS_NUM_THREADS": "1", _ARROW: "background_thread:false"}
"""Environment variables that keep libraries from starting threads. Only C code sees them."""

_OF_ATTEMPTS = frozenset(
    b"RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    b"MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT".split()
)
"""Environment variables that only workers have. A module that reads one at import cannot be preloaded."""


class _Variables(dict):  # type: ignore[type-arg]
    """Dictionary behind ``os.environ`` during imports. ``asked`` lists variables that a module has read
    although only workers have them. Those that modules in :data:`RANK_ZERO` read are not listed. The values
    in ``hidden`` are set for C code only.
    """

    def __init__(self, hidden: dict[str, str]) -> None:
        self._hidden = {**_QUIET, **hidden}
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
            if frame is None or frame.f_globals.get("__name__") not in RANK_ZERO:
                self.asked.append(name.decode())
        raise KeyError(name)

    def hide(self) -> None:
        """Set the variables that only C code may see. Repeat this after assignments, which may undo it."""
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
        """Return a variable that the script has set and an import has changed, if any. A worker would lose
        the change, because its script sets the variable again.
        """
        now = {name: self.get(os.fsencode(name)) for name in self.assigned}
        changed = [name for name, value in self.assigned.items() if now[name] != os.fsencode(value)]
        return changed[0] if changed else None

    def end(self) -> None:
        """Stop recording reads. Undo :meth:`assign`, so that the script starts with its own variables."""
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


class _Captured:
    """Captures stdout and stderr until :meth:`end`. Keeps the originals in descriptors from ``lowest`` on."""

    def __init__(self, lowest: int) -> None:
        import fcntl

        self._kept = {}
        for fd in (1, 2):
            memory = os.memfd_create("imports")
            # Keep a second descriptor of the memory file, because an import may close descriptor 1 or 2.
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


def _reserve(limit: int) -> list[int]:
    """Occupy all free descriptors below ``limit``, so that imported modules cannot use them. Return them."""
    null = os.open(os.devnull, os.O_RDONLY)
    free = [fd for fd in range(3, limit) if fd != null and not os.path.exists(f"/proc/self/fd/{fd}")]
    for fd in free:
        os.dup2(null, fd, inheritable=False)
    return [null, *free]


def _child_pids() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _end_children() -> None:
    """Reap all children of this process. Kill those that do not exit within half a second. Do not kill
    multiprocessing's resource trackers, which remove files from ``/dev/shm``. They exit after all other
    children. Wait for them without a time limit, because the agent limits the total time of the imports.
    """
    import select
    import signal
    import time

    deadline = time.monotonic() + 0.5
    while listed := _child_pids():
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


def _stamp(file: str, since: int | None = None) -> list[int]:
    """Return modification time and size of a file; an empty list if it is missing. If it has changed after
    ``since`` (start of the imports, wall-clock nanoseconds), return an impossible time, because the old
    contents may have been imported. Ignore a change time in the future, because it results from a wrong
    clock.
    """
    import time

    try:
        found = os.stat(file)
    except OSError:
        return []
    is_new = since is not None and since <= found.st_ctime_ns <= time.time_ns()
    return [-1 if is_new else found.st_mtime_ns, found.st_size]


_NEEDED = ("random", "bisect", "hashlib", "math", "operator", "warnings")
"""Modules that :class:`_GeneratorWatch` imports, directly or indirectly."""
_SEED_BYTES = 16
"""Length, in bytes, of the seed that numpy's generators take from the operating system."""


class _Entropy:
    """Replacement for ``os.urandom`` that also records possible numpy seeds. It is an object, because a
    function would become a method if a class stores it.
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


class _GeneratorWatch:
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
        # The search for generators is slow. Skip it if the only seed is that of numpy's own generator.
        if len(self._entropy.drawn) > 1:
            import gc

            # Do not use `isinstance`: it reads `__class__`, for which a proxy object may import a module.
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


class _ProgramError(BaseException):
    """Raised if an import calls an ``exec`` function, which would replace this process by another program."""


def _refusing(real: Any) -> Any:
    """Wrap an ``exec`` function: it raises :class:`_ProgramError` in this process, but works in children."""
    pid = os.getpid()

    def execute(*args: object, **named: object) -> None:
        if os.getpid() == pid:
            raise _ProgramError
        real(*args, **named)

    return execute


def _open_files() -> dict[int, str]:
    from contextlib import suppress

    links = {}
    for name in os.listdir("/proc/self/fd"):
        # Skip the descriptor that `listdir` itself used, because it is closed now.
        with suppress(FileNotFoundError):
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return links


def _has_threads() -> bool:
    import time

    # Retry, because a thread that was joined a moment ago may still be listed.
    for _ in range(20):
        if len(os.listdir("/proc/self/task")) == 1:
            return False
        time.sleep(0.005)
    return True


def _temporary_folders() -> list[Any]:
    """Return the finalizers of temporary directories, which the first worker to exit would remove for all."""
    registry: Any = getattr(getattr(sys.modules.get("weakref"), "finalize", None), "_registry", ())
    # Compare only the function's name, because building the `repr` of a whole finalizer may be slow.
    called = [(end, found[1]) for end in list(registry) if (found := end.peek())]
    name = "TemporaryDirectory._cleanup"
    return [end for end, function in called if getattr(function, "__qualname__", None) == name]


def _mapped(name: str) -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[-1].rstrip() for line in maps if name in line}


def _uses_cuda() -> bool:
    found = _mapped("/libcuda.so")
    if not found:
        return False
    import ctypes

    count = ctypes.c_int()
    codes = [ctypes.CDLL(path).cuDeviceGetCount(ctypes.byref(count)) for path in found]
    return any(code != _NOT_INITIALIZED for code in codes)


_STREAMS = ("__stdin__", "__stdout__", "__stderr__")


def _settings(stream: Any) -> dict[str, object] | None:
    try:
        stream.buffer.fileno()
    except (ValueError, AttributeError):
        return None
    return {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}


class _Surroundings:
    """State of this process that imports must not change, because each worker starts with it."""

    def __init__(self, folders: list[str], variables: _Variables) -> None:
        import signal

        self.variables = variables
        self._folders, self._known = folders, set(sys.modules)
        self._place, self._mask = os.getcwd(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask, self._nice = os.umask(0), os.getpriority(os.PRIO_PROCESS, 0)
        os.umask(self._umask)
        self._standard = [getattr(sys, name) for name in _STREAMS]
        self._streams = [_settings(stream) for stream in self._standard]
        self._environ, self._first_entry = os.environ, sys.path[:1]
        self.blas: dict[str, dict[str, str]] = {}
        """Variables that the script had set when an OpenBLAS library was loaded, by path of the library."""

    def note_blas(self) -> None:
        """Save the variables that the script has set so far, for each OpenBLAS library loaded since the last
        call. Call this before the script sets another one, because a library reads them when it is loaded.
        """
        for path in _mapped("openblas") - self.blas.keys():
            self.blas[path] = dict(self.variables.assigned)

    def restore(self) -> str | None:
        """Undo imports' changes to the process state. Return one, such as ``the umask``; ``None`` if none."""
        import signal

        changed = None
        if os.umask(self._umask) != self._umask:
            changed = "the umask"
        if signal.pthread_sigmask(signal.SIG_SETMASK, self._mask) != self._mask:
            changed = "the signal mask"
        # Timers survive `exec`, but forked workers do not inherit them.
        timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        if [timer for timer in timers if signal.setitimer(timer, 0) != (0.0, 0.0)]:
            changed = "the interval timers"
        if os.getpriority(os.PRIO_PROCESS, 0) != self._nice:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, self._nice)
                changed = "the nice value"
            except PermissionError:
                # A process without privileges may not lower its nice value. Without preloading, each worker
                # would import the module and raise its nice value, too, so keep the raised one.
                self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        if os.getcwd() != self._place:
            os.chdir(self._place)
            changed = "the working directory"
        changed = self._restore_streams() or changed
        if os.environ is not self._environ:
            os.environ = self._environ  # noqa: B003 -- the object that the import has replaced
            changed = "os.environ"
        if sys.path[:1] != self._first_entry:
            changed = "the beginning of sys.path"
        return changed

    def _restore_streams(self) -> str | None:
        changed = None
        for name, stream, settings in zip(_STREAMS, self._standard, self._streams, strict=True):
            found = _settings(stream)
            if found != settings:
                changed = "the standard streams"
                # A closed or detached stream cannot be restored.
                if found is not None:
                    stream.reconfigure(**(settings or {}))
            for each in (name, name.strip("_")):
                if getattr(sys, each, None) is not stream:
                    changed = f"sys.{each}"
                    setattr(sys, each, stream)
        return changed

    def hidden(self) -> str | None:
        """Return a newly imported module that would hide a file of the same name next to the script."""
        new = [name for name in list(sys.modules) if name not in self._known]
        self._known.update(new)
        return self.beside_script(new)

    def beside_script(self, names: Sequence[str]) -> str | None:
        from _frozen_importlib_external import PathFinder

        tops = [name for name in names if "." not in name]
        found = [
            name for name in tops if getattr(PathFinder.find_spec(name, self._folders), "has_location", False)
        ]
        for folder in self._folders:
            sys.path_importer_cache.pop(folder, None)
        return found[0] if found else None


def _kept(fd: int) -> str | None:
    """Return what a descriptor is, such as ``a socket``, if workers must not share it; otherwise ``None``."""
    import fcntl
    import stat

    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return "a socket"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISREG(mode):
        return None if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND else "a file"
    # A file type of 0 means an anonymous inode, such as an epoll instance.
    return None if stat.S_IFMT(mode) else "a descriptor"


def _why_unclean(before: dict[int, str], surroundings: _Surroundings) -> str | None:
    """Return why a module cannot be preloaded: forked workers would lose or wrongly share an effect of it."""
    opened = {fd: link for fd, link in _open_files().items() if before.get(fd) != link}
    if _has_threads():
        return "it starts a thread at import"
    if _child_pids():
        return "it starts a process at import"
    if any(link.startswith(_DEVICES) for link in opened.values()) or _uses_cuda():
        return "it initialises a GPU driver at import"
    for kept in map(_kept, opened):
        if kept is not None:
            return f"it keeps {kept} open at import"
    if _temporary_folders():
        return "it creates a temporary directory at import"
    if surroundings.variables.asked:
        return f"it reads {surroundings.variables.asked[0]} at import"
    if not surroundings.variables:
        return "it clears the environment at import"
    variable = surroundings.variables.changed()
    if variable:
        return f"it changes {variable} at import, which the script has set"
    changed = surroundings.restore()
    if changed:
        return f"it changes {changed} at import"
    if any(_open_files().get(fd) != before[fd] for fd in (0, 1, 2)):
        return "it changes the standard descriptors at import"
    hidden = surroundings.hidden()
    return hidden and f"it imports {hidden}, which is also next to the script"


def _import(
    written: str, is_explicit: bool, before: dict[int, str], surroundings: _Surroundings
) -> tuple[str, str | None] | None:
    """Import a module. If it cannot be preloaded, return the reason, and the traceback if it raised."""
    import time

    name, _, attribute = written.partition(":")
    report(importing=name)
    CURRENT[:] = [name]
    begun, is_there, pid = time.monotonic(), True, os.getpid()
    try:
        __import__(name, fromlist=[attribute] if attribute else ())
    except _ProgramError:
        return "it executes another program at import", None
    except BaseException as error:
        is_there = not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}.")
        if is_there and not surroundings.variables.asked:
            import traceback

            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            return f"it raises {type(error).__name__} at import", text
    finally:
        if os.getpid() != pid:
            _exit(0)  # The module forked this child. Exit, because there can be only one nursery.
        _end_if_cut_off(before)
    # Check the state even if the module was not found, because its parent packages may have been imported.
    why = _why_unclean(before, surroundings)
    if why is not None:
        return why, None
    if is_there:
        report(imported=name, seconds=time.monotonic() - begun)
    elif is_explicit:
        report(left_out=name, why="it was not found", traceback=None)
    return None


def _end_if_cut_off(before: dict[int, str]) -> None:
    """If an import has closed a descriptor to the agent, disconnect and wait until the agent kills us."""
    now = _open_files()
    if any(now.get(fd) != before[fd] for fd in AGENT):
        import signal

        # Put a new pipe in its place: without it, the agent would think that an import has called `exec`.
        os.dup2(os.pipe()[1], AGENT[-1])
        os.close(AGENT[0])
        while True:
            signal.pause()


def _begin_again(environ: dict[str, str], settings: dict[str, object]) -> NoReturn:
    import json

    for remove in _temporary_folders():
        remove()
    # This also closes the pipe to multiprocessing's resource tracker, a child process that then exits.
    os.closerange(REPORT + 1, os.sysconf("SC_OPEN_MAX"))
    _end_children()
    for fd in AGENT:
        os.set_inheritable(fd, True)
    _execve(sys.executable, sys.orig_argv, {**environ, SETTINGS: json.dumps(settings)})


def _left_out_before(environ: dict[str, str]) -> set[str]:
    import json
    from itertools import pairwise

    since = environ.get(SINCE)
    if since is None:
        return set()
    told = os.pread(REPORT, os.fstat(REPORT).st_size - int(since), int(since))
    records = [json.loads(line) for line in told.splitlines()]
    ended = {last["importing"] for last, record in pairwise(records) if "ended" in record}
    return ended | {record["left_out"] for record in records if "left_out" in record}


def import_all(environ: dict[str, str], at_first: Collection[str]) -> Done:
    """Import the modules that the setting in ``environ`` lists, except those that each worker must import."""
    import json
    import time

    begun, since = time.monotonic(), time.time_ns()
    settings = json.loads(environ[SETTINGS])
    gone = _left_out_before(environ)
    steps = [step for step in settings["steps"] if step.partition(":")[0] not in gone]
    is_explicit = settings["is_explicit"]
    shielded = {"PYTHONPATH": environ["PYTHONPATH"], _PID: str(os.getpid())}
    variables = _Variables(shielded)
    surroundings = _Surroundings(settings["folders"], variables)
    # Omit the watch if a file beside the script has the name of a module that the watch would import.
    watch = _GeneratorWatch() if surroundings.beside_script(_NEEDED) is None else None
    reserved, captured = _reserve(_RESERVED), _Captured(_RESERVED)
    before, untouched = _open_files(), dict(os.environ)
    variables.hide()
    python: Any = os
    python.execv, python.execve = _refusing(_execv), _refusing(_execve)
    for step in steps:
        name, is_variable, value = step.partition("=")
        if is_variable:
            surroundings.note_blas()
            variables.assign(name, value)
            continue
        environment = dict(variables)
        found = _import(name, is_explicit, before, surroundings)
        if found is not None:
            why, text = found
            module = name.partition(":")[0]
            rest = steps
            if not is_explicit and dict(variables) != environment:
                # Skip the later modules, too, because one may read a variable that this module has changed.
                rest = steps[: steps.index(step)]
                why += "; later imports were left out as well, because it changes the environment"
            rest = [other for other in rest if other.partition(":")[0] != module]
            report(left_out=module, why=why, traceback=text)
            surroundings.restore()
            captured.end()
            _begin_again(environ, {**settings, "steps": rest})
        CURRENT.clear()
    surroundings.note_blas()
    printed = captured.end()
    python.execv, python.execve = _execv, _execve
    variables.end()
    for fd in reserved:
        os.close(fd)
    both = {name: (untouched.get(name), os.environ.get(name)) for name in {*untouched, *os.environ}}
    _tell_ready(begun, since, surroundings, at_first)
    done = {name: change for name, change in both.items() if change[0] != change[1]}
    return printed, done, surroundings.blas, None if watch is None else watch.end()


def _tell_ready(begun: float, since: int, surroundings: _Surroundings, at_first: Collection[str]) -> None:
    import site
    import sysconfig
    import time

    hidden = surroundings.beside_script([name for name in list(sys.modules) if name not in at_first])
    if hidden:
        # Fork no workers, because their script would get the module that this process has imported.
        report(failed=f"{hidden} is next to the script and has the name of a module that --warm needs")
        _exit(1)
    paths = sysconfig.get_paths()
    # Leave out sysconfig's folder `data`: it may be `/usr`, which may contain the user's code (`/usr/src`).
    library = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*library, *site.getsitepackages(), site.getusersitepackages()]
    prefixes = {path for folder in folders for path in (folder, os.path.realpath(folder))}
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    told = sorted(file for file in files if isinstance(file, str) and os.path.isabs(file))
    report(
        ready={
            "seconds": time.monotonic() - begun,
            "prefixes": sorted(prefixes),
            "stamps": {path: _stamp(path, since) for path in told}
            | {path: _stamp(path) for path in prefixes},
        }
    )
