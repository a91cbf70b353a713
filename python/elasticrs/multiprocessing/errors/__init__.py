"""How a failure travels from a worker to the agent, and from there to whoever started the agent.

A worker writes its exception to an error file: through the hook of :mod:`elasticrs._worker`, or because its
function is decorated with :func:`record`. The agent makes a :class:`ProcessFailure` of it, adds what the
kernel knows, and raises :class:`ChildFailedError`, whose text is the failure report. Names, file format and
report layout are torch's.

Workers import this module: it loads nothing that is needed only after a failure.
"""

from __future__ import annotations

from functools import wraps

from elasticrs.multiprocessing.errors.error_handler import ErrorHandler
from elasticrs.multiprocessing.errors.failure import NOT_AVAILABLE, ProcessFailure
from elasticrs.multiprocessing.errors.handlers import get_error_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    _R = TypeVar("_R")
    _P = ParamSpec("_P")

__all__ = [
    "ChildFailedError",
    "ErrorHandler",
    "ProcessFailure",
    "get_error_handler",
    "record",
]


class ChildFailedError(Exception):
    """Workers have failed; the text is the report.

    Under :func:`record` it passes up without a traceback of its own in the error file: the worker's takes its
    place.

    Args:
        name: what was run.
        failures: by global rank, those included that ended because elasticrs stopped them.

    Raises:
        AssertionError: no failures (as in torch).
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        self.name = name
        self.failures = failures
        if not failures:
            raise AssertionError("a ChildFailedError needs a failure")
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the report as its only argument.
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The global rank and the failure of the root cause; see :mod:`.root_cause` for the rule."""
        from elasticrs.multiprocessing.errors.root_cause import root_cause

        rank = root_cause(self.failures)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The report. The arguments draw its lines."""
        from elasticrs.multiprocessing.errors.report import format_report

        return format_report(self.name, self.failures, boarder_delim, section_delim)


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Decorate the main function of a worker, so that its exceptions are written to the error file.

    elasticrs needs this only for what its hook cannot see: a worker that is no script but a function, or a
    handler of one's own. As in torch ``SystemExit(0)`` becomes a return of ``None``, every other exception
    that is no ``Exception`` passes unrecorded, and of a :class:`ChildFailedError` the error file of the root
    cause is handed on.

    Args:
        fn: the function.
        error_handler: writes the file; :func:`get_error_handler` makes one by default.
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
        # Outside of the `try`: an error of this hook is none of the function's.
        handler.record_success()
        return result

    return wrapper
