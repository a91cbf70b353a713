"""Loggers whose level is that of the variable ``LOGLEVEL``."""

from __future__ import annotations

import inspect
import logging
import os
import warnings

from elasticrs.utils.log_level import get_log_level


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger, set to the level of ``LOGLEVEL``, else ``WARNING``.

    Args:
        name: its name; that of the calling module when ``None``.

    Raises:
        ValueError: ``LOGLEVEL`` is no level.
    """
    logger = logging.getLogger(name or _derive_module_name(depth=2))
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger


def _derive_module_name(depth: int = 1) -> str | None:
    """The name of a calling module; without one, the name of its file. Warns when there is no such caller.

    Args:
        depth: 1 for the caller, 2 for the caller's.
    """
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
