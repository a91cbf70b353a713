"""The workers (``_pcontext``) of an agent that runs torch's polling loop, and its signal handlers."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticrs._engine.job import phrases
from elasticrs._engine.process.console import END_PATIENCE
from elasticrs._engine.process.signals import RELAY, StopRequests
from elasticrs._engine.supervise import state_machine as machine
from elasticrs._engine.supervise.failed_attempt import failures
from elasticrs._engine.supervise.run.tracker import AttemptTracker
from elasticrs._engine.supervise.run.workers import variables_of
from elasticrs._engine.workers.functions.interrupts import (
    CaughtSignals,
    held,
    raise_when_safe,
    waiting,
    when_safe,
)
from elasticrs._engine.workers.functions.supervised_group import LATE, not_started
from elasticrs._engine.workers.logs import line_prefixes
from elasticrs._engine.workers.process import macros
from elasticrs.multiprocessing.api import RunProcsResult, SignalException

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from types import FrameType

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.process.console import Console
    from elasticrs._engine.supervise.attempt import Attempt
    from elasticrs._engine.supervise.observe.observer import Observer
    from elasticrs._engine.supervise.run.workers import Workers
    from elasticrs._engine.workers.plan import Plan
    from elasticrs.agent.server.worker_group import WorkerSpec
    from elasticrs.multiprocessing.api import PContext

_PHASES: dict[str | None, machine.Phase] = {
    "succeeded": machine.Phase.SUCCEEDED,
    "stopped": machine.Phase.STOPPED,
}


class PolledWorkers:
    """Starts, monitors and stops the workers of one agent, one attempt at a time."""

    def __init__(
        self, job: JobSpec, workers: Workers, console: Console, observers: Sequence[Observer] = ()
    ) -> None:
        self._workers = workers
        self._console = console
        self._tracker = AttemptTracker(self, job, workers, console, observers)
        self._result = self._tracker.result
        self.name = job.name
        self._has_started = False
        self._ended: machine.GroupEnded | None = None
        self._found: RunProcsResult | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def pass_on(self, signum: int) -> None:
        self._tracker.forward(signum, are_running=self._has_started and self.is_running)

    def start(self, plan: Plan, restarts: int) -> dict[int, int]:
        """Start all workers, and return their pids by local rank.

        If one cannot be started, start none and raise ``RuntimeError``.
        """
        if self._ended is not None and self._ended.stuck_ranks:
            raise RuntimeError(phrases.not_restarted(phrases.stuck(self._ended.stuck_ranks)))
        tracker = self._tracker
        if not tracker.is_open:
            tracker.open(self._bell)
        self._release_plan()
        with held():
            self._forget()
            action = machine.Start(len(self._result.attempts) + 1, restarts)
            tracker.observers.acting(action, plan)
            try:
                tracker.start(tracker.begin(action, plan))
            except BaseException:
                # If `tracker.start` has failed, no event would report the end of the attempt.
                self._ended = machine.GroupEnded("failed")
                self._release_plan()
                raise
            self._note_events()
        while not self._has_started:
            if self._ended is not None:
                self._release_plan()
                text = self._result.message or "the workers could not be started"
                raise not_started(text, self._result.start_errno)
            self._pump(None)
        return self.pids()

    def announce(self, restarts_left: int) -> bool:
        """Tell the observers about a restart if a worker's failure is its cause. Otherwise, return false."""
        if self.has_failed:
            self._tracker.observers.acting(machine.AnnounceRestart(restarts_left), None)
        return self.has_failed

    def _release_plan(self) -> None:
        if self.attempt is not None:
            self.attempt.plan.close()

    def pids(self) -> dict[int, int]:
        return dict(enumerate(self._result.attempts[-1].pids)) if self._result.attempts else {}

    @property
    def attempt(self) -> Attempt | None:
        """The last attempt, or ``None`` before the first one."""
        return self._tracker.attempt

    @property
    def is_running(self) -> bool:
        return bool(self._result.attempts) and self._ended is None

    @property
    def has_failed(self) -> bool:
        """True if a worker of the current attempt has failed. The other workers are then being stopped."""
        attempt = self.attempt
        return attempt is not None and attempt.first_failure is not None

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002 -- torch's signature
        """Wait up to ``timeout`` seconds (negative: no limit). Return ``None`` if workers still run."""
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while self.is_running:
            left = None if deadline is None else deadline - time.monotonic()
            was_something = self._pump(None if left is None else max(0.0, left))
            if self.is_running and left is not None and left <= (-LATE if was_something else 0):
                return None
        if self._found is None and self.attempt is not None and self._ended is not None:
            self._found = self._make_result(self.attempt, self._ended)
        return self._found

    def wait_for_news(self, seconds: float) -> None:
        """Wait until all workers have exited or one of them has failed, for at most ``seconds``."""
        if not self.is_running:
            time.sleep(seconds)
            return
        deadline = time.monotonic() + seconds
        while self.is_running and not self.has_failed and (left := deadline - time.monotonic()) > 0:
            self._pump(left)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        if self._tracker.is_open and self.is_running:
            self._tracker.stop(machine.Stop(int(death_sig or signal.SIGTERM), timeout))
            self._note_events()
            self.wait()
            self._release_plan()

    def release(self) -> None:
        """Kill the remaining processes and close the supervisor. Idempotent."""
        bell, self._bell = self._bell, -1
        try:
            if self._tracker.is_open:
                self._end()
        finally:
            if bell != -1:
                os.close(bell)

    def _end(self) -> None:
        tracker = self._tracker
        try:
            tracker.drain()
        finally:
            self._release_plan()
            # Set the phase and the exit code first, because observers read them.
            outcome = None if self._ended is None else self._ended.outcome
            self._result.phase = _PHASES.get(outcome, machine.Phase.FAILED)
            self._result.exit_code = int(outcome != "succeeded")
            tracker.close()
            tracker.observers.ended(self._result, None)
        tracker.tidy_up()
        self._console.flush(END_PATIENCE)

    def _forget(self) -> None:
        self._has_started, self._ended, self._found = False, None, None

    def _pump(self, seconds: float | None) -> bool:
        """Wait for an event and handle it. Return false if none arrived in time."""
        with waiting(lambda: os.eventfd_write(self._bell, 1)):
            was_something = self._tracker.wait(seconds)
            self._note_events()
        return was_something

    def on_fd(self, fd: int, *, is_over: bool) -> bool:
        if is_over or fd != self._bell:
            return False
        os.eventfd_read(fd)
        return True

    def on_fence(self) -> None:
        """Do nothing, because these workers have no lease."""

    def _note_events(self) -> None:
        while self._tracker.events:
            event = self._tracker.events.popleft()
            if isinstance(event, machine.Started):
                self._has_started = True
            elif isinstance(event, machine.GroupEnded):
                self._ended = event
            elif isinstance(event, machine.StartFailed):
                self._ended = machine.GroupEnded("failed")

    def _make_result(self, attempt: Attempt, ended: machine.GroupEnded) -> RunProcsResult:
        paths = attempt.paths
        result = RunProcsResult(stdouts=dict(paths.stdouts), stderrs=dict(paths.stderrs))
        local_ranks = {ranks.global_rank: ranks.local_rank for ranks in attempt.plan.ranks}
        if ended.outcome == "succeeded" and not attempt.failed_exits():
            values = self._workers.return_values(attempt)
            result.return_values = {local_ranks[rank]: value for rank, value in values.items()}
            return result
        result.failures = {local_ranks[rank]: failure for rank, failure in failures(attempt).items()}
        return result


def start_by(
    start_processes: Callable[..., PContext], spec: WorkerSpec, job: JobSpec, plan: Plan, restarts: int
) -> GivenContext:
    """Start an attempt's workers with the function by which the user has replaced torch's
    ``start_processes``. It gets the same arguments as in torch.
    """
    template = job.logs.log_line_prefix_template
    try:
        context = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={
                rank: tuple(macros.substitute(list(spec.args), str(rank)))
                for rank in range(spec.local_world_size)
            },
            envs=variables_of(job, plan, restarts + 1, restarts, os.environ),
            logs_specs=job.logs.logs_specs,
            log_line_prefixes=line_prefixes(template, plan.ranks) if template else None,
            start_method=job.start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
    except BaseException:
        plan.close()
        raise
    return GivenContext(context, plan)


class GivenContext:
    """Wraps the context that the user's ``start_processes`` has returned.

    Keeps the port of the workers' store until ``close``.
    """

    has_failed = False
    attempt = None

    def __init__(self, context: PContext, plan: Plan) -> None:
        self._context = context
        self._plan = plan
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def wait_for_news(self, seconds: float) -> None:
        """Sleep for this time, because the user's context reports no event when a worker exits."""
        time.sleep(seconds)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self._context.close(death_sig or signal.SIGTERM, int(timeout))
            finally:
                self._plan.close()

    def release(self) -> None:
        self.close()


_log = logging.getLogger("elasticrs.agent")


@contextmanager
def raised_signals(
    signums: Collection[int],
    forwarded: Iterable[int] = (),
    pass_on: Callable[[int], object] = lambda _: None,
) -> Iterator[None]:
    """Raise :class:`SignalException` in the main thread when a signal requests a stop during the block.

    A signal that only repeats the same stop request (see :class:`.StopRequests`) raises nothing. Signals that
    the process ignores stay ignored. Signals in ``forwarded`` are given to ``pass_on``. Outside of the main
    thread, this function only logs a warning. Forked children get the previous handlers back.
    """
    if threading.current_thread() is not threading.main_thread():
        _log.warning("signals are not handled, because the job does not run in the main thread")
        yield
        return

    requests = StopRequests()

    def raise_error(signum: int, _frame: FrameType | None) -> None:
        if requests.is_new(signum, now := time.monotonic()):
            sigval = signal.Signals(signum)
            raise_when_safe(SignalException(f"stopped by {sigval.name}", sigval))
        elif (after := requests.repeated_after(signum, now)) is not None:
            when_safe(partial(_log.warning, phrases.repeated(signum, after, RELAY)))

    def forward(signum: int, _frame: FrameType | None) -> None:
        when_safe(partial(pass_on, signum))

    caught, signals = CaughtSignals(), []
    try:
        for signum in {*signums, *forwarded}:
            if signal.getsignal(signum) != signal.SIG_IGN:
                caught.catch(signum, raise_error if signum in signums else forward)
                signals.append(signum)
        yield
    finally:
        caught.release(signals)
