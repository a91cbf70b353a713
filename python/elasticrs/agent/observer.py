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
    from elasticrs.node_page import Standing
    from elasticrs.plan import Plan


class Observer:
    """Called in the thread of the loop: must not wait."""

    def opened(self, supervisor: _core.Supervisor) -> None:
        """The loop begins, with the supervisor of the whole job."""

    def fd_ready(self, fd: int) -> bool:  # noqa: ARG002 -- for others
        """A descriptor that the supervisor watches is readable; true when it is this observer's."""
        return False

    def acting(self, action: Action, plan: Plan | None) -> None:
        """An action is about to be carried out; ``plan``: of the attempt that it is about, if there
        is one.
        """

    def prepared(self, attempt: Attempt) -> None:
        """The workers of an attempt, which has its files, are started next; none of them runs."""

    def started(self) -> None:
        """The workers of an attempt are being started, or could not be: from here on nothing is delayed."""

    def running(self, result: JobResult) -> None:
        """All workers of an attempt run: the last one of the job so far."""

    def not_started(self) -> None:
        """The workers of the last attempt could not be started."""

    def failed(self, attempt: Attempt) -> None:
        """A worker of an attempt has failed first; its siblings have been signalled."""

    def exited(self, attempt: Attempt, worker: _core.WorkerExited) -> None:
        """A worker of an attempt has ended."""

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:
        """Another process has taken the place of a worker that failed; see ``Attempt.replaced_workers``."""

    def timer_expired(self, timer: _core.TimerExpired) -> None:
        """A timer of a worker was not released in time."""

    def hung(self, event: _core.WorkerHung) -> None:
        """A worker gave no sign of life in time."""

    def killed(self, attempt: Attempt, event: _core.WorkersKilled) -> None:
        """Workers of an attempt are sent SIGKILL now, because they did not exit in time."""

    def paused(self, local_rank: int, is_paused: bool) -> None:
        """Somebody has stopped a worker by a signal, or it continues."""

    def training(self, standings: Sequence[Standing]) -> None:
        """What workers of ``elasticrs.train`` say of themselves; every few seconds."""

    def over(self, attempt: Attempt, outcome: str) -> None:
        """Nothing of an attempt is left.

        Args:
            attempt: that has ended.
            outcome: ``succeeded``, ``failed``, ``stopped`` or ``lost``. Workers that only seemed to succeed
                have failed.
        """

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        """The loop has ended, perhaps by an error. Called once."""


class Observers(Observer):
    """Those of one agent, in order: each hears of everything, whatever becomes of the others."""

    def __init__(self, observers: Sequence[Observer], say: Callable[[str], None]) -> None:
        self._observers = tuple(observers)
        self._say = say
        self._broken: set[int] = set()

    def fd_ready(self, fd: int) -> bool:
        """Return true if the descriptor was one of theirs."""
        return any(self._tell("fd_ready", fd))

    def _tell(self, name: str, *args: object) -> list[object]:
        return [self._tell_one(observer, name, args) for observer in self._observers]

    def _tell_one(self, observer: Observer, name: str, args: tuple[object, ...]) -> object:
        try:
            return getattr(observer, name)(*args)
        except Exception as error:
            if id(observer) not in self._broken:
                self._broken.add(id(observer))
                self._say(f"{type(observer).__name__} failed, and the job goes on: {error!r}")
        return None


def _pass_on(name: str) -> None:
    setattr(Observers, name, lambda self, *args: self._tell(name, *args))


for _name in vars(Observer).keys() - vars(Observers).keys():
    if not _name.startswith("_"):
        _pass_on(_name)
