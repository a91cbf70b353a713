"""Functions that tests run in separate processes."""

import multiprocessing
import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any, NoReturn

from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException, start_processes


class UnpicklableError(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("not to be pickled")


def repeat(text: bytes, times: int) -> bytes:
    return text * times


def look_around(text: str) -> tuple[str, bool, int | None, str]:
    """Print a text. Return the variable ``NAME``, whether SIGTERM has its default effect, and the parent."""
    print(text, flush=True)
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join(0)
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return os.environ["NAME"], is_default, parent.pid, "alive" if parent.is_alive() else "gone"


def with_descendants(fails: bool, pipe: int | None = None) -> None:
    """Start two children, one of them in a new session. Then raise an exception, or wait forever."""
    children = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True)]
    if pipe is not None:
        os.write(
            pipe, " ".join(str(pid) for pid in (os.getpid(), *(c.pid for c in children))).encode() + b"\n"
        )
    if fails:
        raise UnpicklableError("boom")
    while True:
        signal.pause()


def ignore_term(marker: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(marker, "w", encoding="utf-8"):
        pass
    while True:
        signal.pause()


def wait_for_signal() -> None:
    while True:
        signal.pause()


def leave_silently() -> None:
    os._exit(0)


def unloadable() -> Any:
    return lambda: time


def be_signalled_beside_a_context() -> str:
    """Return how SIGTERM reaches a worker that has started processes itself."""
    context = start_processes("inner", "sleep", {0: ("1000",)}, {0: {}}, DefaultLogsSpecs(os.devnull))
    try:
        signal.raise_signal(signal.SIGTERM)
    except SignalException:
        return "raised"
    finally:
        with suppress(SignalException):
            context.close()
    return "lost"
