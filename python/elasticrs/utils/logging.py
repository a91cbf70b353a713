"""Create loggers whose level comes from the environment variable ``LOGLEVEL``."""

from __future__ import annotations

import inspect
import logging
import os
import warnings

from elasticrs.utils.log_level import get_log_level


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger (by default, the calling module's) with the level ``LOGLEVEL``, or else ``WARNING``.

    Raises:
        ValueError: ``LOGLEVEL`` is not a valid level.
    """
    logger = logging.getLogger(name or _derive_module_name(depth=2))
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger


def _derive_module_name(depth: int = 1) -> str | None:
    """Return the module or file name of the caller ``depth`` calls up (1: direct). Warn if it is unknown."""
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = None if frame is None else frame.f_back
    if frame is None:
        warnings.warn(f"there is no caller {depth} calls up to name a logger", RuntimeWarning, stacklevel=2)
        return None
    module = inspect.getmodule(frame)
    if module is not None:
        return module.__name__
    return os.path.splitext(os.path.basename(frame.f_code.co_filename))[0]
