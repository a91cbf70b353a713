"""Records what happens in a job: messages for the user, events, metrics, health, and the job's report.

This module creates the observers (objects that the agent calls for each event) that a job needs.
"""

from __future__ import annotations

from elasticrs._engine import public
from elasticrs._engine.job.config import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
    from elasticrs._engine.supervise.observe.observer import Observer


def make_observers(
    job: JobSpec,
    say: Callable[[str], None],
    server: HealthCheckServer | None = None,
    *,
    tells_end: bool = True,
    has_hooks: bool = False,
) -> Sequence[Observer]:
    """Return the observers that record a job's events, metrics and health. Raise ``UsageError`` if the
    handler for events cannot be opened. If ``server`` is ``None``, a server for health checks is created if
    the job requests one. Without ``tells_end``, the caller records the end of the agent. ``has_hooks`` is
    true for torch's agent class. Its methods record torch's events and metrics, and may block for a long
    time, so a thread of ``server`` answers the health requests.
    """
    observers: list[Observer] = []
    if job.event_log_handler != "null":
        from elasticrs._engine.supervise.observe.recorder import EventRecorder, WatchdogRecorder

        if has_hooks:
            observers.append(WatchdogRecorder(job))
        else:
            check_destination(job.event_log_handler)
            observers.append(EventRecorder(job, tells_end=tells_end))
    if server is None and job.health_check_port is not None and not has_hooks:
        server = open_server(job, say)
    if (job.has_metrics or server is not None) and not has_hooks:
        from elasticrs._engine.supervise.observe.recorder import MetricRecorder

        observers.append(MetricRecorder(job))
    if server is not None:
        from elasticrs._engine.supervise.observe.job_health import HealthObserver

        # The health observer closes the server, so the recorder of metrics must come before it.
        observers.append(HealthObserver(job, server, say, is_asked=not has_hooks))
    return observers


def open_server(job: JobSpec, say: Callable[[str], None]) -> HealthCheckServer | None:
    """Open the configured health check server's port. If that fails, print why and return ``None``."""
    import time

    from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer

    port, host = job.health_check_port or 0, job.health_check_host
    server = HealthCheckServer(time.time, port, job.health_check_timeout, host)
    try:
        server.open()
    except OSError as error:
        # Continue, because the job matters more than its health checks.
        say(f"no health check server: {error.strerror or error}; the job continues without it")
        return None
    say(f"health check server on http://{server.address}")
    return server


def check_destination(name: str) -> None:
    """Raise ``UsageError`` if the handler for events does not exist or cannot be opened."""
    try:
        public("events.get_logging_handler")(name)
    except KeyError as error:
        raise UsageError(f"--event-log-handler: {error}") from None
    except OSError as error:
        raise UsageError(
            f"--event-log-handler: got {name!r}, which cannot be opened: {error.strerror}"
        ) from None
    except Exception as error:
        raise UsageError(f"--event-log-handler: {name!r} failed: {error!r}") from error
