"""Log function for expired timers. Programs may replace the function."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["log_debug_info_for_expired_timers"]


def log_debug_info_for_expired_timers(run_id: str, expired_timers: Mapping[int, Sequence[str]]) -> None:
    """Log the expired timers (requests in JSON, by pid) of a job, if any, as torch does."""
    if expired_timers:
        from logging import getLogger

        getLogger(__name__).info("timers expired in run %s: %s", run_id, dict(expired_timers))
