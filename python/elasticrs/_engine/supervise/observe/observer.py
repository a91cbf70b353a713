"""Observers of the agent's loop. They publish events, metrics and health data, but make no decisions.

If an observer fails, for example because of a user's handler, the job continues and tells the user once.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticrs import _core
    from elasticrs._engine.supervise.attempts.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.attempts.state_machine import Action
    from elasticrs._engine.workers.node_page import Standing
    from elasticrs._engine.workers.plan import Plan


class Observer:
    """Base class of observers. The loop calls the methods in its own thread, so they must not block."""

    def opened(self, supervisor: _core.Supervisor) -> None:
        """Handle the start of the event loop. ``supervisor`` stays the same until the job ends."""

    def fd_ready(self, fd: int) -> bool:  # noqa: ARG002 -- subclasses use it
        """Handle a readable file descriptor. Return true if the descriptor belongs to this observer."""
        return False

    def acting(self, action: Action, plan: Plan | None) -> None:
        """Called before an action. ``plan`` is ``None`` if the action belongs to no attempt."""

    def prepared(self, attempt: Attempt) -> None:
        """Called when an attempt has log files and its workers are about to be started."""

    def started(self) -> None:
        """Do slow work. Called when the workers are already starting, or when their start has failed."""

    def running(self, result: JobResult) -> None:
        """Handle the successful start of all workers of ``result.attempts[-1]``."""

    def not_started(self) -> None:
        """Called when the workers of an attempt could not be started."""

    def failed(self, attempt: Attempt) -> None:
        """Handle an attempt's first failure. The node's other workers have already been signalled."""

    def exited(self, attempt: Attempt, worker: _core.WorkerExited) -> None:
        """Handle the exit of a worker."""

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:
        """Handle the start of a process that replaces a failed worker; see ``Attempt.replaced_workers``."""

    def timer_expired(self, timer: _core.TimerExpired) -> None:
        """Called when a worker has not released a timer in time."""

    def hung(self, event: _core.WorkerHung) -> None:
        """Handle a worker that missed its heartbeat deadline."""

    def killed(self, attempt: Attempt, event: _core.WorkersKilled) -> None:
        """Handle workers that are being sent SIGKILL because they did not exit in time."""

    def paused(self, local_rank: int, is_paused: bool) -> None:
        """Handle a worker that was paused by a signal such as SIGSTOP, or that was continued."""

    def training(self, standings: Sequence[Standing]) -> None:
        """Handle what the workers have reported through ``elasticrs.train``. Called every few seconds."""

    def quiet(self) -> None:
        """Do periodic work, after a wait of the loop of at most a few seconds without an event."""

    def over(self, attempt: Attempt, outcome: str) -> None:
        """Handle the end of an attempt, after all its processes have exited.

        ``outcome`` is ``succeeded``, ``failed`` (also if a worker exited with 0 before its work was done),
        ``stopped`` or ``lost``.
        """

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        """Handle the end of the loop, which may be caused by an error. Called once."""


class Observers(Observer):
    """The observers of one agent. Passes each event to all of them in order, even if one fails."""

    def __init__(self, observers: Sequence[Observer], say: Callable[[str], None]) -> None:
        self._observers = tuple(observers)
        self._say = say
        self._broken: set[int] = set()

    def fd_ready(self, fd: int) -> bool:
        return any(self._tell("fd_ready", fd))

    def _tell(self, name: str, *args: object) -> list[object]:
        return [self._tell_one(observer, name, args) for observer in self._observers]

    def _tell_one(self, observer: Observer, name: str, args: tuple[object, ...]) -> object:
        try:
            return getattr(observer, name)(*args)
        except Exception as error:
            if id(observer) not in self._broken:
                self._broken.add(id(observer))
                self._say(f"{type(observer).__name__} failed: {error!r}; the job continues")
        return None


def _pass_on(name: str) -> None:
    setattr(Observers, name, lambda self, *args: self._tell(name, *args))


for _name in vars(Observer).keys() - vars(Observers).keys():
    if not _name.startswith("_"):
        _pass_on(_name)
