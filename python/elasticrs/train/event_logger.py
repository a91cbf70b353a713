"""Where the events of a job go, with torchelastic's names; by default nowhere."""

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
        """Handle one event.

        Args:
            event_name: such as ``rendezvous_succeeded``.
            message: a JSON object with host name, pid, rank and what else belongs to it.
        """


class ConsoleEventLogHandler(EventLogHandler):
    """Prints a line for each event."""

    def log_event(self, event_name: str, message: str | None = None) -> None:
        """Print it: ``event: name, message: message``."""
        print(f"event: {event_name}, message: {message}")


class NullEventLogHandler(EventLogHandler):
    """Drops all events."""

    def log_event(self, event_name: str, message: str | None = None) -> None:
        """Drop the event."""


_handler: EventLogHandler = NullEventLogHandler()


def configure(event_log_handler: EventLogHandler) -> None:
    """Set the handler of this process.

    Args:
        event_log_handler: from now on.
    """
    global _handler  # noqa: PLW0603 -- of the process
    _handler = event_log_handler


def get_event_logger() -> EventLogHandler:
    """Return the handler of this process."""
    return _handler
