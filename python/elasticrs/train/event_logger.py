"""Handlers for a job's events, named as in torchelastic. By default, events are dropped."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = [
    "ConsoleEventLogHandler",
    "EventLogHandler",
    "NullEventLogHandler",
    "configure",
    "get_event_logger",
]


class EventLogHandler(ABC):
    """Stores or forwards events."""

    @abstractmethod
    def log_event(self, event_name: str, message: str | None = None) -> None:
        """Handle one event, such as ``rendezvous_succeeded``, with its details as a JSON object."""


class ConsoleEventLogHandler(EventLogHandler):
    """Prints a line for each event."""

    def log_event(self, event_name: str, message: str | None = None) -> None:
        """Print the event as ``event: name, message: message``."""
        print(f"event: {event_name}, message: {message}")


class NullEventLogHandler(EventLogHandler):
    """Drops all events."""

    def log_event(self, event_name: str, message: str | None = None) -> None: ...


_handlers: dict[str | None, EventLogHandler] = {None: NullEventLogHandler()}


def configure(handler: EventLogHandler, group: str | None = None) -> None:
    """Set the event handler of a group. With ``None``, set the default, which ``elasticrs.train`` uses."""
    _handlers[group] = handler


def get_event_logger(group: str | None = None) -> EventLogHandler:
    """Return the event handler of a group, or the default handler if ``group`` is ``None`` or has none."""
    return _handlers.get(group, _handlers[None])
