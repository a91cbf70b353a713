"""Where the error handler comes from; the place to put another one."""

from elasticrs.multiprocessing.errors.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """The handler that ``@record`` uses when it is given none."""
    return ErrorHandler()
