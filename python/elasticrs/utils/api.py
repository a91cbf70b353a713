"""Helpers named as in torch: ``macros``, and functions for required environment variables and free ports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elasticrs._engine.workers.process import macros

if TYPE_CHECKING:
    import socket

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]


def get_env_variable_or_raise(env_name: str) -> str:
    """Return the value of an environment variable. Raise ``ValueError`` if it is not set."""
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """Return a socket that reserves a free port; see :mod:`elasticrs.utils.distributed`."""
    from elasticrs.utils.distributed import get_socket_with_port as bound

    return bound()
