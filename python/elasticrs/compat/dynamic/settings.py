"""Settings of a rendezvous over a back end, with torch's names and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta


def _read_only(name: str) -> property:
    return property(lambda self: getattr(self, f"_{name}"))


class RendezvousTimeout:
    """How long the parts of a rendezvous may take; parts of seconds are fine.

    Args:
        join: until enough nodes have met; 600 s.
        last_call: for further nodes, once enough have met; 30 s.
        close: for closing; 30 s.
        heartbeat: for one sign of life; 5 s.

    Raises:
        ValueError: a time that is not positive.
    """

    _ZERO = timedelta(0)
    _DEFAULT_TIMEOUTS = {  # noqa: RUF012 -- nobody changes it
        "join": timedelta(seconds=600),
        "last_call": timedelta(seconds=30),
        "close": timedelta(seconds=30),
        "heartbeat": timedelta(seconds=5),
    }

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = self._checked("join", join)
        self._last_call = self._checked("last_call", last_call)
        self._close = self._checked("close", close)
        self._heartbeat = self._checked("heartbeat", heartbeat)

    join, last_call, close, heartbeat = map(_read_only, ("join", "last_call", "close", "heartbeat"))

    @classmethod
    def _checked(cls, name: str, value: timedelta | None) -> timedelta:
        if value is None:
            return cls._DEFAULT_TIMEOUTS[name]
        if value <= cls._ZERO:
            raise ValueError(f"The {name} timeout ({value}) must be positive.")
        return value


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """The settings of a rendezvous.

    Args:
        run_id: the name of the job.
        min_nodes: fewest nodes.
        max_nodes: most nodes.
        timeout: how long its parts may take.
        keep_alive_interval: between two signs of life of a node.
        keep_alive_max_attempt: a node that misses so many is taken for dead.
        cas_backoff_max_seconds: the longest random pause after a write that another node has overtaken.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    cas_backoff_max_seconds: float = 0.0


def check(settings: RendezvousSettings) -> None:
    """Refuse settings that make no sense, in torch's words where torch refuses them.

    Raises:
        ValueError: one of them does not.
    """
    low, high, backoff = settings.min_nodes, settings.max_nodes, settings.cas_backoff_max_seconds
    if not settings.run_id:
        raise ValueError("The run id must be a non-empty string.")
    if low < 1:
        raise ValueError(f"The minimum number of nodes ({low}) must be greater than zero.")
    if high < low:
        raise ValueError(
            f"The maximum number of nodes ({high}) must be greater than or equal to the minimum number of "
            f"nodes ({low})."
        )
    if not math.isfinite(backoff) or backoff < 0:
        raise ValueError(f"cas_backoff_max_seconds ({backoff}) must be finite and non-negative.")
    if settings.keep_alive_interval <= timedelta(0):
        raise ValueError(f"keep_alive_interval ({settings.keep_alive_interval}) must be positive.")
    if settings.keep_alive_max_attempt < 1:
        raise ValueError(
            f"keep_alive_max_attempt ({settings.keep_alive_max_attempt}) must be greater than zero."
        )
