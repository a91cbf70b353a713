"""Observers of the agent's loop: their base class, and the observer that prints lines for the user.

Observers make no decisions. If one fails, for example because of a user's handler for events, the job
continues, and the user is told once.
"""

from __future__ import annotations

import os
import time
from functools import partial

from elasticrs._engine.job import phrases
from elasticrs._engine.supervise.failed_attempt import (
    early_leavers,
    first_of,
    first_seen,
    how_it_was_seen,
)
from elasticrs._engine.supervise.state_machine import AnnounceRestart, Phase, ReportFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, TypeAlias

    from elasticrs import _core
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.supervise.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.state_machine import Action
    from elasticrs._engine.workers.node_page import Standing
    from elasticrs._engine.workers.plan import Plan

    TakeOrders: TypeAlias = Callable[[_core.HealthServer], None]


_QUIET = ("WARNING", "WARN", "ERROR", "CRITICAL", "FATAL")


class Observer:
    """Base class of observers. The loop calls the methods in its own thread, so they must not block."""

    def opened(self, supervisor: _core.Supervisor, result: JobResult) -> None:
        """Handle the start of the event loop. The arguments stay the same until the job ends."""

    def fd_ready(self, fd: int) -> bool:  # noqa: ARG002 -- subclasses use it
        """Handle a readable file descriptor. Return true if the descriptor belongs to this observer."""
        return False

    def control_server(self, take: TakeOrders) -> _core.HealthServer | None:  # noqa: ARG002 -- for subclasses
        """Return the server that answers ``elasticctl``, or ``None`` if this observer has no server. When
        requests have arrived, the observer passes the server to ``take``.
        """
        return None

    def ordered(self, order: str, user: object, pid: object, node: object) -> None:
        """Handle an order that ``elasticctl`` has sent, before it takes effect. ``user`` and ``pid`` tell
        which process has sent it. ``node`` is the node of that process, or ``None`` if it is this node.
        """

    def acting(self, action: Action, plan: Plan | None) -> None:
        """Called before an action. ``plan`` is ``None`` if the action belongs to no attempt."""

    def prepared(self, attempt: Attempt) -> None:
        """Called when an attempt has log files and its workers are about to be started."""

    def started(self) -> None:
        """Do slow work. Called when the workers are already starting, or when their start has failed."""

    def waiting(self) -> None:
        """Do slow work. Called when the plan of the next attempt may take minutes to come."""

    def running(self, result: JobResult) -> None:
        """Handle the successful start of all workers of ``result.attempts[-1]``."""

    def not_started(self) -> None:
        """Called when the workers of an attempt could not be started."""

    def failed(self, attempt: Attempt) -> None:
        """Handle an attempt's first failure. The node's other workers have already been signalled."""

    def kept(self, attempt: Attempt, event: _core.StateKept) -> None:
        """Called when the workers that use ``Keep`` have copied their training state because they are about
        to be stopped, or when the time limit for that has passed.
        """

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

    def paused(self) -> None:
        """Handle that a worker was paused by a signal such as SIGSTOP, or that it was continued."""

    def memory_opened(self, fds: Sequence[int]) -> None:
        """Handle that the workers write their training steps into files in memory, given by their descriptors
        in the order of the local ranks. Called once for each job, soon after the first start of its workers.
        """

    def training(self, standings: Sequence[Standing]) -> None:
        """Handle what the workers have reported through ``elasticrs.train``. Called every few seconds."""

    def quiet(self) -> None:
        """Do periodic work, after a wait of the loop of at most a few seconds without an event."""

    def over(self, attempt: Attempt, outcome: str) -> None:
        """Handle the end of an attempt, after all its processes have exited. ``outcome`` is ``succeeded``,
        ``failed`` (also if a worker exited with 0 before its work was done), ``stopped`` or ``lost``.
        """

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        """Handle the end of the loop, which may be caused by an error. Called once."""


class Observers(Observer):
    """The observers of one agent. Passes each event to all of them in order, even if one fails."""

    def __init__(self, observers: Sequence[Observer], say: Callable[[str], None]) -> None:
        self._observers = tuple(observers)
        self._say = say
        self._broken: set[int] = set()

    def add_first(self, observer: Observer) -> None:
        """Put an observer before the others, because one of the others may hang."""
        self._observers = (observer, *self._observers)

    def fd_ready(self, fd: int) -> bool:
        return any(self._tell("fd_ready", fd))

    def control_server(self, take: TakeOrders) -> _core.HealthServer | None:
        servers: list[Any] = self._tell("control_server", take)
        return next((server for server in servers if server is not None), None)

    def _tell(self, name: str, *args: object) -> list[object]:
        answers = []
        for observer in self._observers:
            try:
                answers.append(getattr(observer, name)(*args))
            except Exception as error:  # noqa: PERF203 -- the others are still to be told
                if id(observer) not in self._broken:
                    self._broken.add(id(observer))
                    self._say(f"{type(observer).__name__} failed: {error!r}; the job continues")
        return answers


def _pass_on(name: str) -> None:
    setattr(Observers, name, lambda self, *args: self._tell(name, *args))


for _name in vars(Observer).keys() - vars(Observers).keys():
    if not _name.startswith("_"):
        _pass_on(_name)


class Outliner(Observer):
    """Observer that gives a server the main facts about the job, so that the server can answer the first
    request of ``elasticctl`` even if the agent's loop is stuck.
    """

    def __init__(self, job: JobSpec, server: _core.HealthServer) -> None:
        self._server = server
        # The server is in Rust, and stores this number in 32 bits.
        most = min(job.max_restarts, 2**32 - 1)
        self._facts = job.run_id, job.role, job.name, job.nproc, most, job.event_log
        self._attempt: Attempt | None = None
        self._round = 0
        server.outline(self._facts)

    def running(self, result: JobResult) -> None:
        self._tell(result.attempts[-1], result.restarts)

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:  # noqa: ARG002 -- the base class's signature
        self._tell(attempt, attempt.restarts)

    def quiet(self) -> None:
        """Tell the server the present ranks, if nodes have joined or left while the workers ran."""
        if self._attempt is not None and self._attempt.agents_round != self._round:
            self._tell(self._attempt, self._attempt.restarts)

    def _tell(self, attempt: Attempt, restarts: int) -> None:
        self._attempt, self._round = attempt, attempt.agents_round
        first, paths = attempt.plan.ranks[0], attempt.paths
        placed = first.group_rank, first.group_world_size, first.world_size
        folder = paths.run_folder if paths.have_output else None
        workers = [(rank, place, attempt.pids[place]) for place, rank in attempt.shown_ranks().items()]
        told = attempt.name, self._round, restarts, placed, folder, workers
        self._server.outline(self._facts, told)


# --- the terminal ---


def is_talkative(level: str) -> bool:
    """Return true if ``level`` (``LOGLEVEL``, a name or a number) allows lines for a job without problems."""
    if level.isdecimal():
        return int(level) <= 20
    return level.upper() not in _QUIET


class TerminalReporter(Observer):
    """Observer that prints the progress of a job, one line for each event. Slow work, such as reading a
    traceback, waits until the next workers have been started. Success is printed only by the launcher, which
    owns the process, and not for a program that uses the launcher's API.
    """

    def __init__(
        self, job: JobSpec, result: JobResult, say: Callable[[str], None], *, owns_process: bool
    ) -> None:
        self._job = job
        self._result = result
        self._say = say
        self._owns_process = owns_process
        self._tells_all = owns_process and is_talkative(os.environ.get("LOGLEVEL", ""))
        self._begun_ns = time.monotonic_ns()
        self._failed: tuple[Attempt, AnnounceRestart] | None = None
        self._is_restart = self._is_told = False

    def acting(self, action: Action, plan: Plan | None) -> None:  # noqa: ARG002 -- the base class's signature
        """Print the line about a delayed restart. Otherwise, :meth:`started` or :meth:`waiting` prints it."""
        if isinstance(action, AnnounceRestart):
            self._failed = self._result.attempts[-1], action
            if action.delay > 0:
                self.started()
        elif isinstance(action, ReportFailure):
            # The restart has not been told, and does not follow: there is no plan for it.
            self._failed = None

    def waiting(self) -> None:
        self.started()

    def prepared(self, attempt: Attempt) -> None:
        self._is_told = False
        folder = attempt.paths.run_folder
        if attempt is self._result.attempts[0] and self._tells_all and folder and attempt.paths.have_output:
            self._say(f"logs in {folder}")

    def started(self) -> None:
        """Print the line about a restart, now that it no longer delays the workers."""
        if self._failed is None:
            return
        (attempt, action), self._failed = self._failed, None
        if not action.charged:
            self._say(f"port {attempt.plan.master_port} was taken; trying another one (no restart charged)")
            return
        self._is_restart = True
        policy = self._job.restart_settings
        used = policy.max_restarts - action.restarts_left if policy.window is None else self._result.restarts
        self._say(
            phrases.restart_line(
                self._cause(attempt),
                phrases.restarts_used(used, policy.max_restarts, policy.window),
                action.delay,
            )
        )

    def failed(self, attempt: Attempt) -> None:
        """Print the first failure now if :meth:`exited` would print it late, as the worker exits late."""
        if attempt.first_failure is not None and attempt.is_told_at_once(attempt.first_failure):
            self._tell_first(attempt)

    def exited(self, attempt: Attempt, worker: _core.WorkerExited) -> None:
        if worker.local_rank == attempt.first_failure or attempt.blame is not None:
            self._tell_first(attempt)

    def replaced(self, attempt: Attempt, failed: Attempt) -> None:
        (local_rank,) = failed.exits
        policy = self._job.restart_settings
        self._say(
            phrases.replace_line(
                self._cause(failed),
                attempt.pids[local_rank],
                failed.stamps["started"] - failed.failed_ns,
                phrases.restarts_used(attempt.restarts, policy.max_restarts, policy.window),
            )
        )

    def running(self, result: JobResult) -> None:
        attempt = result.attempts[-1]
        # With several nodes, only the node with group rank 0 prints this line.
        is_mine = self._is_restart or attempt.plan.ranks[0].group_rank == 0
        if is_mine and attempt.phases:
            self._is_restart = False
            self._say(f"attempt {phrases.attempt_text(attempt.name)} is running, {attempt.how_it_began()}")
            if attempt.kept is not None:
                self._say(attempt.kept.line())

    def ended(self, result: JobResult, error: BaseException | None) -> None:
        self.started()
        if error is None and result.signum is not None and not result.attempts:
            self._say(f"{result.how_stopped} before any worker was started")
        if error is not None or not result.attempts:
            return
        took = phrases.duration((time.monotonic_ns() - self._begun_ns) / 1e9)
        used = result.restarts
        if result.phase is Phase.SUCCEEDED:
            if self._tells_all:
                restarts = f"{phrases.counted(used, 'restart')} charged"
                goodput = phrases.goodput(
                    productive_ns(result.attempts), time.monotonic_ns() - self._begun_ns
                )
                self._say(f"succeeded after {took}; {restarts}{self._not_charged()}{goodput}")
            return
        how = result.how_stopped or ("stopped" if result.phase is Phase.STOPPED else "failed")
        attempts = result.attempts
        # If the file system does not respond, print the folder without checking that it contains files.
        run: str | None = attempts[-1].paths.run_folder
        folder = attempts[-1].files.run(partial(folder_with_files, attempts), run)
        logs = f"; logs in {folder}" if folder else ""
        policy = self._job.restart_settings
        charged = f"{used} of {policy.max_restarts} restarts charged"
        if policy.window is not None:
            limit = f"{policy.max_restarts} in {phrases.duration(policy.window)}"
            charged = f"{phrases.counted(used, 'restart')} charged (at most {limit})"
        charged += self._not_charged()
        ending = f"{how} after {took}", f"; {charged}{logs}"
        if self._owns_process:
            # The launcher prints both parts below the failure report, with the root cause between them.
            result.ending = ending
        else:
            self._say("".join(ending))

    def _not_charged(self) -> str:
        """Return as a text how many restarts were not charged: nodes had joined or left, or by request."""
        if not self._job.is_multi_node or self._job.on_failure == "replace":
            return ""
        last = self._result.attempts[-1]
        count = last.round - 1 - last.restarts
        return f", {count} not charged" if count > 0 else ""

    def _tell_first(self, attempt: Attempt) -> None:
        # With several nodes, the rendezvous prints the first failure on every node.
        if self._job.is_multi_node or not attempt.signalled or self._is_told:
            return
        self._is_told = True
        first = first_seen(attempt)
        who = attempt.who_failed(first, attempt.pids[first]) + how_it_was_seen(attempt, first)
        others, their = ("other rank", "its") if attempt.signalled == 1 else ("others", "their")
        exited, raised = attempt.exits.get(first), attempt.raised.get(first)
        has_failed = exited is not None and (exited.exitcode or 0) > 0
        left = early_leavers(attempt, lambda _: has_failed)
        # The worker's exception may only report that the connection to another worker was lost, whose exit
        # has not been noticed yet.
        is_unknown = has_failed if raised is None else raised.origin != "own"
        if attempt.is_undecided:
            # One of the other ranks may be to blame, so do not call their errors side effects.
            self._say(f"{who}; stopping all ranks")
        elif attempt.blame is None and left:
            self._say(f"{phrases.ranks_text(left)} exited with code 0, then {who}; stopping the {others}")
        elif is_unknown and first not in attempt.expired:
            self._say(f"{who}, the cause is not known yet; stopping the {others}")
        else:
            self._say(f"{who}; stopping the {others}: {their} errors are side effects")

    def _cause(self, attempt: Attempt) -> str:
        """Return the reason why an attempt ended, and store it for the report."""
        failed = attempt.failed_exits()
        if attempt.first_failure is None or not failed:
            lost = attempt.nursery_end if "started" in attempt.stamps else None
            attempt.cause = lost or self._result.message or "the workers could not be started"
            return attempt.cause
        local_rank, how = first_of(attempt)
        attempt.cause = attempt.who_failed(local_rank) + how
        return attempt.who_failed(local_rank, attempt.exits[local_rank].pid) + how


def productive_ns(attempts: Iterable[Attempt]) -> int:
    """Return the time in nanoseconds during which no worker had failed or hung. The imports of modules count,
    whether workers import them, or with --warm the process that forks the workers.
    """
    total = 0
    for attempt in attempts:
        started = attempt.stamps.get("started")
        if started is not None and "imported" in attempt.stamps:
            started = min(started, attempt.stamps["planned"])
        end = attempt.stamps.get("ended") if "failure_seen" not in attempt.stamps else attempt.failed_ns
        silent = [event.hung.since_ns for event in attempt.expired.values() if event.hung is not None]
        if started is not None and end is not None:
            total += max(0, min([end, *silent]) - started)
    return total


def folder_with_files(attempts: Sequence[Attempt]) -> str | None:
    """Return the folder of a run's logs; ``None`` if it contains no files."""
    run = attempts[-1].paths.run_folder
    return run if run and any(files for _, _, files in os.walk(run)) else None
