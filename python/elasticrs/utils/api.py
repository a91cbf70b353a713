"""Torch's ``macros``, and a function for required environment variables."""

from __future__ import annotations

import os
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]


def get_env_variable_or_raise(env_name: str) -> str:
    """Return the value of an environment variable.

    Raises:
        ValueError: the variable is not set.
    """
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """See :func:`elasticrs.utils.distributed.get_socket_with_port`."""
    from elasticrs.utils.distributed import get_socket_with_port as bound

    return bound()


class macros:  # noqa: N801 -- torch's name
    """Macros in the arguments of workers."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Return the arguments with ``${local_rank}`` replaced. Other macros, and arguments that are not
        text, are unchanged.

        Args:
            args: arguments of a worker.
            local_rank: local rank of that worker.
        """
        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]
