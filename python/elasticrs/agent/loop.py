"""The loop of the agent: events of the core in, decisions of a :class:`~elasticrs.agent.decisions.Decisions`,
actions out.

It owns the supervisor and the signal pipe, and decides nothing itself.
Blocks in one place only: :meth:`_core.Supervisor.next_event`.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import deque

from elasticrs import _core, texts
from elasticrs._value import Record, fresh
from elasticrs.agent import state as machine
from elasticrs.agent.attempt import Attempt
from elasticrs.agent.evidence import oom_kills, read_counters
from elasticrs.agent.observer import Observers
from elasticrs.agent.port_conflict import is_port_conflict
from elasticrs.agent.signals import StopRequests
from elasticrs.agent.story import Story
from elasticrs.clock import Clock
from elasticrs.console import Console
from elasticrs.logs import discard_empty_fault_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from elasticrs.agent.decisions import Decisions
    from elasticrs.agent.observer import Observer
    from elasticrs.agent.signals import SignalPipe
    from elasticrs.agent.sleepers import Sleepers
    from elasticrs.config import JobConfig
    from elasticrs.workers import Leftovers, Workers


_TRANSIENT = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE))

DRAIN_TIMEOUT = 10.0
"""Seconds that a slow console gets at the end; the files have everything in any case."""


class JobResult(Record):
    """How a job ended on this node.

    Attributes:
        phase: one of the terminal phases.
        exit_code: of the launcher.
        signum: the signal that ended it, if one did.
        message: the reason of a failure that is not a worker's.
        start_errno: the system's error for which the last attempt could not be started.
        first_cause: the first failure of a job on several nodes; see :mod:`elasticrs.agent.cause`.
        clock: of the store in which the nodes met.
        attempts: all of them, the last one last.
        return_values: by global rank.
    """

    phase: machine.Phase = machine.Phase.INIT
    exit_code: int = 1
    signum: int | None = None
    message: str | None = None
    start_errno: int | None = None
    first_cause: dict[str, Any] | None = None
    clock: Clock = Clock()
    attempts: list[Attempt] = fresh(factory=list)
    return_values: dict[int, object] = fresh(factory=dict)


class Agent:
    """Runs a job on this node.

    Args:
        job: what to run.
        workers: starts the processes.
        decisions: say what to do.
        signals: the caught signals; ``None`` outside of the main thread.
        owns_process: the process is ours alone (the command line).
        console: for lines to the user.
        observers: hear of everything.
    """

    def __init__(
        self,
        job: JobConfig,
        workers: Workers,
        decisions: Decisions,
        *,
        signals: SignalPipe | None,
        owns_process: bool,
        console: Console | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._job = job
        self._workers = workers
        self._decisions = decisions
        self._signals = signals
        self._owns_process = owns_process
        self._console = console or Console()
        self._events: deque[machine.Event] = deque()
        self._actions: deque[machine.Action] = deque()
        self._result = JobResult()
        story = Story(job, self._result, self._console.say, owns_process=owns_process)
        self._observers = Observers((story, *observers), self._console.say)
        self._begun: _core.GroupStarted | None = None
        self._over: _core.GroupEnded | None = None
        self._requests = StopRequests()
        self._sleepers: Sleepers | None = None
        self._unfit: str | None = None
        self._error: Exception | None = None
        if job.uninterruptible_state_timeout > 0:
            from elasticrs.agent.sleepers import Sleepers

            self._sleepers = Sleepers(job.uninterruptible_state_timeout)

    def run(self) -> JobResult:
        """Run the job to its end.

        Returns:
            How it ended; failures of workers are data, not exceptions.

        Raises:
            _core.SupervisorError: the supervisor itself failed; nothing is left running.
            OSError: the same, for want of descriptors or of a recent kernel.
            Exception: of the user's: a function or a value that cannot be pickled, a rendezvous handler.
        """
        try:
            result = self._run()
        except BaseException as error:
            self._observers.ended(self._result, error)
            raise
        self._observers.ended(result)
        return result

    def _run(self) -> JobResult:
        self._take_signals(None)
        self._events.append(machine.Begin())
        supervisor: _core.Supervisor | None = None
        try:
            if not self._events_end_it():
                supervisor = _core.Supervisor(owns_process=self._owns_process)
                if self._signals is not None:
                    supervisor.watch_fd(self._signals.fd)
                self._workers.watch_timers(supervisor)
                self._decisions.open(supervisor)
                self._observers.opened(supervisor)
                self._drive(supervisor)
        finally:
            try:
                self._decisions.release_plan()
                if supervisor is not None:
                    supervisor.close(
                        keep_descendants=self._job.linger is None and self._result.exit_code == 0
                    )
                    self._hear_out(supervisor)
            finally:
                try:
                    self._workers.close()
                finally:
                    self._decisions.close()
        self._console.flush()
        if self._error is not None:
            raise self._error
        if self._result.exit_code == 0 and self._decisions.has_taken_part:
            # Loads what the user's functions made, which may raise: nothing may be left to do then.
            self._result.return_values = self._workers.return_values()
        return self._result

    def _events_end_it(self) -> bool:
        """Whether a signal came before anything was started: then not even a supervisor is needed."""
        first = self._events[0]
        if not isinstance(first, machine.SignalReceived):
            return False
        for action in self._decisions.step(first):
            if isinstance(action, machine.Exit):
                self._finish(action)
        return self._decisions.phase.is_terminal

    def _drive(self, supervisor: _core.Supervisor) -> None:
        while True:
            while self._events or self._actions:
                if not self._actions:
                    self._actions.extend(self._decisions.step(self._events.popleft()))
                    continue
                action = self._actions.popleft()
                self._observers.acting(action, self._decisions.plan)
                if isinstance(action, machine.Exit):
                    self._finish(action)
                    self._drain(supervisor)
                    return
                self._carry_out(supervisor, action)
            self._console.flush()
            event = supervisor.next_event(self._seconds_left())
            if event is not None:
                self._take_in(supervisor, event)
            else:
                self._take_signals(supervisor)
                self._actions.extend(self._decisions.look_around())
            if self._sleepers is not None:
                self._look_for_sleepers(supervisor, self._sleepers)

    def _seconds_left(self) -> float:
        left = self._decisions.seconds_left()
        return left if self._sleepers is None else min(left, self._sleepers.interval)

    def _look_for_sleepers(self, supervisor: _core.Supervisor, sleepers: Sleepers) -> None:
        """A worker that hangs in the kernel ends the job; see :mod:`elasticrs.agent.sleepers`."""
        attempt = self._result.attempts[-1] if self._result.attempts else None
        if attempt is None or self._unfit is not None or "ended" in attempt.stamps:
            return
        overdue = sleepers.look(attempt.running())
        if overdue:
            self._unfit = texts.asleep(overdue, self._job.uninterruptible_state_timeout)
            self._console.say(f"{self._unfit}; stopping the workers")
            self._stop(supervisor, machine.Stop(signal.SIGTERM, self._job.shutdown_timeout))

    def _drain(self, supervisor: _core.Supervisor) -> None:
        """Let the console catch up, for a while."""
        left = supervisor.drain(DRAIN_TIMEOUT)
        if left:
            files = ", ".join(stream.path for stream in left)
            self._console.say(
                f"the console did not accept all output within {DRAIN_TIMEOUT:g} s; see {files}"
            )
        # What was wrong with the files is often found by the last look at them.
        self._hear_out(supervisor)

    def _hear_out(self, supervisor: _core.Supervisor) -> None:
        """What the supervisor has still to say."""
        while (event := supervisor.next_event(0.0)) is not None:
            if isinstance(event, (_core.LogTrouble, _core.Degraded)):
                _TRANSLATORS[type(event)](self, supervisor, event)
            elif isinstance(event, _core.FdReady):
                # Ready until it is read: a signal, for which nothing is left to stop. Others have no reader.
                if self._signals is not None and event.fd == self._signals.fd:
                    self._take_signals(None)
                else:
                    supervisor.unwatch_fd(event.fd)

    # --- actions ---

    def _carry_out(self, supervisor: _core.Supervisor, action: machine.Action) -> None:
        if isinstance(action, machine.Rendezvous):
            self._events.append(self._decisions.next_plan(supervisor))
        elif isinstance(action, machine.Start):
            self._start(supervisor, action)
        elif isinstance(action, machine.Stop):
            if not action.is_announced:
                self._console.say(texts.stop_line(self._decisions.signum, action.signum, action.grace))
            self._stop(supervisor, action)
        elif isinstance(action, machine.CollectEvidence):
            attempt = self._result.attempts[-1]
            attempt.oom_kills_after = read_counters(attempt.oom_kills)
            self._decisions.release_plan()
        elif isinstance(action, machine.ReportFailure):
            self._result.message = action.message
        elif isinstance(action, machine.CloseRendezvous):
            self._decisions.close_rendezvous()

    def _stop(self, supervisor: _core.Supervisor, action: machine.Stop) -> None:
        policy, hung = _core.StopPolicy(action.signum, action.grace), action.hung
        if hung is None:
            supervisor.stop(policy)
        else:
            supervisor.stop(policy, hung_for=hung.silence, hung_step=hung.step, hung_frame=hung.frame)
        self._workers.stop()
        self._follow_workers()

    def _start(self, supervisor: _core.Supervisor, action: machine.Start) -> None:
        plan = self._decisions.plan
        if plan is None:
            raise RuntimeError("workers are started without a rendezvous")
        is_again = any(earlier.restarts == action.restarts for earlier in self._result.attempts)
        name = f"{action.restarts}_r{action.round}" if is_again else str(action.restarts)
        attempt = Attempt(action.round, action.restarts, plan, name)
        self._result.attempts.append(attempt)
        self._result.start_errno = None
        self._decisions.observe(attempt)
        self._begun = self._over = None
        try:
            group = self._workers.prepare(supervisor, attempt)
            self._observers.prepared(attempt)
            supervisor.start(group)
            self._observers.started()
        except BaseException as error:
            self._observers.started()
            self._workers.ended(supervisor, attempt)
            transient, why = isinstance(error, OSError) and error.errno in _TRANSIENT, str(error)
            if not isinstance(error, (OSError, _core.SupervisorError)):
                if not (isinstance(error, Exception) and self._decisions.has_peers):
                    raise
                # The other nodes hear of it first; then it is the program's.
                self._error, why = error, f"{type(error).__name__}: {error}"
            self._result.message = f"{texts.NOT_STARTED}: {why}"
            self._events.append(machine.StartFailed(self._result.message, transient))

    def _finish(self, action: machine.Exit) -> None:
        self._decisions.release_plan()
        self._discard_empty_fault_files()
        self._write_timeline()
        self._result.phase = self._decisions.phase
        self._result.exit_code = action.code
        self._result.signum = self._decisions.signum
        self._result.first_cause = self._decisions.first_cause
        self._result.clock = self._decisions.clock

    def _write_timeline(self) -> None:
        if os.environ.get("ELASTICRS_TIMELINE"):
            from elasticrs.agent.timeline import write

            try:
                write(os.environ["ELASTICRS_TIMELINE"], self._result.attempts)
            except OSError as error:
                self._console.say(f"the timeline could not be written: {error}")

    def _discard_empty_fault_files(self) -> None:
        for attempt in self._result.attempts:
            for path in attempt.paths.error_files.values() if attempt.paths is not None else ():
                discard_empty_fault_file(path)

    # --- events ---

    def _take_in(self, supervisor: _core.Supervisor, event: _core.Event) -> None:
        _TRANSLATORS[type(event)](self, supervisor, event)
        # Those two count when the workers' side is ready as well.
        if not isinstance(event, (_core.GroupStarted, _core.GroupEnded)):
            self._observers.seen(event, self._result)

    def _take_signals(self, supervisor: _core.Supervisor | None) -> None:
        if self._signals is None:
            return
        for signum in self._signals.take():
            if signum == signal.SIGTSTP and signum not in self._job.signals:
                suspend(supervisor, self._signals)
            elif signum in self._job.forwarded:
                self._forward(supervisor, signum)
            elif self._requests.is_new(signum, time.monotonic()):
                self._events.append(machine.SignalReceived(signum))

    def _forward(self, supervisor: _core.Supervisor | None, signum: int) -> None:
        """Pass a signal on to workers that run. Those that are being started have no handlers yet, and
        nothing to save: it would only kill them.
        """
        name = texts.signal_name(signum)
        if supervisor is None or self._decisions.phase not in (machine.Phase.RUNNING, machine.Phase.STOPPING):
            self._console.say(f"{name} received: no workers run, so nobody gets it")
            return
        self._console.say(f"{name} received: passing it on to the workers")
        supervisor.forward(signum)

    def _on_fd(self, supervisor: _core.Supervisor, event: _core.FdReady) -> None:
        if self._signals is not None and event.fd == self._signals.fd:
            self._take_signals(supervisor)
            return
        if self._observers.fd_ready(event.fd):
            return
        actions = self._decisions.fd_ready(event.fd)
        if actions is None:
            self._workers.fd_ready(supervisor, event.fd)
            self._follow_workers()
        else:
            self._actions.extend(actions)

    def _on_started(self, supervisor: _core.Supervisor, event: _core.GroupStarted) -> None:
        attempt = self._result.attempts[-1]
        attempt.pids = event.pids
        self._begun = event
        self._workers.started(supervisor, attempt)
        self._follow_workers()

    def _follow_workers(self) -> None:
        """Go on when all workers run, or nothing is left: with other parents later than the core says."""
        if self._begun is not None and self._workers.are_started:
            begun, self._begun = self._begun, None
            self._run_begins(begun)
        if self._over is not None and (leftovers := self._workers.leftovers) is not None:
            over, self._over = self._over, None
            self._attempt_ends(over, leftovers)

    def _run_begins(self, event: _core.GroupStarted) -> None:
        attempt = self._result.attempts[-1]
        # A group that begins empty gets its workers later.
        attempt.stamps["started"] = event.started_ns if event.pids else time.monotonic_ns()
        attempt.oom_kills = oom_kills(attempt.pids)
        self._events.append(machine.Started())
        self._observers.seen(event, self._result)

    def _on_start_failed(self, supervisor: _core.Supervisor, event: _core.StartFailed) -> None:
        self._workers.ended(supervisor, self._result.attempts[-1])
        self._result.message, self._result.start_errno = event.message, event.errno
        self._events.append(machine.StartFailed(event.message, event.errno in _TRANSIENT))

    def _on_failure(self, _supervisor: _core.Supervisor, event: _core.FailureSeen) -> None:
        attempt = self._result.attempts[-1]
        attempt.first_failure = event.local_rank
        attempt.signalled = event.siblings
        attempt.stamps["failure_seen"] = event.seen_ns
        attempt.stamps["siblings_signalled"] = event.signalled_ns
        self._events.append(machine.FailureSeen(event.local_rank))

    def _on_timer(self, _supervisor: _core.Supervisor, event: _core.TimerExpired) -> None:
        _log_expired(self._job.run_id, event)
        if event.signal is not None:
            self._result.attempts[-1].expired.setdefault(event.local_rank, event)
        else:
            self._console.say(f"{self._who(event.local_rank, event.pid)}: {texts.timer_expired(event)}")

    def _on_hung(self, _supervisor: _core.Supervisor, event: _core.WorkerHung) -> None:
        self._result.attempts[-1].expired.setdefault(event.local_rank, event)

    def _on_raised(self, _supervisor: _core.Supervisor, event: _core.WorkerRaised) -> None:
        attempt = self._result.attempts[-1]
        attempt.raised.add(event.local_rank)
        if event.is_overdue:
            attempt.expired.setdefault(event.local_rank, event)

    def _on_exit(self, _supervisor: _core.Supervisor, event: _core.WorkerExited) -> None:
        self._result.attempts[-1].exits[event.local_rank] = event
        self._events.append(machine.WorkerExited(event.local_rank, event.exitcode))

    def _on_ended(self, supervisor: _core.Supervisor, event: _core.GroupEnded) -> None:
        attempt = self._result.attempts[-1]
        attempt.stamps["ended"] = event.ended_ns
        attempt.nursery_exitcode = event.nursery_exitcode
        attempt.nursery_hung = event.nursery_hung
        if self._job.hang_timeout is not None:
            attempt.heartbeats = supervisor.heartbeats()
        self._begun, self._over = None, event
        self._workers.ended(supervisor, attempt, has_succeeded=event.outcome == "succeeded")
        self._follow_workers()

    def _attempt_ends(self, event: _core.GroupEnded, leftovers: Leftovers) -> None:
        if self._workers.why_not_started is not None:
            self._result.message = self._workers.why_not_started
            self._events.append(machine.StartFailed(self._result.message))
        else:
            self._tell_end(event, leftovers)
        self._observers.seen(event, self._result)

    def _tell_end(self, event: _core.GroupEnded, leftovers: Leftovers) -> None:
        attempt = self._result.attempts[-1]
        for rank, channel in zip(event.stuck_ranks, event.wait_channels, strict=False):
            self._console.say(
                f"{self._who(rank)} did not end after SIGKILL (waits in {channel or 'the kernel'})"
            )
        for verb, left in (("could not end", event.stuck), ("left alone", event.spared)):
            self._name_descendants(verb, [(process.pid, process.command) for process in left])
        outcome = "stopped" if leftovers.was_stopped else event.outcome
        if outcome == "succeeded":
            ended = [*((process.pid, process.command) for process in event.ended), *leftovers.ended]
            self._name_descendants("ended", ended, event.more_ended + leftovers.more_ended)
            if self._has_silent(attempt, event):
                outcome = "failed"
        conflict = outcome == "failed" and is_port_conflict(attempt)
        stuck = tuple(event.stuck_ranks)
        self._events.append(machine.GroupEnded(outcome, stuck, conflict, self._unfit))

    def _has_silent(self, attempt: Attempt, event: _core.GroupEnded) -> bool:
        """Workers that only seemed to succeed have failed: an end in the middle is no result."""
        attempt.silent = frozenset(self._workers.silent_ranks())
        if not attempt.silent:
            return False
        attempt.first_failure = min(attempt.silent, key=lambda rank: attempt.exits[rank].seen_ns)
        attempt.stamps["failure_seen"] = event.ended_ns
        return True

    def _on_paused(self, _supervisor: _core.Supervisor, event: _core.WorkerPaused) -> None:
        name = texts.signal_name(event.signal)
        self._console.say(
            f"{self._who(event.local_rank, event.pid)} is stopped ({name}); waiting until it continues"
        )

    def _on_resumed(self, _supervisor: _core.Supervisor, event: _core.WorkerResumed) -> None:
        self._console.say(f"{self._who(event.local_rank, event.pid)} continues")

    def _on_log_trouble(self, _supervisor: _core.Supervisor, event: _core.LogTrouble) -> None:
        self._console.say(f"{self._who(event.local_rank)}: log file {event.path}: {os.strerror(event.errno)}")

    def _on_degraded(self, _supervisor: _core.Supervisor, event: _core.Degraded) -> None:
        self._console.say(event.message)

    def _on_fenced(self, _supervisor: _core.Supervisor, _event: _core.Fenced) -> None:
        self._actions.extend(self._decisions.fenced())

    def _name_descendants(self, verb: str, left: Sequence[tuple[int, str]], more: int = 0) -> None:
        if left:
            names = ", ".join(f"{pid} ({command})" for pid, command in left)
            names += f" and {more} more" if more else ""
            self._console.say(f"{verb} processes that workers left behind: {names}")

    def _who(self, local_rank: int, pid: int | None = None) -> str:
        rank = self._result.attempts[-1].plan.ranks[local_rank].global_rank
        return f"rank {rank}" if pid is None else f"rank {rank} (pid {pid})"


def suspend(supervisor: _core.Supervisor | None, signals: SignalPipe) -> None:
    """Control-Z: the workers are not in the terminal's process group, so they are stopped from here.

    Args:
        supervisor: of the workers, if there are any.
        signals: where the SIGTSTP was taken from.
    """
    if supervisor is not None:
        supervisor.suspend()
    try:
        signals.stop_this_process()
    finally:
        if supervisor is not None:
            supervisor.resume()


def _log_expired(run_id: str, event: _core.TimerExpired) -> None:
    """As torch's server does: programs put a function of their own there."""
    from elasticrs.timer import debug_info_logging
    from elasticrs.timer.file_based_local_timer import FileTimerRequest

    request = FileTimerRequest(event.pid, event.scope, event.deadline, event.signal or 0)
    try:
        debug_info_logging.log_debug_info_for_expired_timers(run_id, {event.pid: [request.to_json()]})
    except Exception:
        import logging

        logging.getLogger("elasticrs.agent").exception("log_debug_info_for_expired_timers failed")


_TRANSLATORS: dict[type, Callable[[Agent, _core.Supervisor, Any], None]] = {
    _core.GroupStarted: Agent._on_started,
    _core.StartFailed: Agent._on_start_failed,
    _core.FdReady: Agent._on_fd,
    _core.FailureSeen: Agent._on_failure,
    _core.TimerExpired: Agent._on_timer,
    _core.WorkerHung: Agent._on_hung,
    _core.WorkerRaised: Agent._on_raised,
    _core.WorkerExited: Agent._on_exit,
    _core.GroupEnded: Agent._on_ended,
    _core.Fenced: Agent._on_fenced,
    _core.WorkerPaused: Agent._on_paused,
    _core.WorkerResumed: Agent._on_resumed,
    _core.LogTrouble: Agent._on_log_trouble,
    _core.Degraded: Agent._on_degraded,
}
