"""Default error handler. Programs may patch ``elasticrs.multiprocessing.errors.get_error_handler``."""

from elasticrs.multiprocessing.errors.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """Return the default error handler of ``@record``."""
    return ErrorHandler()
