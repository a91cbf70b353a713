"""Who observes a job, from its settings. Imported only where something is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrs.config import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.agent.observer import Observer
    from elasticrs.config import JobConfig, ObserveSettings


def make_observers(job: JobConfig, settings: ObserveSettings) -> Sequence[Observer]:
    """The observers of a job of the command line, or of one of the launcher's API.

    Args:
        job: the job.
        settings: what is asked for.

    Raises:
        UsageError: no such destination of events, or one that cannot be opened.
    """
    observers: list[Observer] = []
    if settings.event_log_handler != "null":
        _check_destination(settings.event_log_handler)
        from elasticrs.agent.job_events import EventRecorder

        observers.append(
            EventRecorder(job, settings.event_log_handler, settings.entry_point, settings.rdzv_backend)
        )
    if settings.has_metrics:
        from elasticrs.agent.job_metrics import MetricRecorder

        observers.append(MetricRecorder(job))
    return observers


def _check_destination(name: str) -> None:
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
