"""Who observes a job, from its settings. Imported only where something is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrs.config import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs.agent.health_check_server import HealthCheckServer
    from elasticrs.agent.observer import Observer
    from elasticrs.config import JobConfig, ObserveSettings


def make_observers(
    job: JobConfig,
    settings: ObserveSettings,
    say: Callable[[str], None],
    server: HealthCheckServer | None = None,
    *,
    tells_end: bool = True,
) -> Sequence[Observer]:
    """Return the observers of a job of the command line, or of one of the launcher's API.

    Args:
        job: the job.
        settings: what is asked for.
        say: tells the user a line.
        server: of the caller, open already; one is made where the settings ask for it.
        tells_end: the end of the agent is an event of theirs; otherwise it is the caller's.

    Raises:
        UsageError: no such destination of events, or one that cannot be opened.
    """
    observers: list[Observer] = []
    if settings.event_log_handler != "null":
        check_destination(settings.event_log_handler)
        from elasticrs.agent.job_events import EventRecorder

        observers.append(EventRecorder(job, settings, tells_end=tells_end))
    if server is None and settings.health_port is not None:
        server = open_server(settings, say)
    if settings.has_metrics or server is not None:
        from elasticrs.agent.job_metrics import MetricRecorder

        observers.append(MetricRecorder(job))
    # Behind the metrics, which it shows: the last ones come at the end.
    return [*observers, *_health(job, server, say, is_asked=True)]


def make_observers_of_hooks(
    job: JobConfig, settings: ObserveSettings, say: Callable[[str], None], server: HealthCheckServer | None
) -> Sequence[Observer]:
    """The same of an agent whose hooks decide, and record what torch's do.

    ``server`` is started already: its own thread answers for the agent, as hooks may wait for long.
    """
    observers: list[Observer] = []
    if settings.event_log_handler != "null":
        from elasticrs.agent.job_events import WatchdogRecorder

        observers.append(WatchdogRecorder(job, settings))
    return [*observers, *_health(job, server, say, is_asked=False)]


def _health(
    job: JobConfig, server: HealthCheckServer | None, say: Callable[[str], None], *, is_asked: bool
) -> Sequence[Observer]:
    if server is None:
        return ()
    from elasticrs.agent.job_health import HealthObserver

    return (HealthObserver(job, server, say, is_asked=is_asked),)


def open_server(settings: ObserveSettings, say: Callable[[str], None]) -> HealthCheckServer | None:
    """Return the health check server that is asked for, open; ``None`` when it cannot be had, which the user
    is told.
    """
    import time

    from elasticrs.agent.health_check_server import HealthCheckServer

    server = HealthCheckServer(
        time.time, settings.health_port or 0, settings.health_timeout, settings.health_host
    )
    try:
        server.open()
    except OSError as error:
        # A job is worth more than being asked how it is.
        say(f"no health check server: {error.strerror or error}; the job goes on without it")
        return None
    say(f"health check server on http://{server.address}")
    return server


def check_destination(name: str) -> None:
    """Check that events can go there.

    Raises:
        UsageError: there is no such destination, or it cannot be opened.
    """
    from elasticrs.events.handlers import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError as error:
        raise UsageError(f"--event-log-handler: {error}") from None
    except OSError as error:
        raise UsageError(
            f"--event-log-handler: got {name!r}, which cannot be opened: {error.strerror}"
        ) from None
    except Exception as error:
        raise UsageError(f"--event-log-handler: {name!r} failed: {error!r}") from error
