"""Factory for the default error handler. A program can replace :func:`get_error_handler` to use its own
handler.
"""

from elasticrs.multiprocessing.errors.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """Return the default error handler of ``@record``."""
    return ErrorHandler()
