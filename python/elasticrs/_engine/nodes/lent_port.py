"""Share a single port between the rendezvous store and the workers' store. The workers' store uses it during
a round.
"""

from __future__ import annotations

from elasticrs._engine.nodes.protocol.timers import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.meeting_point import MeetingPoint

PATIENCE = 10.0
"""Seconds for which sockets of the workers may still occupy the port after the workers have exited."""

_TICK, _SLOW_TICK = 0.05, 1.0


class LentPort:
    """Port that the rendezvous store hands over to the workers' store during a round. Meanwhile, the
    rendezvous store keeps its existing connections.

    Nothing is handed over if another process hosts the rendezvous store.
    """

    __slots__ = ("_deadline", "_is_lent", "_meeting_point", "trouble")

    def __init__(self, meeting_point: MeetingPoint) -> None:
        self._meeting_point = meeting_point
        self._is_lent = False
        self._deadline: float | None = None
        self.trouble = ""

    def lend(self) -> bool:
        """Release the port, so that the workers' store can use it. Return true on success; otherwise,
        :attr:`trouble` contains the reason.
        """
        if not self.take_back():
            return False
        if self._meeting_point.hosts:
            self._meeting_point.stop_listening()
            self._is_lent = True
        return True

    def take_back(self) -> bool:
        """Take the port back from the workers. Return true on success; otherwise, :attr:`trouble` contains
        the reason.
        """
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
        """True if the port has been occupied for so long that another program must be using it."""
        return self._deadline is not None and now() >= self._deadline

    @property
    def pause(self) -> float:
        """Seconds to wait before trying again to listen on the port that the workers used."""
        return _SLOW_TICK if self.is_overdue else _TICK
