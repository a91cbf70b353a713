"""Who hears of everything that the loop does, and decides nothing: events, metrics, the health check server.

An observer may fail (a handler of the user's, a full disk); the job goes on, and the user is told once.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs import _core
    from elasticrs.agent.attempt import Attempt, JobResult
    from elasticrs.agent.state import Action
    from elasticrs.plan import Plan


class Observer:
    """Called in the thread of the loop: must not wait."""

    def opened(self, supervisor: _core.Supervisor) -> None:
        """The loop begins.

        Args:
            supervisor: of the whole job.
        """

    def fd_ready(self, fd: int) -> bool:  # noqa: ARG002 -- for others
        """A descriptor that the supervisor watches is readable; true when it is this observer's."""
        return False

    def acting(self, action: Action, plan: Plan | None) -> None:
        """An action is about to be carried out.

        Args:
            action: what.
            plan: of the attempt that the action is about, if there is one.
        """

    def prepared(self, attempt: Attempt) -> None:
        """The workers of an attempt are started next; none of them runs.

        Args:
            attempt: with its files.
        """

    def started(self) -> None:
        """The workers of an attempt are being started, or could not be: from here on nothing is delayed."""

    def seen(self, event: object, result: JobResult) -> None:
        """An event of the core was taken in.

        Args:
            event: one of the classes of :mod:`elasticrs._core`.
            result: the job so far; the event's attempt is the last one.
        """

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        """The loop has ended. Called once.

        Args:
            result: how.
            error: what it raised, if it did.
        """


class Observers:
    """Those of one agent, in order.

    Args:
        observers: they.
        say: tells the user a line.
    """

    __slots__ = ("_broken", "_observers", "_say")

    def __init__(self, observers: Sequence[Observer], say: Callable[[str], None]) -> None:
        self._observers = tuple(observers)
        self._say = say
        self._broken: set[int] = set()

    def opened(self, supervisor: _core.Supervisor) -> None:
        """See :class:`Observer`."""
        self._tell(lambda observer: observer.opened(supervisor))

    def fd_ready(self, fd: int) -> bool:
        """Whether it was one of theirs; see :class:`Observer`."""
        found: list[bool] = []
        self._tell(lambda observer: found.append(observer.fd_ready(fd)))
        return any(found)

    def acting(self, action: Action, plan: Plan | None) -> None:
        """See :class:`Observer`."""
        self._tell(lambda observer: observer.acting(action, plan))

    def prepared(self, attempt: Attempt) -> None:
        """See :class:`Observer`."""
        self._tell(lambda observer: observer.prepared(attempt))

    def started(self) -> None:
        """See :class:`Observer`."""
        self._tell(lambda observer: observer.started())

    def seen(self, event: object, result: JobResult) -> None:
        """See :class:`Observer`."""
        self._tell(lambda observer: observer.seen(event, result))

    def ended(self, result: JobResult, error: BaseException | None = None) -> None:
        """See :class:`Observer`."""
        self._tell(lambda observer: observer.ended(result, error))

    def _tell(self, call: Callable[[Observer], object]) -> None:
        for observer in self._observers:
            self._tell_one(observer, call)

    def _tell_one(self, observer: Observer, call: Callable[[Observer], object]) -> None:
        try:
            call(observer)
        except Exception as error:
            if id(observer) not in self._broken:
                self._broken.add(id(observer))
                self._say(f"{type(observer).__name__} failed, and the job goes on: {error!r}")
