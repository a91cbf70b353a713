"""Runs a program as a worker, with the same interface as torch's package of this name."""

from __future__ import annotations

from elasticrs.multiprocessing.subprocess_handler.handlers import get_subprocess_handler
from elasticrs.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
