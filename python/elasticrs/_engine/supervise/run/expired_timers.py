"""Calls torch's hook for expired timers."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs import _core


def log_expired(run_id: str, event: _core.TimerExpired) -> None:
    """Call the hook ``log_debug_info_for_expired_timers`` for a timer, as torch's timer server does. The
    program may have replaced the hook.

    Args:
        run_id: identifier of the job.
        event: the expired timer.
    """
    from elasticrs.timer import file_based_local_timer as timers

    request = timers.FileTimerRequest(event.pid, event.scope, event.deadline, event.signal or 0)
    try:
        timers.log_debug_info_for_expired_timers(run_id, {event.pid: [request.to_json()]})
    except Exception:
        import logging

        logging.getLogger("elasticrs.agent").exception("log_debug_info_for_expired_timers failed")
