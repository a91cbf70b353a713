"""One port in turn for the store in which the nodes meet and, while a round runs, for its workers' store."""

from __future__ import annotations

from elasticrs.rendezvous.elastic.timers import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic.meeting_point import MeetingPoint

PATIENCE = 10.0
"""Seconds that a socket of ended workers may keep the port."""

_TICK, _SLOW_TICK = 0.05, 1.0


class LentPort:
    """The port of a store that is hosted here; nothing is lent where it is not. Connections go on all the
    time.
    """

    __slots__ = ("_deadline", "_is_lent", "_meeting_point", "trouble")

    def __init__(self, meeting_point: MeetingPoint) -> None:
        self._meeting_point = meeting_point
        self._is_lent = False
        self._deadline: float | None = None
        self.trouble = ""

    def lend(self) -> bool:
        """Give the port away; return true if that is done, else :attr:`trouble` says why not."""
        if not self.take_back():
            return False
        if self._meeting_point.hosts:
            self._meeting_point.stop_listening()
            self._is_lent = True
        return True

    def take_back(self) -> bool:
        """Take the port back; return true if it is here, else :attr:`trouble` says why not."""
        if self._is_lent:
            try:
                self._meeting_point.listen_again()
            except OSError as error:
                self.trouble = str(error)
                if self._deadline is None:
                    self._deadline = now() + PATIENCE
                return False
        self._is_lent, self._deadline = False, None
        return True

    @property
    def is_overdue(self) -> bool:
        """True if another program must have taken the port."""
        return self._deadline is not None and now() >= self._deadline

    @property
    def pause(self) -> float:
        """Seconds until it is worth while to try again."""
        return _SLOW_TICK if self.is_overdue else _TICK
