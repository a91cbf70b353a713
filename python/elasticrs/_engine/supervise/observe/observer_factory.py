"""Creates the observers of a job from its settings. Imported only if at least one observer is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrs._engine import public
from elasticrs._engine.job.config import UsageError

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
) -> Sequence[Observer]:
    """Return the observers of a job that the command line or the launcher's API has started.

    Args:
        job: configuration of the job.
        say: prints a line for the user.
        server: open health check server of the caller. If it is ``None``, a server is created if the job
            requests one.
        tells_end: true if the observers record the end of the agent; false if the caller records it.

    Raises:
        UsageError: the handler for events does not exist or cannot be opened.
    """
    observers: list[Observer] = []
    if job.event_log_handler != "null":
        check_destination(job.event_log_handler)
        from elasticrs._engine.supervise.observe.job_events import EventRecorder

        observers.append(EventRecorder(job, tells_end=tells_end))
    if server is None and job.health_check_port is not None:
        server = open_server(job, say)
    if job.has_metrics or server is not None:
        from elasticrs._engine.supervise.observe.job_metrics import MetricRecorder

        observers.append(MetricRecorder(job))
    # Put the health observer last, because it closes the health check server when the job ends. The metrics
    # observer must record the final metrics before the server is closed.
    return [*observers, *_health(job, server, say, is_asked=True)]


def make_observers_of_hooks(
    job: JobSpec, say: Callable[[str], None], server: HealthCheckServer | None
) -> Sequence[Observer]:
    """Return the observers of an agent that uses torch's hooks. The observers do not record torch's events
    and metrics, because the hooks already do so.

    ``server`` has already been started. A thread of the server answers the health requests, because hooks may
    block for a long time.
    """
    observers: list[Observer] = []
    if job.event_log_handler != "null":
        from elasticrs._engine.supervise.observe.job_events import WatchdogRecorder

        observers.append(WatchdogRecorder(job))
    return [*observers, *_health(job, server, say, is_asked=False)]


def _health(
    job: JobSpec, server: HealthCheckServer | None, say: Callable[[str], None], *, is_asked: bool
) -> Sequence[Observer]:
    if server is None:
        return ()
    from elasticrs._engine.supervise.observe.job_health import HealthObserver

    return (HealthObserver(job, server, say, is_asked=is_asked),)


def open_server(job: JobSpec, say: Callable[[str], None]) -> HealthCheckServer | None:
    """Create the configured health check server and open its port. If that fails, print why and return
    ``None``.
    """
    import time

    from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer

    port, host = job.health_check_port or 0, job.health_check_host
    server = HealthCheckServer(time.time, port, job.health_check_timeout, host)
    try:
        server.open()
    except OSError as error:
        # Continue without a health check server, because the job matters more than its health checks.
        say(f"no health check server: {error.strerror or error}; the job continues without it")
        return None
    say(f"health check server on http://{server.address}")
    return server


def check_destination(name: str) -> None:
    """Check that events can be written to the handler with this name.

    Raises:
        UsageError: the handler does not exist or cannot be opened.
    """
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
