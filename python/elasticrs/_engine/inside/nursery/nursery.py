"""Startup code of a warm nursery, the process that imports modules once and then forks the workers.

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

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import Any, NoReturn

    from elasticrs._engine.inside.nursery.imports import Done

_HERE = os.path.dirname(os.path.abspath(__file__))
_INSIDE = os.path.dirname(_HERE)
_HOOK = os.path.join(_INSIDE, "hook")

_CORE = "ELASTICRS_WARM_CORE"
"""Environment variable with the path of the extension module ``elasticrs._core``."""
_START = "ELASTICRS_NURSERY_START"
"""Environment variable with the start parameters. The core's ``launch.rs`` uses the same name."""

_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_SET_BLAS_THREADS = [
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")
]

_AT_FIRST = frozenset(sys.modules)
"""Modules that the interpreter had imported before this file ran."""

_exit, _execve, _executable = os._exit, os.execve, sys.executable  # Imports may replace the originals.


def _open_standard_descriptors() -> None:
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


def _load(*path: str) -> types.ModuleType:
    """Load a file of this package without adding it to ``sys.modules``."""
    from importlib.machinery import SourceFileLoader

    file = os.path.join(*path)
    module = type(sys)(os.path.basename(file).removesuffix(".py"))
    SourceFileLoader(module.__name__, file).exec_module(module)
    return module


# --- a forked worker ---


def _become_worker(
    imports: types.ModuleType, argv: list[bytes], env: list[bytes], arguments: list[str], imported: Done
) -> None:
    """Give a newly forked worker its own environment, arguments, streams and seeds. Print imports' output."""
    printed, done, blas, generators = imported
    _replace_main_module()
    _set_environment(env, done)
    _set_arguments(argv, arguments)
    _renew_streams()
    _reset_modules(imports.RANK_ZERO, generators)
    _set_blas_threads(blas)
    for fd, said in printed.items():
        stream = sys.stdout if fd == 1 else sys.stderr
        stream.buffer.write(said)
        stream.flush()


def _replace_main_module() -> None:
    """Replace the module ``__main__`` with a copy. The garbage collector ignores the original and its
    objects, because it was frozen before the fork.
    """
    main = type(sys)("__main__")
    main.__dict__.update(sys.modules["__main__"].__dict__)
    sys.modules["__main__"] = main


def _set_environment(entries: list[bytes], done: dict[str, tuple[str | None, str | None]]) -> None:
    """Set the environment to ``entries``. Apply imports' changes ``done`` (variables' old and new values)."""
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


def _set_arguments(argv: list[bytes], before: list[str]) -> None:
    told = [os.fsdecode(argument) for argument in argv]
    sys.orig_argv[:] = told
    # If an import has changed `sys.argv`, it would have done so in the worker as well.
    if sys.argv == before and len(before) > 1:
        sys.argv[1:] = told[1 - len(before) :]


def _renew_streams() -> None:
    """Reinitialize the standard streams in place, because libraries hold references to the stream objects."""
    import io

    standard: list[Any] = [sys.__stdin__, sys.__stdout__, sys.__stderr__]
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


def _reset_modules(rank_zero: dict[str, str], generators: list[Callable[[], None]] | None) -> None:
    """Seed the random generators again (``None`` if not watched), and reset other values in modules."""
    import time

    # Do not copy this dict: changed reference counts make the kernel copy memory that workers share.
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


def _set_blas_threads(assigned: dict[str, dict[str, str]]) -> None:
    """Set the thread count of each OpenBLAS library. Before the fork, it was limited to one. ``assigned``
    has, by path of the library, the variables that the script sets before it loads the library.
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


def _unfreeze_if_needed(written_files: Callable[[], set[int]], known: set[int]) -> None:
    """Unfreeze the garbage collector at exit if a file was opened after the fork: Python flushes a file when
    it collects it. With Triton, always unfreeze, because Triton warns about uncollected objects.
    """
    import gc

    if "triton._C.libtriton" in sys.modules or written_files() - known:
        gc.unfreeze()


def _start_cold(argv: list[bytes], env: list[bytes], error: BaseException) -> NoReturn:
    why = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
    os.write(2, b"elasticrs: warm: this worker starts cold, because its fork failed to start: " + why + b"\n")
    _execve(_executable, argv, dict(entry.split(b"=", 1) for entry in env))


# --- the nursery ---


def _register_last_callback() -> Callable[[Callable[[], None]], None]:
    """Register an ``atexit`` callback that runs last. Return a function that sets what it calls."""
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
    imports, fast_exit = _load(_HERE, "imports.py"), _load(_INSIDE, "fast_exit.py")
    start = environ[_START]
    for name in (imports.SETTINGS, _START, imports.SINCE):
        os.environ.pop(name, None)
    # Set close-on-exec: the agent then sees a closed connection if an import executes another program.
    for fd in imports.AGENT:
        os.set_inheritable(fd, False)
    entries = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
    if entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    else:
        del os.environ["PYTHONPATH"]
    try:
        core = _core()
        core.warm_nursery_begin(start)
        del os.environ[_CORE]
        imported = imports.import_all(environ, _AT_FIRST)
        import gc

        gc.freeze()
        os.close(imports.REPORT)
    except BaseException as error:
        where = f" (while importing {imports.CURRENT[0]})" if imports.CURRENT else ""
        imports.report(failed=f"{type(error).__name__}: {error}{where}")
        raise
    argv, env = core.warm_nursery_main(start)
    try:
        atexit.register(_unfreeze_if_needed, fast_exit.written_files, fast_exit.written_files())
        _become_worker(imports, argv, env, arguments, imported)
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
