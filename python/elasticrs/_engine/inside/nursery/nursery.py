"""Startup code of a warm nursery. It imports modules once and then forks workers.

``site`` imports ``sitecustomize.py`` from this directory before the interpreter opens the script. That file
executes this one, which returns in each forked worker. It does not need elasticrs. It guarantees:

- **WARM-1** the nursery forks only while it has a single thread, no child, no initialized GPU driver, and no
  descriptor that workers must not share. If a module violates this, the nursery reports the module and
  restarts itself with ``exec``, without that module.
- **WARM-2** each worker gets its own environment, standard streams, random seeds and keys.
- **WARM-3** each worker prints the recorded output of the imports.
- **WARM-4** after an unexpected error in the nursery, workers start without preloaded modules. After such an
  error in a forked worker, the worker executes its command line instead.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    _Done = tuple[
        dict[int, bytes],
        dict[str, tuple["str | None", "str | None"]],
        dict[str, dict[str, str]],
        "list[Callable[[], None]] | None",
    ]
    """Results of the imports, which each worker needs.

    They are: the printed output by descriptor; the changed environment variables with their values before and
    after; for each OpenBLAS library, the variables that the script had set when it was loaded; and functions
    that reseed the random generators, or ``None`` if the generators were not watched.
    """

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOOK = os.path.join(os.path.dirname(_HERE), "hook")

_SETTINGS = "ELASTICRS_WARM"
"""Environment variable with the nursery's settings as JSON: ``steps``, ``is_explicit``, ``folders``."""
_CORE = "ELASTICRS_WARM_CORE"
"""Environment variable with the path of the extension module ``elasticrs._core``."""
_START = "ELASTICRS_NURSERY_START"
"""Environment variable with the start parameters. The core's ``launch.rs`` uses the same name."""
_AGENT, _REPORT = (3, 4, 5), 6
"""Descriptors of the connections to the agent (the first is a socket), and of the report. See ``launch.rs``.
"""
_PID = "ELASTICRS_NURSERY_PID"
"""Environment variable with this process's pid.

It reveals if an import has executed another program in this process.
"""
_SINCE = "ELASTICRS_WARM_SINCE"
"""Environment variable with an offset in the report.

The lines from there on, by earlier nurseries, must be read.
"""

_RESERVED = min(256, os.sysconf("SC_OPEN_MAX") // 2)
"""Descriptors below this number are reserved for workers. Modules cannot open such descriptors."""

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED

_RANK_ZERO = {
    "lightning.fabric.utilities.rank_zero": "RANK",
    "lightning_fabric.utilities.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules that may read the rank during their import, because each worker sets it again from these variables.
"""

_AT: list[str] = []
"""Name of the module that is being imported now, if any."""

_exit, _execv, _execve = os._exit, os.execv, os.execve  # Keep the originals, because imports may patch `os`.
_executable = sys.executable

_AT_FIRST = frozenset(sys.modules)
"""Modules that the interpreter had imported before this file ran."""


def _report(**line: object) -> None:
    import json

    os.write(_REPORT, json.dumps(line).encode() + b"\n")


# --- checks for side effects of imports ---


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
    """Return the finalizers of temporary directories.

    In forked workers, the first one to exit would remove the directories of all.
    """
    registry: Any = getattr(getattr(sys.modules.get("weakref"), "finalize", None), "_registry", ())
    # Compare only the function's name, because building the `repr` of a whole finalizer may be slow.
    return [end for end in list(registry) if _name_of_function(end) == "TemporaryDirectory._cleanup"]


def _name_of_function(finalizer: Any) -> object:
    found = finalizer.peek()
    return getattr(found[1], "__qualname__", None) if found else None


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


def _standard_streams() -> list[Any]:
    return [getattr(sys, name) for name in _STREAMS]


def _settings(stream: Any) -> dict[str, object] | None:
    try:
        stream.buffer.fileno()
    except (ValueError, AttributeError):
        return None
    return {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}


class _Surroundings:
    """State of this process that imports must not change, because each worker starts with it."""

    def __init__(self, folders: list[str], variables: Any, imports: Any) -> None:
        import signal

        self.variables, self.imports = variables, imports
        self._folders, self._known = folders, set(sys.modules)
        self._place, self._mask = os.getcwd(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask, self._nice = os.umask(0), os.getpriority(os.PRIO_PROCESS, 0)
        os.umask(self._umask)
        self._standard = _standard_streams()
        self._streams = [_settings(stream) for stream in self._standard]
        self._environ, self._first_entry = os.environ, sys.path[:1]
        self.blas: dict[str, dict[str, str]] = {}
        """Variables that the script had set when an OpenBLAS library was loaded, by path of the library."""

    def note_blas(self) -> None:
        """For each OpenBLAS library loaded since the last call, save which variables the script has set.

        A library reads these variables when it is loaded, so call this before the script sets further
        variables.
        """
        for path in _mapped("openblas") - self.blas.keys():
            self.blas[path] = dict(self.variables.assigned)

    def restore(self) -> str | None:
        """Undo what imports have changed in this process's state.

        Return the last change found; ``None`` if there is none.
        """
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
                # This process is not permitted to set the value back. A worker that imports the module would
                # raise the value, too.
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
        """Return the name of a newly imported module if a file beside the script has the same name.

        The script would import that file instead.
        """
        new = [name for name in sys.modules if name not in self._known]
        self._known.update(new)
        return self.beside_script(new)

    def hidden_by_us(self) -> str | None:
        """Like :meth:`hidden`, for modules that the nursery itself has imported.

        If one is found, workers cannot be forked.
        """
        return self.beside_script([name for name in sys.modules if name not in _AT_FIRST])

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
    """Describe what a descriptor refers to if workers must not share it, such as ``a socket``; ``None`` if
    they may.
    """
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
    if surroundings.imports.child_pids():
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


# --- the nursery ---


def _import(
    written: str, is_explicit: bool, before: dict[int, str], surroundings: _Surroundings
) -> tuple[str, str | None] | None:
    """Import a module.

    Return ``None`` if it can be preloaded. Otherwise, return the reason, and the traceback of an error.
    """
    import time

    name, _, attribute = written.partition(":")
    _report(importing=name)
    _AT[:] = [name]
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
        _report(imported=name, seconds=time.monotonic() - begun)
    elif is_explicit:
        _report(left_out=name, why="it was not found", traceback=None)
    return None


def _end_if_cut_off(before: dict[int, str]) -> None:
    """If an import has closed a descriptor to the agent, disconnect and wait until the agent kills us."""
    now = _open_files()
    if any(now.get(fd) != before[fd] for fd in _AGENT):
        import signal

        # Put a pipe there, because the agent would take a missing pipe as a sign that an import has called
        # `exec`.
        os.dup2(os.pipe()[1], _AGENT[-1])
        os.close(_AGENT[0])
        while True:
            signal.pause()


def _begin_again(environ: dict[str, str], settings: dict[str, object], imports: Any) -> NoReturn:
    import json

    for remove in _temporary_folders():
        remove()
    # Also close the pipe to multiprocessing's resource tracker, a child process that then cleans up and
    # exits.
    os.closerange(_REPORT + 1, os.sysconf("SC_OPEN_MAX"))
    imports.end_children()
    for fd in _AGENT:
        os.set_inheritable(fd, True)
    _execve(sys.executable, sys.orig_argv, {**environ, _SETTINGS: json.dumps(settings)})


def _left_out_before(environ: dict[str, str]) -> set[str]:
    import json
    from itertools import pairwise

    since = environ.get(_SINCE)
    if since is None:
        return set()
    told = os.pread(_REPORT, os.fstat(_REPORT).st_size - int(since), int(since))
    records = [json.loads(line) for line in told.splitlines()]
    ended = {last["importing"] for last, record in pairwise(records) if "ended" in record}
    return ended | {record["left_out"] for record in records if "left_out" in record}


def _import_all(environ: dict[str, str]) -> _Done:
    import json
    import time

    begun, since = time.monotonic(), time.time_ns()
    settings = json.loads(environ[_SETTINGS])
    gone = _left_out_before(environ)
    steps = [step for step in settings["steps"] if step.partition(":")[0] not in gone]
    is_explicit = settings["is_explicit"]
    shielded = {"PYTHONPATH": environ["PYTHONPATH"], _PID: str(os.getpid())}
    imports = _beside("imports")
    variables = imports.Variables(shielded, _RANK_ZERO)
    surroundings = _Surroundings(settings["folders"], variables, imports)
    # The watch for random generators imports modules. If a file beside the script has the name of one, the
    # script needs that file instead.
    watch = imports.GeneratorWatch() if surroundings.beside_script(imports.NEEDED) is None else None
    reserved, captured = imports.reserve(_RESERVED), imports.Captured(_RESERVED)
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
                # Skip the later modules, too, because one may read an environment variable that the skipped
                # module would have changed.
                rest = steps[: steps.index(step)]
                why += "; later imports were left out as well, because it changes the environment"
            rest = [other for other in rest if other.partition(":")[0] != module]
            _report(left_out=module, why=why, traceback=text)
            surroundings.restore()
            captured.end()
            _begin_again(environ, {**settings, "steps": rest}, imports)
        _AT.clear()
    surroundings.note_blas()
    printed = captured.end()
    python.execv, python.execve = _execv, _execve
    variables.end()
    for fd in reserved:
        os.close(fd)
    both = {name: (untouched.get(name), os.environ.get(name)) for name in {*untouched, *os.environ}}
    _tell_ready(begun, since, surroundings)
    done = {name: change for name, change in both.items() if change[0] != change[1]}
    return printed, done, surroundings.blas, None if watch is None else watch.end()


def _tell_ready(begun: float, since: int, surroundings: _Surroundings) -> None:
    import site
    import sysconfig
    import time

    hidden = surroundings.hidden_by_us()
    if hidden:
        _report(failed=f"{hidden} is next to the script and has the name of a module that --warm needs")
        _exit(1)
    paths = sysconfig.get_paths()
    # Leave out sysconfig's `data` folder. It may be `/usr`, which may contain the user's programs, as in
    # `/usr/src`.
    library = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*library, *site.getsitepackages(), site.getusersitepackages()]
    prefixes = {path for folder in folders for path in (folder, os.path.realpath(folder))}
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    told = sorted(file for file in files if isinstance(file, str) and os.path.isabs(file))
    stamp = surroundings.imports.stamp
    _report(
        ready={
            "seconds": time.monotonic() - begun,
            "prefixes": sorted(prefixes),
            "stamps": {path: stamp(path, since) for path in told} | {path: stamp(path) for path in prefixes},
        }
    )


def _open_standard_descriptors() -> None:
    """Open missing standard descriptors on ``/dev/null``, as Rust's runtime does."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _core() -> types.ModuleType:
    from importlib.machinery import ExtensionFileLoader, ModuleSpec

    path = os.environ[_CORE]
    loader = ExtensionFileLoader("elasticrs._core", path)
    core = loader.create_module(ModuleSpec("elasticrs._core", loader, origin=path))
    loader.exec_module(core)
    return core


def _beside(name: str) -> types.ModuleType:
    """Load the module ``name`` from this file's folder, without adding it to ``sys.modules``."""
    from importlib.machinery import SourceFileLoader

    module = type(sys)(name)
    SourceFileLoader(name, os.path.join(_HERE, f"{name}.py")).exec_module(module)
    return module


def _become_worker(
    renewal: types.ModuleType,
    argv: list[bytes],
    env: list[bytes],
    arguments: list[str],
    imported: _Done,
) -> None:
    printed, done, blas, generators = imported
    renewal.last_collection(_open_files)
    renewal.main_module()
    renewal.environment(env, done)
    renewal.arguments(argv, arguments)
    renewal.streams(_standard_streams())
    renewal.seeds(_RANK_ZERO, generators)
    renewal.blas(blas)
    renewal.output(printed)


def _start_cold(argv: list[bytes], env: list[bytes], error: BaseException) -> NoReturn:
    why = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
    os.write(2, b"elasticrs: warm: this worker starts cold, because its fork failed to start: " + why + b"\n")
    _execve(_executable, argv, dict(entry.split(b"=", 1) for entry in env))


def _register_last_callback() -> Callable[[Callable[[], None]], None]:
    """Register an ``atexit`` callback that runs last. Return a function that sets what it calls."""
    import atexit

    chosen: list[Callable[[], None]] = []

    def run_last() -> None:
        for function in chosen:
            function()

    atexit.register(run_last)
    return chosen.append


def _serve() -> None:
    """Run the imports, and then fork workers on request. Returns only in the forked workers."""
    environ, arguments = dict(os.environ), list(sys.argv)
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _open_standard_descriptors()
        os.execve(sys.executable, sys.orig_argv, environ)
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    at_end = _register_last_callback()
    start = environ[_START]
    for name in (_SETTINGS, _START, _SINCE):
        os.environ.pop(name, None)
    # Set close-on-exec for these descriptors, so that the agent notices if an import executes another
    # program.
    for fd in _AGENT:
        os.set_inheritable(fd, False)
    entries = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
    if entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    else:
        del os.environ["PYTHONPATH"]
    try:
        core, renewal = _core(), _beside("renewal")
        core.warm_nursery_begin(start)
        del os.environ[_CORE]
        imported = _import_all(environ)
        import gc

        gc.freeze()
        os.close(_REPORT)
    except BaseException as error:
        where = f" (while importing {_AT[0]})" if _AT else ""
        _report(failed=f"{type(error).__name__}: {error}{where}")
        raise
    argv, env = core.warm_nursery_main(start)
    try:
        _become_worker(renewal, argv, env, arguments, imported)
    except BaseException as error:
        _start_cold(argv, env, error)
    hooked = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]
    if hooked == _HOOK:
        sys.path.insert(0, hooked)
        sys._elasticrs_at_end = at_end  # type: ignore[attr-defined]  # for the hook
    del sys.modules["sitecustomize"]


def _start() -> None:
    try:
        _serve()
    except BaseException:
        # Exit, because `site` would ignore the error and run the script in a half-initialized process.
        try:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            _exit(1)
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


if __name__ == "sitecustomize":
    _start()
