"""The event loop of the agent. It passes events to a :class:`.Decisions` object, and executes the actions.

Its :class:`.AttemptTracker` records what happens to the workers. Only the tracker's ``wait`` blocks.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from functools import partial

from elasticrs._engine.job import phrases
from elasticrs._engine.job.config import control_folder_from
from elasticrs._engine.job.restart_policy import Verdict
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.process.console import END_PATIENCE, Console
from elasticrs._engine.process.signals import RELAY, StopRequests, how_to_hasten, suspend
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.run.tracker import AttemptTracker
from elasticrs._engine.workers.plan import KEEP_OFF, MemoryFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from elasticrs import _core
    from elasticrs._engine.gpus.node_check import NodeCheck, NodeCheckResult
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.process.signals import SignalPipe
    from elasticrs._engine.supervise.attempt import Attempt, JobResult
    from elasticrs._engine.supervise.decide.decisions import Decisions
    from elasticrs._engine.supervise.observe.observer import Observer
    from elasticrs._engine.supervise.run.agreed_step import AgreedSteps, Tell
    from elasticrs._engine.supervise.run.keeping import Keeping
    from elasticrs._engine.supervise.run.orders import Orders
    from elasticrs._engine.supervise.run.worker_states import Sleepers
    from elasticrs._engine.supervise.run.workers import Workers
    from elasticrs._engine.workers.node_page import CheckpointRequests

_NEVER = float("inf")
_AGREEMENT_TICK = 0.25
"""Seconds between two looks, after a restart, whether all workers have chosen what to restore."""

_AFTER_START = 0.005
"""Seconds after the workers' first start in which the agent does nothing but wait for them."""

_SAVE_LIMIT = 600.0
"""Maximum seconds for saving the kept training state of a failed job. Only the user waits for that."""


def _import_for_cause() -> None:
    try:
        import json  # noqa: F401
    except OSError:
        # No file descriptor is free for this import. The code that imports the module later handles that.
        return


class Agent:
    """Runs a job on this node. ``checkpoints`` is ``None`` unless failed workers are replaced."""

    def __init__(
        self,
        job: JobSpec,
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
        self._begun_ns = time.monotonic_ns()
        self._control: _core.HealthServer | None = None
        self._unasked: _core.HealthServer | None = None
        self._orders: Orders | None = None
        if owns_process:
            decisions.serve = self._take_call
        self._console = console or Console()
        self._tracker = AttemptTracker(
            self, job, workers, self._console, observers, owns_process=owns_process
        )
        self.result = self._tracker.result
        self.result.read_history, self.result.find_overdue = decisions.read_history, decisions.find_overdue
        self.result.shared_cause, self.result.node_names = decisions.shared_cause, decisions.node_names
        self.result.others_running = lambda: decisions.others_running
        self.result.waits_for = self._waits_for
        self.result.is_ending = lambda: decisions.is_ending
        self.result.ask_others = lambda: self._make_orders().ask_others()
        self.result.others = lambda: [] if self._orders is None else self._orders.others()
        self._events = self._tracker.events
        self._actions: deque[machine.Action] = deque()
        self._requests = StopRequests()
        self.checkpoints: CheckpointRequests | None = None
        self._memory: MemoryFiles | None = None
        self._keeping: Keeping | None = None
        self._begin_later: tuple[float, machine.Start, Attempt] | None = None
        self._agreed: AgreedSteps | None = None
        self._early: dict[int, Tell | None] = {}
        """Signals to pass on that arrived while the workers were being started."""
        self._tell_stop: Tell | None = None
        self._stop_order, self._is_asked_to_stop = "", False
        self._error: Exception | None = None
        self._delayed_until = _NEVER
        self._is_prepared = False
        self._checking: tuple[NodeCheck, machine.GroupEnded] | None = None
        # Periodic work. Each function does what is due, and returns the seconds until the next call.
        self._duties: list[Callable[[], float]] = [
            decisions.seconds_left,
            self._end_delay,
            self._prepare,
            self._begin_while_starting,
            self._deliver_held,
        ]
        if job.uninterruptible_state_timeout > 0:
            from elasticrs._engine.supervise.run.worker_states import Sleepers

            sleepers = Sleepers(job.uninterruptible_state_timeout)
            self._duties.append(partial(self._look_for_sleepers, sleepers))

    def run(self) -> JobResult:
        """Run the job to its end, including failures of workers. Raises ``SupervisorError`` (all workers have
        been stopped), ``OSError`` (no free file descriptor, or an old kernel), and exceptions of the user's
        code.
        """
        try:
            result = self._run()
        except BaseException as error:
            self._tracker.observers.ended(self.result, error)
            raise
        self._tracker.observers.ended(result, None)
        return result

    def _run(self) -> JobResult:
        self._take_signals(None)
        unfit = self._check_before_joining()
        self._events.append(machine.Begin())
        try:
            if unfit is not None:
                self.result.message, self.result.verdict = unfit, Verdict.UNFIT
                self.result.phase, self.result.exit_code = machine.Phase.FAILED, 1
            elif not self._events_end_it():
                self._tracker.open(None if self._signals is None else self._signals.fd)
                self._decisions.open(self._tracker.supervisor)
                self._open_checkpoints()
                self._open_memory()
                self._open_control()
                self._drive()
        finally:
            if self._control is not None:
                self._control.close_control()
            if self._checking is not None:
                self._checking[0].cancel()
                self._checking[0].finish()
            try:
                self._decisions.release_plan()
            finally:
                try:
                    self._tracker.close()
                finally:
                    self._close_checkpoints()
                    if self._memory is not None:
                        self._memory.close()
                    self._decisions.close()
        self._console.flush(END_PATIENCE)
        if self._error is not None:
            raise self._error
        attempts = self.result.attempts
        if self.result.exit_code == 0 and self.result.has_taken_part and attempts:
            # Unpickle the return values last, because unpickling may raise an exception.
            self.result.return_values = self._workers.return_values(attempts[-1])
        return self.result

    def _events_end_it(self) -> bool:
        """Return true if a signal has already ended the job, which then needs no supervisor."""
        first = self._events[0]
        if not isinstance(first, machine.SignalReceived):
            return False
        for action in self._decisions.step(first):
            if isinstance(action, machine.Exit):
                self._finish(action)
        return self._decisions.phase.is_terminal

    def _check_before_joining(self) -> str | None:
        """Run ``--node-check`` before this node joins the job. Return why this node is unfit, if it is."""
        check = None if self._events else self._new_check()
        if check is None:
            return None
        poll = select.poll()
        poll.register(check.fd, select.POLLIN)
        if self._signals is not None:
            poll.register(self._signals.fd, select.POLLIN)
        while not any(fd == check.fd for fd, _ in poll.poll()):
            self._take_signals(None)
            if self._events:
                check.cancel()
        results = check.finish()
        if self._events and isinstance(first := self._events[0], machine.SignalReceived):
            self._console.say(f"{phrases.signal_name(first.signum)} received: the node check was cancelled")
            return None
        unfit = self._reported(results)
        return None if unfit is None else f"{unfit}; this node does not join the job"

    def _new_check(self) -> NodeCheck | None:
        if not self._job.node_check:
            return None
        from elasticrs._engine.gpus.node_check import NodeCheck
        from elasticrs._engine.job.config import HealthSource

        try:
            sources = [HealthSource.parse(text) for text in self._job.node_check]
            return NodeCheck(sources, self._job.node_check_timeout)
        except (OSError, RuntimeError) as error:
            self._console.say(f"the node check could not be started: {error}; this check counts as passed")
            return None

    def _reported(self, results: Sequence[NodeCheckResult]) -> str | None:
        """Print the output of checks that did not pass. Return why this node is unfit, if a check says so."""
        for result in results:
            if result.unfit is not None or result.problem is not None:
                for line in result.lines:
                    self._console.say(f"{result.title}: {line}")
            if result.problem is not None and self._decisions.signum is None:
                self._console.say(f"{result.problem}; this check counts as passed")
        return "; ".join(result.unfit for result in results if result.unfit is not None) or None

    def _is_held_for_check(self, event: machine.Event) -> bool:
        """Start the node check after a failure. Return true if the event must wait for its result."""
        match event:
            case machine.GroupEnded(why_unfit=None, outcome=outcome) if outcome in ("failed", "lost") or (
                outcome == "stopped" and self._decisions.failed_elsewhere
            ):
                check = None if self._decisions.signum is not None else self._new_check()
                if check is not None:
                    self._checking = check, event
                    self._tracker.supervisor.watch_fd(check.fd)
                    return True
        return False

    def _take_check(self, check: NodeCheck, event: machine.GroupEnded) -> None:
        self._checking = None
        self._tracker.supervisor.unwatch_fd(check.fd)
        unfit = self._reported(check.finish())
        self._actions.extend(self._decisions.step(event.replaced(found_unfit=unfit)))

    def _drive(self) -> None:
        while True:
            while self._events or self._actions:
                if not self._actions:
                    event = self._events.popleft()
                    if self._agreed is not None and self._agreed.is_asking:
                        self._agreed.see(event)
                    if not self._is_held_for_check(event):
                        self._actions.extend(self._decisions.step(event))
                    if self._early and self._decisions.phase is not machine.Phase.STARTING:
                        early, self._early = self._early, {}
                        for signum, tell in early.items():
                            self.pass_on(signum, tell)
                    continue
                action = self._actions.popleft()
                self._tracker.observers.acting(action, self._decisions.plan)
                if isinstance(action, machine.Exit):
                    self._finish(action)
                    self._tracker.drain()
                    return
                self._carry_out(action)
            if not self._tracker.wait(min([duty() for duty in self._duties])):
                self._take_signals(self._tracker.supervisor)
                self._actions.extend(self._decisions.look_around())
                self._tracker.observers.quiet()

    def _prepare(self) -> float:
        """Import, after the first failure, what describing its cause needs. This makes restarts faster."""
        attempts = self._tracker.result.attempts
        if not self._is_prepared and attempts and attempts[-1].first_failure is not None:
            self._is_prepared = True
            # Import on another thread: Python searches the working directory, whose file system may hang.
            FileAccess().begin(_import_for_cause)
        return _NEVER

    def _waits_for(self) -> str | None:
        left = self._delayed_until - time.monotonic()
        if left < _NEVER:
            return f"the end of the restart delay (for at most {phrases.duration(max(0.0, left))})"
        return self._decisions.waits_for()

    def _end_delay(self) -> float:
        left = self._delayed_until - time.monotonic()
        if left <= 0:
            self._delayed_until = _NEVER
            self._events.append(machine.DelayOver())
        return max(0.0, left)

    def _open_checkpoints(self) -> None:
        if self._job.on_failure == "replace":
            from elasticrs._engine.supervise.observe.slow_workers import SlowWorkerCheck
            from elasticrs._engine.workers.node_page import CheckpointRequests

            self.checkpoints = CheckpointRequests(self._job.nproc, self._console.say)
            self._tracker.supervisor.watch_fd(self.checkpoints.fd)
            check = SlowWorkerCheck(
                self.checkpoints.page, self._console.say, self._tracker.observers.training
            )
            self._duties += [self.checkpoints.look, check.look]

    def ask_for_checkpoint(self, checkpoints: CheckpointRequests) -> None:
        """Request a checkpoint through shared memory, because a signal kills workers that do not train."""
        if not checkpoints.are_open:
            self._console.say(phrases.checkpoint_requested(signal.SIGUSR1))
        checkpoints.ask()

    def _close_checkpoints(self) -> None:
        checkpoints, self.checkpoints = self.checkpoints, None
        if checkpoints is not None:
            checkpoints.look()
            has_ended = self.result.signum is None and any(each.pids for each in self.result.attempts)
            if has_ended and not checkpoints.page.was_used:
                self._console.say(phrases.NOBODY_TRAINED)
            if checkpoints.are_open:
                self._console.say(phrases.CHECKPOINT_NOT_MADE)
            checkpoints.close()

    def _open_control(self) -> None:
        """Open this agent's Unix socket for ``elasticctl``, unless another program runs the agent. The health
        check server serves the socket, if there is one. Otherwise, start a server without a TCP port.
        """
        folder = control_folder_from(os.environ)
        if not self._owns_process or not folder:
            return
        tracker = self._tracker
        try:
            server = tracker.observers.control_server(self._take_orders)
            if server is None:
                age = (time.monotonic_ns() - self._begun_ns) / 1e9
                server = self._unasked = tracker.control_server(self._job.health_check_timeout, age)
            server.open_control(folder, tracker.supervisor)
        # An error in the code that serves elasticctl must not end the job.
        except Exception as error:
            why = error.strerror or error if isinstance(error, OSError) else repr(error)
            self._console.say(f"no control socket in {folder}: {why}; elasticctl cannot reach this job")
            return
        self._control = server

    def _take_orders(self, server: _core.HealthServer) -> None:
        self._make_orders().take(server)

    def _answer_first(self, native: _core.HealthServer) -> None:
        """Start publishing the job's status, because the first request of ``elasticctl`` has arrived."""
        from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
        from elasticrs._engine.supervise.observe.job_health import HealthObserver

        self._unasked = None
        server = HealthCheckServer(time.time, None, self._job.health_check_timeout)
        server.open(native)
        try:
            observer = HealthObserver(self._job, server, self._console.say)
            observer.catch_up(self._tracker.supervisor, self.result)
            observer.control_server(self._take_orders)
        # An error in the code that serves elasticctl must not end the job.
        except Exception as error:
            self._console.say(f"elasticctl cannot reach this job any more: {error!r}")
            self._tracker.supervisor.unwatch_fd(native.fd)
            server.stop()
            return
        self._tracker.observers.add_first(observer)

    def _make_orders(self) -> Orders:
        from elasticrs._engine.supervise.run.orders import Orders

        if self._orders is None:
            self._orders = Orders(self, self._job, self._tracker, self._decisions, self._console.say)
        return self._orders

    def _take_call(self, order: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        """Carry out this node's part of an order that ``elasticctl`` has sent to another node's agent."""
        self._make_orders().take_call(order, answer)

    def ask_to_stop(self, event: machine.SignalReceived, tell: Tell | None = None) -> None:
        """Stop the job. A second request kills the workers.

        Args:
            event: the request.
            tell: function that is called once when the workers get the signal, but not if no workers run.
        """
        self._tell_stop, self._stop_order = tell, event.order
        if event.order:
            self._requests.note_order(time.monotonic())
        attempt = self._tracker.attempt
        kills = event.now and attempt is not None and not attempt.has_ended
        if kills or not self._is_asked_to_stop or (event.ends_job and self._decisions.leaves):
            self.result.order, self.result.was_killed = event.order, kills
        self._is_asked_to_stop = True
        self._events.append(event)
        self._tracker.stop_waiting()
        if self._checking is not None:
            self._checking[0].cancel()

    def _look_for_sleepers(self, sleepers: Sleepers) -> float:
        """Stop the job if a worker hangs in the kernel; see :mod:`.worker_states`."""
        tracker, attempt = self._tracker, self._tracker.attempt
        if attempt is None or tracker.why_unfit is not None or attempt.has_ended:
            return sleepers.interval
        overdue = sleepers.look(attempt.running())
        if overdue:
            tracker.why_unfit = phrases.asleep(overdue, self._job.uninterruptible_state_timeout)
            self._console.say(f"{tracker.why_unfit}; stopping the workers")
            tracker.stop(machine.Stop(signal.SIGTERM, self._job.shutdown_timeout))
        return sleepers.interval

    def _carry_out(self, action: machine.Action) -> None:
        if isinstance(action, machine.Rendezvous):
            if (event := self._decisions.next_plan(self._tracker.supervisor)) is not None:
                self._events.append(event)
            else:
                self._tracker.observers.waiting()
        elif isinstance(action, machine.Delay):
            self._delayed_until = time.monotonic() + action.seconds
            self.result.attempts[-1].delay = action.seconds
        elif isinstance(action, machine.Start):
            self._start(action)
        elif isinstance(action, machine.Stop):
            if not action.is_announced:
                attempt = self._tracker.attempt
                have_exited = attempt is not None and attempt.has_ended
                asked = self._decisions.signum
                line = phrases.stop_line(
                    asked,
                    action.signum,
                    action.grace,
                    have_exited=have_exited,
                    order=self._stop_order,
                    again=how_to_hasten(action.signum),
                )
                self._console.say(line)
            self._stop(action)
        elif isinstance(action, machine.Replace):
            self._tracker.replace(action)
        elif isinstance(action, machine.ReportFailure):
            self.result.message = action.message
            self.result.verdict = action.verdict
            self.result.is_outside = action.is_outside

    def _stop(self, action: machine.Stop) -> None:
        tell, self._tell_stop = self._tell_stop, None
        if self._agreed is not None:
            self._agreed.stop(action, tell)
            return
        self._tracker.stop(action)
        self._tell_at_once(action.signum, tell)

    def _tell_at_once(self, signum: int, tell: Tell | None) -> None:
        if tell is not None:
            from elasticrs._engine.supervise.run.agreed_step import Delivery

            agree = "with --on-failure replace, the workers agree on a step themselves"
            why = "the workers have just been started" if self.checkpoints is None else agree
            tell(Delivery(signum, at_once=why))

    def pass_on(self, signum: int, tell: Tell | None = None) -> None:
        """Send a signal to the workers without stopping the job; see :meth:`.AgreedSteps.pass_on`. Call
        ``tell`` once, when the signal is sent. If workers are being started, store the signal and send it
        when all of them run.
        """
        if self._decisions.phase is machine.Phase.STARTING:
            self._early[signum] = tell
            return
        if self._agreed is not None:
            self._agreed.pass_on(signum, tell)
            return
        self._tracker.forward(signum, are_running=self._decisions.phase.has_workers)
        self._tell_at_once(signum, tell)

    def holds(self, signum: int) -> bool:
        """Return true if this signal is being held back until all ranks have made the same step."""
        return self._agreed is not None and self._agreed.is_held(signum)

    def _deliver_held(self) -> float:
        """Send a delayed signal to the workers if it is due. Return the seconds until the next call."""
        agreed = self._agreed
        return _NEVER if agreed is None or not agreed.is_asking else agreed.seconds_left()

    def _start(self, action: machine.Start) -> None:
        plan = self._decisions.plan
        if plan is None:
            raise RuntimeError("workers are started without a rendezvous")
        if self.checkpoints is not None:
            plan.variables = {**plan.variables, **self.checkpoints.variables}
            plan.page = self.checkpoints.page
        if self._memory is not None:
            plan.keep_places = self._memory.places
        # At the first start, there is nothing to restore unless an earlier job has saved its state. So tell
        # the workers what to restore (their plans) only while they are starting, which delays nothing.
        is_fresh = self._keeping is None and not self._job.keep_save
        attempt = self._tracker.begin(action, plan)
        if not is_fresh:
            self._keep(action, attempt)
        self._begin_later = None
        if is_fresh or self._agreed is None:
            self._begin_later = time.monotonic() + _AFTER_START, action, attempt
        self._decisions.observe(attempt)
        try:
            self._tracker.start(attempt)
        except Exception as error:
            if not self._job.has_peers:
                raise
            # Report the failure to the other nodes first, and raise the exception after the loop.
            self._error = error
            self._tracker.not_started(f"{type(error).__name__}: {error}")

    def _begin_while_starting(self) -> float:
        """Do what the workers need only when they train, soon after their start. So it delays neither their
        start nor a job that ends at once.
        """
        if self._begin_later is None:
            return _NEVER
        due, action, attempt = self._begin_later
        if (left := due - time.monotonic()) > 0:
            return left
        self._begin_later = None
        if not attempt.has_ended:
            if self._keeping is None:
                self._keep(action, attempt)
            self._open_agreed()
        return _NEVER

    def _open_agreed(self) -> None:
        if self._agreed is not None or self.checkpoints is not None:
            return
        from elasticrs._engine.supervise.run.agreed_step import AgreedSteps

        self._agreed = AgreedSteps(self._tracker, self._decisions, self._job, self._console.say)

    def _open_memory(self) -> None:
        try:
            self._memory = MemoryFiles(self._job.nproc)
        except OSError as error:
            self._console.say(KEEP_OFF.format(error.strerror or error))

    def _keep(self, action: machine.Start, attempt: Attempt) -> None:
        """Tell the workers of an attempt which training state, of those kept in memory, to restore."""
        if self._memory is None:
            return
        if self._keeping is None:
            from elasticrs._engine.supervise.run.keeping import Keeping

            self._keeping = Keeping(self._job, self._memory, self._console.say)
            self._duties.append(partial(self._look_for_agreement, self._keeping))
            self._tracker.observers.memory_opened(self._memory.fds)
        attempt.kept = self._keeping.begin(action.round, attempt.plan, self._decisions.read_history())
        attempt.keep_files = self._keeping.files

    def _look_for_agreement(self, keeping: Keeping) -> float:
        attempt = self._tracker.attempt
        if attempt is None or attempt.has_ended:
            return _NEVER
        return _AGREEMENT_TICK if keeping.take_agreed(attempt) else _NEVER

    def _finish(self, action: machine.Exit) -> None:
        self._decisions.release_plan()
        self._tracker.tidy_up()
        self.result.phase = self._decisions.phase
        self.result.exit_code = action.code
        self.result.has_taken_part = self._decisions.has_taken_part
        self.result.signum = self._decisions.signum
        self.result.first_cause = self._decisions.first_cause
        self.result.clock = self._decisions.clock
        if self._keeping is not None and self.result.attempts:
            self._keeping.take_agreed(self.result.attempts[-1])
        if self._keeping is not None and self.result.phase is not machine.Phase.SUCCEEDED:
            self._end_keeping(self._keeping, is_failure=self.result.phase is machine.Phase.FAILED)
        if self._keeping is not None:
            self._keeping.release(has_succeeded=self.result.phase is machine.Phase.SUCCEEDED)

    def _end_keeping(self, keeping: Keeping, *, is_failure: bool) -> None:
        """Save the kept training state for the next job (``--keep-save``). If the job has failed, have its
        report say which step is kept.
        """
        kept = keeping.at_end(self._decisions.read_history()) if is_failure or self._job.keep_save else None
        limit = _SAVE_LIMIT if is_failure else self._job.shutdown_timeout
        folder = keeping.save(kept, limit, self._is_interrupted)
        if is_failure:
            self.result.kept = kept and kept.replaced(folder=folder, has_folder=bool(self._job.keep_save))
        # The final report of a failed job names the step that it has chosen.
        if not folder and not (is_failure and kept):
            keeping.say_what_is_gone(leaves=self._decisions.leaves)

    def _is_interrupted(self, fd: int, seconds: float) -> bool:
        """Wait until a file descriptor is readable. Return true if it is not after ``seconds``, or if the
        user has asked a second time to stop the job.
        """
        poll, until = select.poll(), time.monotonic() + seconds
        is_asked = self.result.phase is machine.Phase.STOPPED
        poll.register(fd, select.POLLIN)
        if self._signals is not None:
            poll.register(self._signals.fd, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = [each for each, _ in poll.poll(1000 * left)]
            if fd in ready:
                return False
            for signum in self._signals.take() if self._signals is not None and ready else ():
                now = time.monotonic()
                if signum in self._job.signals and self._requests.is_new(signum, now):
                    if is_asked:
                        return True
                    is_asked, until = True, min(until, now + self._job.shutdown_timeout)
        return True

    def on_fd(self, fd: int, *, is_over: bool) -> bool:
        if self._signals is not None and fd == self._signals.fd:
            self._take_signals(None if is_over else self._tracker.supervisor)
            return True
        if self.checkpoints is not None and fd == self.checkpoints.fd:
            self.checkpoints.take()
            return True
        if self._unasked is not None and fd == self._unasked.fd:
            self._answer_first(self._unasked)
            return True
        if self._checking is not None and fd == self._checking[0].fd:
            self._take_check(*self._checking)
            return True
        actions = None if is_over else self._decisions.fd_ready(fd)
        self._actions.extend(actions or ())
        return actions is not None

    def on_fence(self) -> None:
        self._actions.extend(self._decisions.fenced())

    def _take_signals(self, supervisor: _core.Supervisor | None) -> None:
        if self._signals is None:
            return
        for signum in self._signals.take():
            if signum == signal.SIGTSTP and signum not in self._job.signals:
                suspend(supervisor, self._signals)
            elif signum == signal.SIGUSR1 and self.checkpoints is not None and signum in self._job.forwarded:
                self.ask_for_checkpoint(self.checkpoints)
            elif signum in self._job.forwarded:
                self.pass_on(signum)
            elif self._requests.is_new(signum, now := time.monotonic()):
                self.ask_to_stop(machine.SignalReceived(signum))
            elif (after := self._requests.repeated_after(signum, now)) is not None:
                self._console.say(phrases.repeated(signum, after, RELAY))
