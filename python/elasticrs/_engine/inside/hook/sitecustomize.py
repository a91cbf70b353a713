"""Runs at the start of a worker's interpreter, so that uncaught exceptions appear in the failure report.

:func:`.hook_environment` puts this directory first in ``PYTHONPATH``. This file must work in any Python from
3.8 on, even if elasticrs cannot be imported there. It guarantees:

- **HOOK-1** ``sys.path``, ``PYTHONPATH`` and ``sys.modules`` are restored before any user code runs, so
  children of the worker do not run this hook.
- **HOOK-2** ``site`` runs the user's ``sitecustomize``, and reports its errors, as without this hook.
- **HOOK-3** the previous ``sys.excepthook`` still prints the exception. The new one only writes the error
  file, and only in the process in which it was installed, not in forked children.
- **HOOK-4** modules that are needed only after a failure are imported only then.
- **HOOK-5** this hook adds a finder to ``sys.meta_path``, which delegates to the other finders. It waits for
  the import of ``torch.optim.optimizer``, to count training steps, and with ``--keep`` for the imports of
  the modules with the ``Trainer`` classes of Lightning and transformers. It is removed after these imports.
- **HOOK-6** SIGUSR1 and SIGUSR2 are ignored during shutdown if the program handles them, because the
  interpreter restores the default action, which would kill a worker that is about to exit with 0.
- **HOOK-7** a program that an uncaught exception has ended exits after its ``atexit`` callbacks, without the
  teardown of its interpreter (``fast_exit.py``). ``ELASTICRS_FAST_EXIT=0`` disables this.
- **HOOK-8** a program that ``sys.exit`` has ended with a code other than 0 counts as failed. A text, or code
  2 of a command-line parser, is recorded. A ``SystemExit`` that is caught or raised otherwise is ignored.
"""

import os
import sys
import time
from _thread import get_native_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import Any, NoReturn


_HERE = os.path.dirname(os.path.abspath(__file__))
_WRITER, _FAST_EXIT, _BOUNDARY = [
    os.path.join(os.path.dirname(_HERE), name) for name in ("error_file.py", "fast_exit.py", "boundary.py")
]

_TRAINERS = (
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
    "transformers.trainer",
)


def _step_aside() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [entry for entry in entries if entry != _HERE]
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    elif len(entries) == 1:
        os.environ.pop("PYTHONPATH", None)
    else:  # The agent adds this folder twice if the user's PYTHONPATH is set but empty.
        os.environ["PYTHONPATH"] = ""


def _is_main_thread() -> bool:
    return get_native_id() == os.getpid()


def undisturbed(write: "Callable[[], None]") -> None:
    """Call ``write``, and run the program's signal handlers only afterwards, because they may raise
    exceptions. Blocking the signals would not help: another thread may receive a signal, and Python still
    runs the handler in the main thread.
    """
    from _signal import (  # type: ignore[import-not-found]
        getsignal,
        raise_signal,
        signal,
        valid_signals,
    )

    if not _is_main_thread():
        write()
        return
    came: set[int] = set()
    handlers: dict[int, Callable[..., object]] = {}

    def note(signum: int, _frame: object) -> None:
        came.add(signum)

    def hold() -> None:
        for signum in valid_signals():
            handler = getsignal(signum)
            if callable(handler) and handler is not note:
                handlers[signum] = handler
                signal(signum, note)

    def release() -> None:
        for signum, handler in handlers.items():
            if getsignal(signum) is note:
                signal(signum, handler)

    def deliver() -> None:
        try:
            if came:
                raise_signal(came.pop())
        finally:
            if came:
                deliver()

    raised = _despite_handlers(hold)
    try:
        write()
    finally:
        raised = _despite_handlers(release) or raised
        deliver()
    if raised is not None:
        raise raised


def _despite_handlers(action: "Callable[[], None]") -> "BaseException | None":
    """Call ``action`` until no signal handler raises meanwhile. Return the last exception of a handler."""
    raised = None
    for _ in range(100):
        try:
            action()
        except BaseException as error:  # noqa: PERF203 -- rarely more than one iteration
            raised = error
        else:
            break
    return raised


def _is_end(frame: "types.FrameType") -> bool:
    """Return true if no frame of the program is left, so that the uncaught exception ends the program."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name not in ("<module>", "_run_module_as_main")


def _is_of_program(error: BaseException) -> bool:
    """Return true if the exception has ended the main module. An exception in a callback does not do so."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_globals
    is_main = code.co_name == "<module>" and names is sys.modules["__main__"].__dict__
    return is_main or code.co_name == "_run_module_as_main"


def _watch_exits(ended: "Callable[[Any], None]") -> None:
    """Replace ``sys.exit``, so that ``ended`` is called when a call of it has ended the program (HOOK-8). The
    interpreter calls no hook for a ``SystemExit``. Therefore, the new ``sys.exit`` makes the exit code an
    object with a finalizer. The exception has ended the program, instead of being caught, if no frame of the
    program is left when the finalizer runs.
    """
    real, is_collecting = sys.exit, False

    def note(phase: str, _details: object) -> None:
        nonlocal is_collecting
        is_collecting = phase == "start"

    def drop(code: object) -> None:
        # Ignore calls by the garbage collector, which may delete a caught exception while no frame of the
        # program runs.
        if sys._getframe(1).f_back is None and not is_collecting:
            ended(code)

    def with_finalizer(base: "Any") -> "Any":
        class ExitCode(base):  # type: ignore[misc]
            def __del__(self) -> None:
                drop(self)

            def __reduce__(self) -> "tuple[Any, ...]":
                return base, (base(self),)

        return ExitCode

    kinds = {int: with_finalizer(int), str: with_finalizer(str)}

    def leave(*status: object) -> "NoReturn":
        try:
            real(*status)  # type: ignore[arg-type]
        except SystemExit as error:
            kind = kinds.get(type(error.code))
            if kind is not None and _exit_status(error.code) and not _is_end(sys._getframe()):
                import gc

                if note not in gc.callbacks:
                    gc.callbacks.append(note)
                context = error.__context__
                code = kind(error.code)
                code.origin = "own" if context is None else _load(_WRITER)["origin"](context)
                caller = sys._getframe(1).f_globals.get("__name__")
                code.is_recorded = kind is kinds[str] or (code == 2 and caller in _load(_WRITER)["PARSERS"])
                error.code = code
                del code  # Otherwise, the traceback would keep the code alive.
            raise

    leave.__doc__, leave.__module__ = real.__doc__, real.__module__
    leave.__name__ = leave.__qualname__ = real.__name__
    sys.exit = leave


def _leave_out_boundary(traceback: "types.TracebackType | None") -> None:
    """Remove from a traceback the calls of functions in ``boundary.py``, in which this worker waited for a
    signal and ran the program's handler. Without them, the traceback looks as if the signal had interrupted
    a line of the program.
    """
    while traceback is not None and (following := traceback.tb_next) is not None:
        if following.tb_frame.f_code.co_filename == _BOUNDARY:
            traceback.tb_next = following.tb_next
        else:
            traceback = following


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF


def _load(path: str) -> "dict[str, Any]":
    """Execute a file, and return the names that it defines. Add no module to ``sys.modules``."""
    from _frozen_importlib_external import SourceFileLoader

    name = os.path.basename(path)[:-3]
    names: dict[str, Any] = {"__name__": name, "__file__": path}
    code: Any = SourceFileLoader(name, path).get_code(name)
    exec(code, names)
    return names


def _ignore_requests() -> None:
    """Ignore SIGUSR1 and SIGUSR2 from now on, if the program handles them in Python (HOOK-6)."""
    from _signal import SIG_IGN, SIGUSR1, SIGUSR2, getsignal, signal

    for signum in (SIGUSR1, SIGUSR2):
        if callable(getsignal(signum)):
            signal(signum, SIG_IGN)


class _Failure:
    """Records the failure of this process's program. ``status`` is 0 until the program has failed."""

    def __init__(self, path: str) -> None:
        self._path, self._notices = path, os.environ.get("ELASTICRS_NOTICES", "")
        self._pid = os.getpid()
        self._previous = sys.excepthook
        self._recorded: BaseException | None = None
        self._is_over = False
        self.status = 0

    def excepthook(
        self, kind: "type[BaseException]", error: BaseException, traceback: "types.TracebackType | None"
    ) -> None:
        _leave_out_boundary(traceback)
        try:
            self._record(error, self._is_main() and _is_end(sys._getframe()))
        finally:  # Print the exception even if a signal handler raised.
            self._previous(kind, error, traceback)

    def exited(self, code: "Any") -> None:
        if os.getpid() == self._pid and self._is_main() and not self._is_over:
            self.status = _exit_status(code)
            self._write(self._write_exit, code, time.monotonic_ns())
            keep = sys.modules.get("elasticrs._engine.inside.keep")
            if keep is not None:
                keep.keep_own()
            self._end("keep_operators")

    def at_exit(self) -> None:
        if os.getpid() == self._pid:
            _ignore_requests()
        # The program may have replaced our `sys.excepthook`, but the interpreter always sets `last_value`.
        error = getattr(sys, "last_value", None)
        if error is not None and error is not self._recorded:
            self._record(error, _is_of_program(error))

    def at_end(self) -> None:
        """Exit immediately if the program has failed. Called after all other ``atexit`` callbacks."""
        self._is_over = True
        if self.status and os.getpid() == self._pid:
            self._end("leave", self.status)

    def _end(self, action: str, *arguments: object) -> None:
        fast_exit = _load(_FAST_EXIT)
        if fast_exit["is_enabled"]():
            fast_exit[action](*arguments)

    def _is_main(self) -> bool:
        return _is_main_thread() and not sys.flags.inspect

    def _record(self, error: BaseException, is_end: bool) -> None:
        if os.getpid() == self._pid and not isinstance(error, KeyboardInterrupt):
            self._recorded, self.status = error, int(is_end)
            self._write(self._write_error, error, time.monotonic_ns(), is_end)
            if is_end:
                if "elasticrs._engine.inside.flight" in sys.modules:
                    _load(_WRITER)["keep_flight_record"](error)
                self._end("keep_operators")

    def _write(self, action: "Callable[..., None]", *facts: object) -> None:
        def write() -> None:
            try:
                action(_load(_WRITER), *facts)
            except Exception as problem:
                if sys.stderr is not None:
                    sys.stderr.write(f"elasticrs: cannot write {self._path}: {problem!r}\n")

        undisturbed(write)

    def _write_error(self, writer: "dict[str, Any]", error: BaseException, at_ns: int, is_end: bool) -> None:
        try:
            # Notify the agent first, because it stops the other ranks when it receives the notice.
            if is_end:
                writer["give_notice"](self._notices, error, at_ns)
        finally:
            writer["write_uncaught"](self._path, error, at_ns)

    def _write_exit(self, writer: "dict[str, Any]", code: "Any", at_ns: int) -> None:
        writer["give_notice_of_exit"](self._notices, str(code), code.origin, at_ns)
        if code.is_recorded:
            error = SystemExit(str(code) if isinstance(code, str) else int(code))
            writer["write_uncaught"](self._path, error, at_ns)


def _install(path: str) -> None:
    import atexit

    failure = _Failure(path)
    sys.excepthook = failure.excepthook
    _watch_exits(failure.exited)
    # Callbacks run in reverse order, and `at_end` must run last. If this worker is a fork of a nursery (the
    # process that imports modules), these modules have registered callbacks already. So the nursery has,
    # before its imports, registered a callback that calls `at_end`.
    sys.__dict__.pop("_elasticrs_at_end", atexit.register)(failure.at_end)
    atexit.register(failure.at_exit)
    descriptor = keep_stacks(path)
    if descriptor is not None:
        import faulthandler

        if not faulthandler.is_enabled():
            faulthandler.enable(descriptor)


def keep_stacks(path: str) -> "int | None":
    """Open a file next to the error file ``path``, for the stacks of a crash or a hang. The agent sends a
    real-time signal to a hung worker, on which :mod:`faulthandler` writes the stacks of all threads to the
    file. Return the file's descriptor; ``None`` if the file could not be created.
    """
    import faulthandler
    from _signal import SIG_DFL, SIGRTMIN, getsignal

    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        return None  # The error file is a device such as /dev/null, so create no file next to it.
    try:
        # Use a file descriptor, because the interpreter closes file objects at exit.
        descriptor = os.open(path + ".fault", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        return None  # Only the stacks of a crash or a hang are missing from the report.
    if getsignal(SIGRTMIN + 12) == SIG_DFL:
        faulthandler.register(SIGRTMIN + 12, descriptor, all_threads=True)
    return descriptor


class _Imports:
    """Import finder that waits for the imports of some modules. ``actions`` has a function for the name of
    each of these modules, which is called with the module after its import.
    """

    def __init__(self, actions: "dict[str, Callable[[Any], None]]") -> None:
        self._actions = actions

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in self._actions:
            return None
        finders: list[Any] = list(sys.meta_path)
        for finder in finders:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._follow(name, spec.loader)
                    return spec
        return None

    def _follow(self, name: str, loader: "Any") -> None:
        def exec_module(module: object) -> None:
            del loader.exec_module
            loader.exec_module(module)
            finders: list[Any] = sys.meta_path
            action = self._actions.pop(name, None)
            if action is not None:
                if not self._actions and self in finders:
                    finders.remove(self)
                action(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return  # A loader in C. The agent reports that the rank is not watched for hangs.


def _beat_with_steps(optimizers: object) -> None:
    try:
        from elasticrs._engine.inside.heartbeats import beat_with_steps
    except ImportError:
        return  # This Python lacks elasticrs. The agent then reports that the rank is not watched for hangs.
    beat_with_steps(optimizers)


def _keep_framework(module: "Any") -> None:
    try:
        from elasticrs._engine.inside.keep.frameworks import patch
    except ImportError:
        return  # This Python lacks elasticrs, so the training state is not kept. The agent says so.
    patch(module)


def follow_imports() -> None:
    """Have this hook's functions called with some modules after the imports of these modules. If this worker
    was forked from a process with preloaded modules, and they are among these, call the functions at once.
    """
    actions: dict[str, Callable[[Any], None]] = {}
    if "ELASTICRS_KEEP" in os.environ or "ELASTICRS_HEARTBEAT" in os.environ:
        actions["torch.optim.optimizer"] = _beat_with_steps
    if "ELASTICRS_KEEP_FRAMEWORKS" in os.environ:
        for name in _TRAINERS:
            actions[name] = _keep_framework
    for name in [name for name in actions if name in sys.modules]:
        actions.pop(name)(sys.modules[name])
    if actions:
        sys.meta_path.insert(0, _Imports(actions))  # type: ignore[arg-type]


def _start() -> None:
    _step_aside()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    follow_imports()
    del sys.modules["sitecustomize"]
    failed = True
    try:
        # `site` handles all exceptions from this import, also the `ImportError` if there is no such module.
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401

        failed = False
    except ImportError as missing:
        failed = missing.name != "sitecustomize"
        raise
    finally:
        # With `python -v`, `site` passes an error in the user's `sitecustomize` to `sys.excepthook`, although
        # the program then runs. Our hook would record the error as a failure.
        if path and not (failed and sys.flags.verbose):
            _install(path)


# Do nothing if `@record` or the heartbeats have imported this file under another name, to call its functions.
if __name__ == "sitecustomize":
    _start()
