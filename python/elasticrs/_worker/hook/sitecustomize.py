"""Runs at the start of a worker's interpreter, so that an uncaught exception reaches the failure report.

Python imports a module of this name by itself; :func:`elasticrs._worker.hook_environment` puts this directory
in front of ``PYTHONPATH``. The file stands alone: it must work in any Python from 3.8 on, with elasticrs not
importable there. What it promises:

- **HOOK-1** ``sys.path``, ``PYTHONPATH`` and ``sys.modules`` are as they would be without it, before the
  user's own ``sitecustomize`` or anything else of the user's runs; so children of the worker do not run it.
- **HOOK-2** the user's ``sitecustomize`` is found, run and, when it fails, reported by ``site`` as always.
- **HOOK-3** the hook that was in ``sys.excepthook`` still prints; ours only writes the error file, and only
  in the process in which it was installed (not in one forked from it).
- **HOOK-4** what is needed only after a failure is loaded only then.
- **HOOK-5** a finder stands in ``sys.meta_path`` only where the agent watches heartbeats, and only until
  ``torch.optim.optimizer`` is imported; it finds nothing by itself.
- **HOOK-6** if the program has a Python handler for SIGUSR1 or SIGUSR2, that signal is ignored while the
  interpreter shuts down, because the interpreter then restores the default action, which would kill a worker
  that is about to exit with 0.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_WRITER = os.path.join(os.path.dirname(_HERE), "error_file.py")


def _step_aside() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [entry for entry in entries if entry != _HERE]
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    elif len(entries) == 1:
        os.environ.pop("PYTHONPATH", None)
    else:  # Named twice: the variable was there, and empty.
        os.environ["PYTHONPATH"] = ""


def undisturbed(write: "Callable[[], None]") -> None:
    """Call ``write``; Python handlers of signals that come meanwhile run when it has returned.

    Handlers run in the main thread between any two instructions, and may raise: torch's for SIGCHLD does when
    a data loader has died. A mask does not keep them away: the kernel gives the signal to another thread, and
    the interpreter still runs the handler in the main one. So each is replaced by one that notes the signal.

    Args:
        write: is only called if this is not the main thread.

    Raises:
        BaseException: what ``write`` or a handler has raised.
    """
    from _signal import getsignal, raise_signal, signal, valid_signals  # type: ignore[import-not-found]

    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
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
    """Begin again when the handler of a signal has raised in the middle; return what the last one raised."""
    raised = None
    for _ in range(100):
        try:
            action()
        except BaseException as error:  # noqa: PERF203 -- rarely more than one turn
            raised = error
        else:
            break
    return raised


def _is_end(frame: "types.FrameType") -> bool:
    """False if the program runs on: it called ``sys.excepthook`` itself, or a callback of it has raised."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name not in ("<module>", "_run_module_as_main")


def _ignore_requests() -> None:
    """Ignore SIGUSR1 and SIGUSR2 from now on if the program has a Python handler for them (HOOK-6)."""
    from _signal import SIG_IGN, SIGUSR1, SIGUSR2, getsignal, signal

    for signum in (SIGUSR1, SIGUSR2):
        if callable(getsignal(signum)):
            signal(signum, SIG_IGN)


def _install(path: str) -> None:
    import atexit
    import faulthandler
    from _thread import get_ident

    pid, main = os.getpid(), get_ident()
    notices = os.environ.get("ELASTICRS_NOTICES", "")
    previous = sys.excepthook
    recorded: BaseException | None = None

    def record(error: BaseException, is_end: bool) -> None:
        if os.getpid() == pid and not isinstance(error, KeyboardInterrupt):
            undisturbed(lambda: write(error, is_end))

    def write(error: BaseException, is_end: bool) -> None:
        nonlocal recorded
        recorded = error
        try:
            with open(_WRITER, "rb") as file:
                code = compile(file.read(), _WRITER, "exec")
            writer = {"__name__": "error_file", "__file__": _WRITER}
            exec(code, writer)
            writer["write_uncaught"](path, error)  # type: ignore[operator]
            if is_end:
                writer["give_notice"](notices, error)  # type: ignore[operator]
        except Exception as problem:
            if sys.stderr is not None:
                sys.stderr.write("elasticrs: cannot write %s: %r\n" % (path, problem))  # noqa: UP031

    def excepthook(kind: "type[BaseException]", error: BaseException, traceback: object) -> None:
        try:
            record(error, get_ident() == main and _is_end(sys._getframe()))
        finally:  # A handler of a signal may have raised.
            previous(kind, error, traceback)  # type: ignore[arg-type]

    def at_exit() -> None:
        if os.getpid() == pid:
            _ignore_requests()
        # The program may have replaced our `sys.excepthook`. The interpreter stores the exception in any
        # case.
        error = getattr(sys, "last_value", None)
        if error is not None and error is not recorded:
            record(error, is_end=True)

    sys.excepthook = excepthook
    atexit.register(at_exit)

    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        return  # Create no file next to a device such as /dev/null.
    try:
        # Use a descriptor instead of a file object, because the interpreter would close a file object at
        # exit.
        descriptor = os.open(path + ".fault", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        return  # Continue, because only the stack of a crash will be missing from the report.
    if not faulthandler.is_enabled():
        faulthandler.enable(descriptor)
    # Write the stacks of all threads on this signal, which the agent sends when a rank hangs. See
    # `stacks.py`.
    from _signal import SIG_DFL, SIGRTMIN, getsignal

    if getsignal(SIGRTMIN + 12) == SIG_DFL:
        faulthandler.register(SIGRTMIN + 12, descriptor, all_threads=True)


class _OptimizerImport:
    """Notices the import of torch's optimizers, whose steps then give heartbeats."""

    name = "torch.optim.optimizer"

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.name:
            return None
        finders: list[Any] = list(sys.meta_path)
        for finder in finders:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._follow(spec.loader)
                    return spec
        return None

    def _follow(self, loader: "Any") -> None:
        def exec_module(module: object) -> None:
            del loader.exec_module
            loader.exec_module(module)
            finders: list[Any] = sys.meta_path
            if self in finders:
                finders.remove(self)
                _beat_with_steps(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return  # A loader in C: the steps give no heartbeats, which the agent tells.


def _beat_with_steps(optimizers: object) -> None:
    try:
        from elasticrs._worker.optimizer_steps import beat_with_steps
    except ImportError:
        return  # This Python has no elasticrs. The agent tells that the rank is not watched.
    beat_with_steps(optimizers)


def _start() -> None:
    _step_aside()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if "ELASTICRS_HEARTBEAT" in os.environ and os.environ.get("ELASTICRS_AUTO_HEARTBEAT") != "0":
        # A fork of the warm nursery may have it from there.
        if _OptimizerImport.name in sys.modules:
            _beat_with_steps(sys.modules[_OptimizerImport.name])
        else:
            sys.meta_path.insert(0, _OptimizerImport())  # type: ignore[arg-type]
    del sys.modules["sitecustomize"]
    failed = True
    try:
        # Raises when the user has none; `site` takes that, like everything else, as if it came from theirs.
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401

        failed = False
    except ImportError as missing:
        failed = missing.name != "sitecustomize"
        raise
    finally:
        # With -v `site` hands the error to `sys.excepthook`, and goes on.
        if path and not (failed and sys.flags.verbose):
            _install(path)


# `@record` imports the file under another name, for the function above.
if __name__ == "sitecustomize":
    _start()
