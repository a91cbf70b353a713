"""Send the events of this worker to the event handler, and to a destination of ``elasticrs.events``."""

from __future__ import annotations

import json
import os

from elasticrs.train.event_logger import NullEventLogHandler, get_event_logger

__all__ = ["record"]

DESTINATION = "ELASTICRS_TRAIN_EVENTS"
"""Variable with a destination for :func:`elasticrs.events.record`, such as ``console`` or ``file:PATH``."""


def record(name: str, rank: int, **more: str | float | bool | None) -> None:
    """Record an event with the details in ``more``. ``rank`` is -1 outside a round.

    Names: ``rendezvous_started``, ``rendezvous_succeeded``, ``rendezvous_closed``,
    ``rendezvous_failed_timeout``, ``rendezvous_failed``, ``train_step_runtime_error``.
    """
    handler, destination = get_event_logger(), os.environ.get(DESTINATION)
    if destination is None and isinstance(handler, NullEventLogHandler):
        return
    from elasticrs.events.api import fq_hostname

    metadata = {"hostname": fq_hostname(), "pid": os.getpid(), "rank": rank, **more}
    handler.log_event(name, json.dumps(metadata))
    if destination is not None:
        from elasticrs import events

        events.record(events.Event(name, events.EventSource.WORKER, metadata=metadata), destination)
