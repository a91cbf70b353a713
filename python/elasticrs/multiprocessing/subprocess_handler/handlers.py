"""Factory for :class:`SubprocessHandler`, with the same name as in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

if TYPE_CHECKING:
    from elasticrs._engine.gpus.numa import NumaOptions

__all__ = ["get_subprocess_handler"]


def get_subprocess_handler(
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str | None,
    stderr: str | None,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    """Start a program. See :class:`SubprocessHandler` for the arguments."""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)


_OWN = get_subprocess_handler
"""The original function, to detect that a program has replaced it."""
