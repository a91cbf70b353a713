"""Starts the workers of a job, one attempt at a time, and records the core's events. It decides nothing."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from functools import partial

from elasticrs import _core
from elasticrs._engine import public
from elasticrs._engine.failures.failure import discard_unused_files, last_bytes
from elasticrs._engine.gpus import are_gpus_visible
from elasticrs._engine.job import phrases
from elasticrs._engine.process.background_call import FILE_LIMIT, FileAccess
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.attempt import Attempt, JobResult, oom_kills
from elasticrs._engine.supervise.failed_attempt import (
    early_leavers,
    is_collective_failure,
    reports_lost_peer,
)
from elasticrs._engine.supervise.observe.observer import Observers, Outliner, TerminalReporter
from elasticrs._engine.supervise.run.workers import (
    prepare_group,
    prepare_replacement,
    warm_nursery,
    watch_hangs,
    watch_timers,
)
from elasticrs._engine.workers.event_log import Silent, Stamp
from elasticrs._engine.workers.logs import attempt_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol

    from elasticrs._engine.hangs.culprits import Blame, Diagnosis
    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.supervise.observe.observer import Observer
    from elasticrs._engine.supervise.run.gpu_watcher import GpuWatcher
    from elasticrs._engine.supervise.run.worker_states import PassedSignals
    from elasticrs._engine.supervise.run.workers import Leftovers, Workers
    from elasticrs._engine.workers.logs import LogPaths
    from elasticrs._engine.workers.plan import Plan
    from elasticrs._engine.workers.warm.import_report import Warming

    class Owner(Protocol):
        """Handles events outside of an attempt, such as the expiry of the node's lease."""

        def on_fd(self, fd: int, *, is_over: bool) -> bool:
            """Return false if the descriptor does not belong to this object."""

        def on_fence(self) -> None: ...


_TRANSIENT = frozenset((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT))
_NO_PROGRAM = frozenset((
    *(errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP),
    # The mount is gone, or the file server has failed.
    *(errno.ESTALE, errno.EIO, errno.ENOTCONN),
))  # fmt: skip
"""Errors for which this node cannot execute the program, although other nodes may be able to."""

GENEROUS = 1800.0
"""Minimum time limit for a training step, in seconds, after a worker has exceeded a learned time limit."""

DRAIN_TIMEOUT = 10.0
"""Seconds to wait for a slow console at the end. The log files are complete even if the console is not."""


class AttemptTracker:
    """Starts the attempts of a job and records their events. The owner takes them out of ``events``."""

    def __init__(
        self,
        owner: Owner,
        job: JobSpec,
        workers: Workers,
        console: Console,
        observers: Sequence[Observer],
        *,
        owns_process: bool = False,
    ) -> None:
        self._owner = owner
        self._job = job
        self._workers = workers
        self._console = console
        self._owns_process = owns_process
        self._replaces = job.on_failure == "replace"
        self._restarts = 0
        self._is_generous = False
        self._passed: PassedSignals | None = None
        self.result = JobResult()
        self.events: deque[machine.Event] = deque()
        reporter = TerminalReporter(job, self.result, console.say, owns_process=owns_process)
        self._gpus: GpuWatcher | None = None
        if are_gpus_visible(os.environ):
            from elasticrs._engine.supervise.run.gpu_watcher import GpuWatcher

            self._gpus = GpuWatcher(job, self.result, console.say)
            observers = (self._gpus, *observers)
        self.observers = Observers((reporter, *observers), console.say)
        if job.preload is not None:
            for remark in job.preload.remarks:
                console.say(f"warm: {remark}")
        if workers.follower is not None:
            cold = " without preloaded modules" if job.preload is not None else ""
            console.say(f"{workers.follower.name} follows the workers: each starts under it{cold}")
        elif workers.unfollowed is not None:
            console.say(
                f"a profiler has replaced sys.executable with {workers.unfollowed}; it does not follow these"
                " workers, because they call a function; start a script instead, without --run-path"
            )
        self.why_unfit: str | None = None
        self._supervisor: _core.Supervisor | None = None
        self._warming: Warming | None = None
        self._extra: dict[str, str] = {}
        self._begun: _core.GroupStarted | None = None
        self._over: _core.GroupEnded | None = None

    @property
    def attempt(self) -> Attempt | None:
        return self.result.attempts[-1] if self.result.attempts else None

    @property
    def is_open(self) -> bool:
        return self._supervisor is not None

    @property
    def supervisor(self) -> _core.Supervisor:
        if self._supervisor is None:
            raise RuntimeError("there is no supervisor")
        return self._supervisor

    def open(self, fd: int | None) -> None:
        """Create the supervisor, which also watches the file descriptor ``fd``."""
        warm = None
        if self._workers.warm_command is not None:
            from elasticrs._engine.workers.warm.import_report import Warming

            self._warming = Warming(self._console.say, self._job.warm_timeout)
            warm = warm_nursery(self._workers, self._warming.report)
        self._supervisor = supervisor = _core.Supervisor(owns_process=self._owns_process, warm=warm)
        if fd is not None:
            supervisor.watch_fd(fd)
        self._extra = watch_timers(self._workers.setup, supervisor)
        self.observers.opened(supervisor, self.result)

    def control_server(self, limit: float, age: float) -> _core.HealthServer:
        """Create a server for ``elasticctl``, without a TCP port. Its thread starts at the first request.

        Args:
            limit: seconds after which a loop that does not respond counts as stuck.
            age: seconds since the agent began.
        """
        server = _core.HealthServer("", None, limit, age)
        server.show(self.supervisor, is_asked=True)
        outliner = Outliner(self._job, server)
        self.supervisor.watch_fd(server.fd)
        self.observers.add_first(outliner)
        return server

    def close(self) -> None:
        """Kill the remaining processes and close the supervisor. Idempotent."""
        try:
            if self._supervisor is not None:
                may_go_on = self._job.linger is None and self.result.exit_code == 0
                self._supervisor.close(keep_descendants=may_go_on)
                self._hear_out()
                self._supervisor = None
        finally:
            if self._gpus is not None:
                self._gpus.close()
            self._workers.close()
            if self._warming is not None:
                self._warming.close()

    def begin(self, action: machine.Start, plan: Plan) -> Attempt:
        is_again = any(earlier.restarts == action.restarts for earlier in self.result.attempts)
        name = f"{action.restarts}_r{action.round}" if is_again else str(action.restarts)
        if self._job.is_multi_node:
            name = attempt_name(action.restarts, action.round)
        files = FileAccess(self._tell_slow_files)
        attempt = Attempt(action.round, action.restarts, plan, name, replaces=self._replaces, files=files)
        attempt.append(Stamp("planned", time.monotonic_ns()))
        self.result.attempts.append(attempt)
        self.result.start_errno = None
        self._begun = self._over = None
        return attempt

    def _tell_slow_files(self) -> None:
        self._console.say(
            f"the files of the workers could not be read within {FILE_LIMIT:g} s: their file system does not"
            " respond; continuing without what they say about the failure"
        )

    def start(self, attempt: Attempt) -> None:
        """Start all workers, or none. A later event tells which. Raise if a function cannot be pickled."""
        if self._warming is not None:
            self._workers.may_fork = self._warming.may_fork(self.supervisor)
        self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        supervisor = self.supervisor
        try:
            group = prepare_group(self._workers, supervisor, attempt, self._extra)
            self.observers.prepared(attempt)
            supervisor.start(group)
        except BaseException as error:
            self.observers.started()
            self._workers.ended(supervisor)
            if not isinstance(error, (OSError, _core.SupervisorError)):
                raise
            self.not_started(str(error), isinstance(error, OSError) and error.errno in _TRANSIENT)
        else:
            self.observers.started()

    def not_started(self, why: str, is_transient: bool = False) -> None:
        """Record why the workers did not start. ``is_transient``: another attempt may succeed soon."""
        self.result.message = f"{phrases.NOT_STARTED}: {why}"
        self.events.append(machine.StartFailed(self.result.message, is_transient))

    def replace(self, action: machine.Replace) -> None:
        attempt, rank, self._restarts = self.result.attempts[-1], action.local_rank, action.restarts
        try:
            process = prepare_replacement(
                self._workers, self.supervisor, attempt, rank, action.restarts, self._console.say
            )
            self.supervisor.replace(process)
        except (OSError, _core.SupervisorError) as error:
            self._not_replaced(rank, str(error))

    def _not_replaced(self, local_rank: int, why: str) -> None:
        self._console.say(f"{self._who(local_rank)} could not be replaced: {why}; stopping all workers")
        self.events.append(machine.ReplaceFailed(local_rank))

    def stop(self, action: machine.Stop) -> None:
        if self.attempt is not None and "stopped" not in self.attempt.stamps:
            self.attempt.append(Stamp("stopped", time.monotonic_ns()))
        policy, hung = _core.StopPolicy(action.signum, action.grace), action.hung
        if hung is None:
            self.supervisor.stop(policy)
        else:
            self.supervisor.stop(policy, hung_for=hung.silence, hung_step=hung.step, hung_frame=hung.frame)
        self._workers.stop()
        self._follow_workers()

    def stop_waiting(self) -> None:
        """Stop waiting for free device memory, because the user wants the job to stop."""
        if self._gpus is not None:
            self._gpus.stop_waiting()
            self._follow_workers()

    def forward(self, signum: int, *, are_running: bool) -> Sequence[int]:
        """Pass a signal on to the running workers. Return the local ranks that have not got the signal,
        because they have no handler for it. Ignore the signal if no workers are running.
        """
        if not are_running or self.attempt is None:
            name = phrases.signal_name(signum)
            self._console.say(f"{name} received and ignored: no workers are running")
            return ()
        if self._passed is None:
            from elasticrs._engine.supervise.run.worker_states import PassedSignals

            self._passed = PassedSignals(self.supervisor.forward, self._console.say)
        return self._passed.pass_on(signum, self.attempt.running())

    def drain(self) -> None:
        """Wait for the console, at most :data:`DRAIN_TIMEOUT`, and handle the supervisor's last events."""
        left = self.supervisor.drain(DRAIN_TIMEOUT)
        if left:
            files = ", ".join(stream.path for stream in left)
            self._console.say(
                f"the console did not accept all output within {DRAIN_TIMEOUT:g} s; see {files}"
            )
        # Many problems with log files are detected only at the last read.
        self._hear_out()

    def _hear_out(self) -> None:
        while (event := self.supervisor.next_event(0.0)) is not None:
            if isinstance(event, (_core.LogTrouble, _core.Degraded)):
                _RECORDERS[type(event)](self, event)
            elif isinstance(event, _core.FdReady) and not self._owner.on_fd(event.fd, is_over=True):
                # Nobody reads from this descriptor any more. It would stay readable, and wake the loop again.
                self.supervisor.unwatch_fd(event.fd)

    def tidy_up(self) -> None:
        """Remove empty crash files and unused FIFOs."""
        for attempt in self.result.attempts:
            attempt.files.run(partial(_discard_unused_files, attempt.paths), None)

    def wait(self, seconds: float | None) -> bool:
        """Wait for an event from the supervisor and handle it. Return false if no event arrived."""
        left = None
        if self._passed is not None and self.attempt is not None:
            left = self._passed.look(self.attempt.running())
        held = None if self._gpus is None else self._gpus.seconds_left()
        seconds = min((limit for limit in (seconds, left, held) if limit is not None), default=None)
        event = self.supervisor.next_event(seconds)
        if event is None:
            self._follow_workers()
            return False
        if isinstance(event, _core.FdReady):
            self._on_fd(event.fd)
        elif isinstance(event, _core.Fenced):
            self._owner.on_fence()
        else:
            _RECORDERS[type(event)](self, event)
        return True

    def _on_fd(self, fd: int) -> None:
        if not self.observers.fd_ready(fd) and not self._owner.on_fd(fd, is_over=False):
            self._workers.fd_ready(self.supervisor, fd)
        self._follow_workers()

    def _on_started(self, event: _core.GroupStarted) -> None:
        attempt = self.result.attempts[-1]
        attempt.append(event, _core.GroupStarted)
        self._begun = event
        self._workers.started(self.supervisor, attempt)
        self._follow_workers()

    def _follow_workers(self) -> None:
        """Report that all workers run, or that all their processes have exited. If a keeper (their parent
        process) forks them, wait for the keeper's reports, because the supervisor's events come earlier.
        """
        if self._begun is not None and self._workers.are_started:
            begun, self._begun = self._begun, None
            self._run_begins(begun)
        if self._over is not None and (leftovers := self._workers.leftovers) is not None:
            if self._gpus is not None and self._gpus.is_held(self.result.attempts[-1]):
                return
            over, self._over = self._over, None
            self._attempt_ends(over, leftovers)

    def _run_begins(self, event: _core.GroupStarted) -> None:
        attempt = self.result.attempts[-1]
        # If the process group was started without workers, they have been added only now.
        started_ns = event.started_ns if event.pids else time.monotonic_ns()
        attempt.append(Stamp("started", started_ns))
        # The report about the imports may arrive after the workers' start.
        if attempt.stamps.get("imported", started_ns) > started_ns:
            attempt.append(Stamp("imported", started_ns))
        attempt.oom_kills = oom_kills(attempt.pids)
        attempt.warm, attempt.why_cold = self._warmth()
        earlier = [each for each in self.result.attempts[:-1] if each.has_ended]
        if earlier:
            # Measure from the last attempt whose workers ran, so that failed starts are included.
            ran = (each for each in reversed(earlier) if "started" in each.stamps)
            attempt.after = next(ran, earlier[0])
        self.events.append(machine.Started())
        self.observers.running(self.result)

    def _warmth(self) -> tuple[bool | None, str | None]:
        """Return whether new workers are forked from a preloaded process, and if not, why."""
        if self._warming is not None:
            return self._warming.is_warm, self._warming.why_cold
        preload, follower = self._job.preload, self._workers.follower
        if preload is None:
            return None, None
        why = "; ".join(preload.remarks)
        return False, why if follower is None else f"{follower.name} follows the workers"

    def _on_start_failed(self, event: _core.StartFailed) -> None:
        self._workers.ended(self.supervisor)
        if self._start_cold(event.message):
            return
        self.result.message, self.result.start_errno = event.message, event.errno
        has_no_program = event.stage == "execute" and event.errno in _NO_PROGRAM
        self.events.append(
            machine.StartFailed(event.message, event.errno in _TRANSIENT, has_no_program=has_no_program)
        )
        self.observers.not_started()

    def _start_cold(self, why: str) -> bool:
        """After a failed start, start the workers again as new programs if they were forked from a preloaded
        process, because a library's fork handler may have failed. Return false if they were not forked, or
        must stop.
        """
        attempt = self.result.attempts[-1]
        if self._warming is None or "stopped" in attempt.stamps:
            return False
        if not (self._warming.is_warm and self._workers.may_fork):
            return False
        self._workers.may_fork = False
        self._warming.start_cold(why)
        # Workers that were forked before the failure may have written to the previous log files.
        attempt.name += "_cold"
        self._start(attempt)
        return True

    def _on_failure(self, event: _core.FailureSeen) -> None:
        attempt = self.result.attempts[-1]
        attempt.append(event, _core.FailureSeen)
        self._accuse_leavers(attempt, early_leavers(attempt))
        self.events.append(machine.FailureSeen(event.local_rank))
        self.observers.failed(attempt)

    def _on_kept(self, event: _core.StateKept) -> None:
        attempt = self.result.attempts[-1]
        attempt.append(Stamp("kept", event.ended_ns))
        self.observers.kept(attempt, event)

    def _accuse_leavers(self, attempt: Attempt, left: tuple[int, ...]) -> None:
        if left:
            from elasticrs._engine.hangs.culprits import Basis, Blame

            attempt.accuse(Blame(left, True, Basis.EXIT), attempt.stamps["failure_seen"])

    def _on_timer(self, event: _core.TimerExpired) -> None:
        _log_expired(self._job.run_id, event)
        self.result.attempts[-1].append(event, _core.TimerExpired)
        if event.signal is None:
            self._console.say(f"{self._who(event.local_rank, event.pid)}: {phrases.timer_expired(event)}")
        self.observers.timer_expired(event)

    def _on_hung(self, event: _core.WorkerHung) -> None:
        attempt = self.result.attempts[-1]
        attempt.append(event, _core.WorkerHung)
        if attempt.diagnosis is None:
            self._diagnose(attempt, partial(self._explain_hang, attempt, event))
        if self._job.is_multi_node and not self._replaces:
            self.events.append(machine.HangSeen(event.local_rank))
        self._learn_from(event)
        self.observers.hung(event)

    def _explain_hang(self, attempt: Attempt, event: _core.WorkerHung) -> None:
        from elasticrs._engine.supervise.hang_diagnosis import accuse, examine

        attempt.diagnosis = attempt.files.run(partial(examine, attempt), None)
        if not self._replaces:
            accuse(attempt, event)

    def _diagnose(self, attempt: Attempt, explain: Callable[[], None]) -> None:
        """Call ``explain`` to diagnose a failure. If it fails, the report says so."""
        try:
            explain()
        # An error in the diagnosis code must not end the job without a report.
        except Exception as error:
            from elasticrs._engine.hangs.diagnose import failed

            attempt.diagnosis = failed(error)
            self._console.say(attempt.diagnosis.summary)

    def _learn_from(self, event: _core.WorkerHung) -> None:
        """Use a generous time limit for steps from the next attempt on. The worker may have exceeded the
        learned limit only because of an evaluation, which the next attempt repeats.
        """
        if not isinstance(self._job.hang_timeout, str) or event.missed not in ("step", "line"):
            return
        if event.limit >= GENEROUS or self._is_generous:
            return
        self._is_generous = True
        watch_hangs(self._workers.setup, self.supervisor, GENEROUS)
        self._console.say(
            f"--hang-timeout auto: the learned limit of {event.limit:g} s was exceeded. In the next attempts,"
            f" steps may take {GENEROUS / 60:g} minutes, because a long evaluation looks the same"
        )

    def _on_raised(self, event: _core.WorkerRaised) -> None:
        self.result.attempts[-1].append(event, _core.WorkerRaised)

    def _on_killed(self, event: _core.WorkersKilled) -> None:
        attempt = self.result.attempts[-1]
        self._console.say(phrases.killed(attempt.who_are(event.local_ranks), event))
        self.observers.killed(attempt, event)

    def _on_exit(self, event: _core.WorkerExited) -> None:
        attempt = self.result.attempts[-1]
        page = attempt.plan.page
        if page is not None and (met := page.last_met(event.local_rank)) is not None:
            attempt.met[event.local_rank] = met
        attempt.append(event, _core.WorkerExited)
        if self._replaces:
            attempt.count_oom_kills()
        is_early = event.exitcode == 0 and page is not None and page.is_training(event.local_rank)
        if is_early := is_early and "stopped" not in attempt.stamps:
            attempt.append(Silent((event.local_rank,)))
        meetings = page.meetings() if page is not None and event.exitcode != 0 else ()
        if event.local_rank == attempt.first_failure and self._job.hang_timeout is not None:
            self._diagnose(attempt, partial(self._explain, attempt))
        self.events.append(machine.WorkerExited(event.local_rank, event.exitcode, meetings))
        self.observers.exited(attempt, event)
        if is_early:
            # The other workers would wait for this worker. The core cannot replace it, because it considers
            # the worker successful.
            who = self._who(event.local_rank, event.pid)
            self._console.say(f"{who} exited with code 0 in the middle of the training; stopping all workers")
            self.events.append(machine.ReplaceFailed(event.local_rank))

    def _explain(self, attempt: Attempt) -> None:
        """Find the ranks to blame if the first failure may be a failed collective."""
        # The second call, at the attempt's end, tries again if the diagnosis or the blame is still unknown.
        is_explained = attempt.diagnosis is not None and attempt.blame is not None
        if is_explained or self._replaces or not is_collective_failure(attempt):
            return
        from elasticrs._engine.supervise.hang_diagnosis import examine_failure

        unknown: tuple[Diagnosis | None, Blame | None] = (None, None)
        attempt.diagnosis, blame = attempt.files.run(partial(examine_failure, attempt), unknown)
        if blame is not None and attempt.blame is None:
            attempt.accuse(blame, attempt.stamps["failure_seen"])

    def _on_swept(self, event: _core.WorkerSwept) -> None:
        rank = event.local_rank
        self._name_descendants("killed", _named(event.ended), event.more_ended)
        self._name_descendants("could not kill", _named(event.stuck))
        if event.stuck:
            self.why_unfit = phrases.stuck((rank,))
        self.events.append(machine.WorkerSwept(rank, bool(event.stuck)))

    def _on_replaced(self, event: _core.WorkerReplaced) -> None:
        attempt = self.result.attempts[-1]
        failed = attempt.replace(event, self._restarts)
        attempt.append(event, _core.WorkerReplaced)
        self._workers.replaced(self.supervisor, event.local_rank)
        self.events.append(machine.WorkerReplaced(event.local_rank))
        self.observers.replaced(attempt, failed)

    def _on_not_replaced(self, event: _core.ReplaceFailed) -> None:
        self._not_replaced(event.local_rank, event.message)

    def _on_ended(self, event: _core.GroupEnded) -> None:
        attempt = self.result.attempts[-1]
        if event.outcome == "lost" and "started" not in attempt.stamps and not event.stuck_ranks:
            # The nursery (the process that forks the workers) died while it forked, perhaps because of a
            # library's fork handler. So start the workers as new programs instead.
            self._workers.ended(self.supervisor)
            how = phrases.how_the_nursery_ended(event.nursery_exitcode, event.nursery_hung)
            if self._start_cold(f"the nursery {how}"):
                return
        attempt.append(event, _core.GroupEnded)
        if event.outcome != "succeeded":
            attempt.count_oom_kills()
        if self._job.hang_timeout is not None:
            attempt.heartbeats = self.supervisor.heartbeats()
        self._begun, self._over = None, event
        if self._gpus is not None and event.outcome != "succeeded" and not event.stuck_ranks:
            self._gpus.hold(attempt)
        self._workers.ended(self.supervisor, has_succeeded=event.outcome == "succeeded")
        self._follow_workers()

    def _attempt_ends(self, event: _core.GroupEnded, leftovers: Leftovers) -> None:
        if leftovers.why_not_started is not None:
            self.result.message = leftovers.why_not_started
            self.events.append(machine.StartFailed(self.result.message))
        else:
            self._tell_end(event, leftovers)
        attempt = self.result.attempts[-1]
        self.observers.over(attempt, "failed" if attempt.silent else event.outcome)

    def _tell_end(self, event: _core.GroupEnded, leftovers: Leftovers) -> None:
        attempt = self.result.attempts[-1]
        for rank, channel in zip(event.stuck_ranks, event.wait_channels, strict=False):
            place = channel or "the kernel"
            self._console.say(f"{self._who(rank)} did not exit after SIGKILL (waits in {place})")
        self._name_descendants("could not kill", _named(event.stuck))
        self._name_descendants("kept", _named(event.spared))
        outcome = "stopped" if leftovers.was_stopped else event.outcome
        if outcome == "succeeded":
            ended = [*_named(event.ended), *leftovers.ended]
            self._name_descendants("killed", ended, event.more_ended + leftovers.more_ended)
            if leftovers.silent:
                attempt.append(Silent(leftovers.silent, event.ended_ns))
                outcome = "failed"
        conflict = outcome == "failed" and attempt.files.run(partial(_is_port_conflict, attempt), False)
        if outcome == "failed":
            self._diagnose(
                attempt, lambda: self._accuse_leavers(attempt, early_leavers(attempt, reports_lost_peer))
            )
            self._diagnose(attempt, partial(self._explain, attempt))
        stuck = tuple(event.stuck_ranks)
        if outcome == "lost" and not stuck and "started" not in attempt.stamps:
            how = phrases.how_the_nursery_ended(event.nursery_exitcode, event.nursery_hung)
            self.not_started(f"the nursery {how}", is_transient=True)
        else:
            self.events.append(machine.GroupEnded(outcome, stuck, conflict, self.why_unfit))

    def _on_paused(self, event: _core.WorkerPaused) -> None:
        name = phrases.signal_name(event.signal)
        self._console.say(
            f"{self._who(event.local_rank, event.pid)} is stopped ({name}); waiting until it continues"
        )
        self.result.attempts[-1].paused.add(event.local_rank)
        self.observers.paused()

    def _on_resumed(self, event: _core.WorkerResumed) -> None:
        self._console.say(f"{self._who(event.local_rank, event.pid)} continues")
        self.result.attempts[-1].paused.discard(event.local_rank)
        self.observers.paused()

    def _on_log_trouble(self, event: _core.LogTrouble) -> None:
        self._console.say(f"{self._who(event.local_rank)}: log file {event.path}: {os.strerror(event.errno)}")

    def _on_warmed(self, event: _core.Warmed) -> None:
        if self._warming is not None:
            attempt = self.attempt
            if attempt is not None and not {"started", "ended"} & attempt.stamps.keys():
                attempt.append(Stamp("imported", time.monotonic_ns()))
            self._warming.ended(event)

    def _on_degraded(self, event: _core.Degraded) -> None:
        self._console.say(event.message)

    def _name_descendants(self, verb: str, left: Sequence[tuple[int, str]], more: int = 0) -> None:
        if left:
            names = ", ".join(f"{pid} ({command})" if command else f"{pid}" for pid, command in left)
            names += f" and {more} more" if more else ""
            self._console.say(f"{verb} processes that workers left behind: {names}")

    def _who(self, local_rank: int, pid: int | None = None) -> str:
        return self.result.attempts[-1].who(local_rank, pid)


def _discard_unused_files(paths: LogPaths) -> None:
    for path in paths.error_files.values():
        discard_unused_files(path)


def _named(processes: Sequence[_core.Descendant]) -> list[tuple[int, str]]:
    return [(process.pid, process.command) for process in processes]


_CONFLICT_BYTES = 65536


def _is_port_conflict(attempt: Attempt) -> bool:
    """Return true if the workers' store could not bind its reserved port: the log files contain the port's
    number and the kernel's error message. Ports that the user has chosen do not count.
    """
    held = attempt.plan.port
    if held is None or held.store is not None:
        return False
    port = str(attempt.plan.master_port).encode()
    for worker in attempt.failed_exits():
        if worker.sent_signal is not None:
            continue
        for files in (attempt.paths.error_files, attempt.paths.stderrs):
            path = files.get(worker.local_rank, "")
            text = last_bytes(path, _CONFLICT_BYTES).lower() if path.endswith((".json", ".log")) else b""
            if port in text and (b"eaddrinuse" in text or b"address already in use" in text):
                return True
    return False


def _log_expired(run_id: str, event: _core.TimerExpired) -> None:
    """Call ``log_debug_info_for_expired_timers``, which the program may have replaced."""
    request = public("timer.file_based_local_timer.FileTimerRequest")(
        event.pid, event.scope, event.deadline, event.signal or 0
    )
    try:
        log = public("timer.file_based_local_timer.log_debug_info_for_expired_timers")
        log(run_id, {event.pid: [request.to_json()]})
    except Exception:
        import logging

        logging.getLogger("elasticrs.agent").exception("log_debug_info_for_expired_timers failed")


_RECORDERS: dict[type, Callable[[AttemptTracker, Any], None]] = {
    _core.GroupStarted: AttemptTracker._on_started,
    _core.StartFailed: AttemptTracker._on_start_failed,
    _core.FailureSeen: AttemptTracker._on_failure,
    _core.StateKept: AttemptTracker._on_kept,
    _core.TimerExpired: AttemptTracker._on_timer,
    _core.WorkerHung: AttemptTracker._on_hung,
    _core.WorkerRaised: AttemptTracker._on_raised,
    _core.WorkersKilled: AttemptTracker._on_killed,
    _core.WorkerExited: AttemptTracker._on_exit,
    _core.WorkerSwept: AttemptTracker._on_swept,
    _core.WorkerReplaced: AttemptTracker._on_replaced,
    _core.ReplaceFailed: AttemptTracker._on_not_replaced,
    _core.GroupEnded: AttemptTracker._on_ended,
    _core.WorkerPaused: AttemptTracker._on_paused,
    _core.WorkerResumed: AttemptTracker._on_resumed,
    _core.LogTrouble: AttemptTracker._on_log_trouble,
    _core.Degraded: AttemptTracker._on_degraded,
    _core.Warmed: AttemptTracker._on_warmed,
}
