"""Settings of the dynamic rendezvous, with torch's names and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta


def _read_only(name: str) -> property:
    return property(lambda self: getattr(self, f"_{name}"))


class RendezvousTimeout:
    """Time limits for the stages of a rendezvous. Fractions of a second are allowed.

    Args:
        join: time limit for the minimum number of nodes to join; 600 s by default.
        last_call: time during which more nodes can join after the minimum number has joined; 30 s by default.
        close: time limit for closing the rendezvous; 30 s by default.
        heartbeat: time limit for sending a heartbeat; 5 s by default.

    Raises:
        ValueError: a time is not positive.
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
    """Settings of a rendezvous.

    Args:
        run_id: name of the job.
        min_nodes: minimum number of nodes.
        max_nodes: maximum number of nodes.
        timeout: time limits for the steps of the rendezvous.
        keep_alive_interval: interval between two heartbeats of a node.
        keep_alive_max_attempt: number of missed heartbeats after which a node is considered dead.
        cas_backoff_max_seconds: longest random pause after a write that failed because another node wrote
            first.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    cas_backoff_max_seconds: float = 0.0


def check(settings: RendezvousSettings) -> None:
    """Reject invalid settings. If torch rejects a setting too, the error message is the same as torch's.

    Raises:
        ValueError: a setting is invalid.
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
