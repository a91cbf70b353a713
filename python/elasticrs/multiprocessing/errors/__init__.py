"""Failures of workers, with torch's names, file format and report layout.

A worker writes its exception to an error file, from which the agent makes a :class:`ProcessFailure` and a
:class:`ChildFailedError`. Workers import this module, so it imports nothing that only failures need.
"""

from __future__ import annotations

from functools import wraps

from elasticrs._engine.failures import ChildFailedError
from elasticrs._engine.failures.failure import NOT_AVAILABLE, ProcessFailure
from elasticrs.multiprocessing.errors.error_handler import ErrorHandler
from elasticrs.multiprocessing.errors.handlers import get_error_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    _R = TypeVar("_R")
    _P = ParamSpec("_P")

__all__ = [
    "ChildFailedError",
    "ErrorHandler",
    "ProcessFailure",
    "get_error_handler",
    "record",
]


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Decorate a worker's main function, so that ``error_handler`` writes its exceptions to the error file.

    Programs need this decorator only to use an error handler of their own. As in torch, the decorated
    function returns ``None`` after ``SystemExit(0)``, and exceptions that are no ``Exception`` are not
    recorded. After a :class:`ChildFailedError`, the error file of its root cause is copied.
    """
    handler = error_handler or get_error_handler()

    @wraps(fn)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        handler.set_entrypoint_fn_name(getattr(fn, "__qualname__", None))
        handler.initialize()
        try:
            result = fn(*args, **kwargs)
        except SystemExit as exit_:
            if exit_.code == 0:
                return None
            raise
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            if failure.error_file != NOT_AVAILABLE:
                handler.dump_error_file(failure.error_file, failure.exitcode or 0)
            raise
        except Exception as error:
            handler.record_exception(error)
            raise
        # Record the success outside of the `try`, because an error in this call is no failure of `fn`.
        handler.record_success()
        return result

    return wrapper
