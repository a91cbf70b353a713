"""Runs a program as a worker. The class and the function have the same names as in torch."""

from __future__ import annotations

from elasticrs.multiprocessing.subprocess_handler.handlers import get_subprocess_handler
from elasticrs.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
