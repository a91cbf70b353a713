"""Substitution of macros such as ``${local_rank}`` in workers' arguments."""

from __future__ import annotations

from string import Template
from typing import Any


class macros:  # noqa: N801 -- torch's name
    """Macros that are substituted in workers' arguments."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """Return the arguments with ``${local_rank}`` replaced. Leave other macros, and arguments that are
        not strings, unchanged.

        Args:
            args: arguments of a worker.
            local_rank: local rank of that worker.
        """
        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]
