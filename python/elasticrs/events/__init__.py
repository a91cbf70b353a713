"""Events of a job, with torch's names and JSON format, and with timestamps. See ``docs/events.md``.

>>> from elasticrs import events
>>> events.record(events.Event("my.event", events.EventSource.WORKER), destination="console")
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from elasticrs.events.api import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent, fq_hostname
from elasticrs.events.handlers import get_logging_handler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]


class RoleRanks(Protocol):
    """Interface of an object with a worker's ranks, such as :class:`.WorkerRanks` or torch's ``Worker``."""

    @property
    def local_rank(self) -> int: ...
    @property
    def role_rank(self) -> int: ...
    @property
    def role_world_size(self) -> int: ...


STATUS = "torchelastic.worker.status."
"""Prefix of the name of a status event, followed by the state of the agent or the worker."""

_ORDER = (
    *("run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state", "total_run_time"),
    *("rdzv_backend", "raw_error", "metadata", "agent_restarts"),
)

_events_loggers: dict[str, logging.Logger] = {}
_FAILURES_OF_WATCHDOGS = frozenset({"timer expired", "worker hung", "kill worker process"})


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    logger = _events_loggers.get(destination)
    if logger is None:
        handler = get_logging_handler(destination)
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        logger.propagate = False
        logger.addHandler(handler)
        _events_loggers[destination] = logger
    return logger


def record(event: Event, destination: str = "null") -> None:
    """Send an event to a destination; see :func:`get_logging_handler`.

    Raises:
        KeyError: the destination does not exist.
        OSError: the file of the destination cannot be opened.
    """
    if event.timestamp == 0:
        event = replace(event, timestamp=time.time_ns() // 1_000_000)
    # In a watchdog's event, `state` is the agent's, so recognize a worker's failure by the event's name.
    is_failure = event.metadata.get("state") == "FAILED" or event.name in _FAILURES_OF_WATCHDOGS
    _get_or_create_logger(destination).info(event.serialize(), extra={"is_failure": is_failure})


def status_metadata(
    state: str,
    inner: Mapping[str, object],
    *,
    hostname: EventMetadataValue = None,
    **known: EventMetadataValue,
) -> dict[str, EventMetadataValue]:
    """Return the metadata of a job event, in torch's order. ``hostname=None`` looks up the host name."""
    known |= {"state": state, "hostname": hostname or fq_hostname(), "metadata": json.dumps(inner)}
    return {**{name: known.get(name) for name in _ORDER}, **known}


def details_of_worker(worker: RoleRanks, exit_code: object, pid: object) -> dict[str, object]:
    """Return the details of a worker's event. Each value is a list with one item, as in torch's events."""
    names = ("local_rank", "role_rank", "role_world_size")
    found = {name: getattr(worker, name) for name in names} | {"exit_code": exit_code, "worker_pid": pid}
    return {name: [value] for name, value in found.items()}


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send a rendezvous event to the destination ``dynamic_rendezvous``."""
    is_failure = event.node_state is NodeState.FAILED
    _get_or_create_logger("dynamic_rendezvous").info(event.serialize(), extra={"is_failure": is_failure})


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Create and record a rendezvous event, unless the destination's handler is a ``NullHandler``.

    Args:
        run_id: name of the job.
        message: what happened.
        node_state: state of the node. If FAILED, the event includes the exception that is being handled.
        name: name of the activity; by default the calling function.
        hostname: host name of the node; by default that of this machine.
        pid: pid of the agent; ``None`` for the current process.
        master_endpoint: endpoint of the rendezvous.
        local_id: local id of the node in the rendezvous.
        rank: rank of the node.
    """
    if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
        return
    caller = sys._getframe(1)
    filename = os.path.basename(caller.f_code.co_filename)
    event = RdzvEvent(
        name=f"{filename}:{name or caller.f_code.co_name}",
        run_id=run_id,
        message=message,
        hostname=hostname or fq_hostname(),
        pid=pid or os.getpid(),
        node_state=node_state,
        master_endpoint=master_endpoint,
        rank=rank,
        local_id=local_id,
        error_trace=traceback.format_exc() if node_state == NodeState.FAILED else "",
    )
    record_rdzv_event(event)
