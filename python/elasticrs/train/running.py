"""Implement ``train`` and ``run_train``, by executing the actions of :mod:`elasticrs.train.state_machine`."""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import sys
import textwrap
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticrs._engine.inside.heartbeats import Section, heartbeat_unless_given
from elasticrs._engine.workers.functions.interrupts import CaughtSignals
from elasticrs.metrics import api as metrics
from elasticrs.train import groups, state_machine
from elasticrs.train.checkpoint import CheckpointError, CheckpointSaver, get_checkpoint_manager, load_newest
from elasticrs.train.coordinator import CannotContinueError, Coordinator, NonRetryableException, StopException
from elasticrs.train.state import State, WorkerStats, is_torchelastic_program, load_from_peer, why_not_saved
from elasticrs.train.state_machine import Action, Event, Loop, Vote, disagreement, have_ended_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

__all__ = ["run_train", "to_generator", "train"]

_log = logging.getLogger("elasticrs.train")

MAX_FAILURES = 10
"""Default limit for consecutive failures without progress (torchelastic 0.1: 100)."""

_SHOWN = 120
"""Maximum number of characters to show of the error message of an aborted collective."""

MEETING_LIMIT = 5.0
"""Maximum seconds for which a leaving worker waits to meet others and save a checkpoint."""

_LEAVE_TICK = 0.25
_ASKING = (signal.SIGTERM, signal.SIGUSR1)

_NOTHING = object()
_END = object()

_MISTAKES = (NonRetryableException, NotImplementedError, RecursionError)
"""Exceptions that are never retried. The last two types are subclasses of ``RuntimeError``."""


def train(
    elastic_coordinator: Coordinator,
    train_step: Callable[[Any], tuple[Any, WorkerStats | None]],
    state: State,
    *,
    retryable: tuple[type[Exception], ...] = (RuntimeError,),
    max_failures: int | None = None,
) -> Any:
    """Call a train step repeatedly until some worker runs out of data, and return the final state.

    A step that raises a retryable exception is rolled back. The workers then start a new round and continue
    from the most advanced state. All workers return the same state. A worker that starts after the training
    has ended gets it from a living worker or from the final checkpoint. Without either, that worker fails.

    Args:
        elastic_coordinator: coordinator that runs the rendezvous of the workers.
        train_step: function that takes the state and returns the state and the worker's statistics (or
            ``None``). It raises ``StopIteration`` when this worker has run out of data.
        state: initial state of the job.
        retryable: types of exceptions that are retried. A failed collective raises a ``RuntimeError``.
        max_failures: number of consecutive failures before this worker gives up; 10 if ``None``.

    Raises:
        NonRetryableException: This process cannot continue.
        RuntimeError: There were too many failures without progress.
        TypeError: A type is wrong, or a checkpoint manager is set but the state cannot be saved.
    """
    if not callable(train_step):
        raise TypeError(f"train_step: got {train_step!r}, expected a function")
    steps = to_generator(train_step)
    return _Run(elastic_coordinator, steps, state, retryable, max_failures, is_generator=False).run()


def run_train(
    coordinator: Coordinator,
    train_step_gen: Callable[[Any], Iterator[tuple[Any, WorkerStats | None]]],
    state: State,
    *,
    retryable: tuple[type[Exception], ...] = (RuntimeError,),
    max_failures: int | None = None,
) -> Any:
    """Run a training loop like :func:`train`, but with a generator function instead of the train step.

    ``train_step_gen`` takes the state, changes it in place, and yields ``(state, worker_stats)`` after each
    step. It is called again after each rendezvous.
    """
    if not callable(train_step_gen):
        raise TypeError(f"train_step_gen: got {train_step_gen!r}, expected a generator function")
    return _Run(coordinator, train_step_gen, state, retryable, max_failures, is_generator=True).run()


def to_generator(
    train_step_fn: Callable[[Any], tuple[Any, WorkerStats | None]],
) -> Callable[[Any], Iterator[tuple[Any, WorkerStats | None]]]:
    """Convert a step function to a generator function for :func:`run_train`. It ends on ``StopIteration``."""

    def steps(state: Any) -> Iterator[tuple[Any, WorkerStats | None]]:
        while True:
            try:
                result = train_step_fn(state)
            except StopIteration:
                return
            yield result
            state = result[0]

    return steps


def _require_saving(state: State) -> None:
    if get_checkpoint_manager() is not None and (reason := why_not_saved(state)) is not None:
        raise TypeError(f"set_checkpoint_manager was called, but {reason}")


class RequestSignals:
    """Context manager that passes SIGTERM and SIGUSR1 on to a worker's coordinator (the object through which
    it meets the other workers), as requests for a checkpoint. Works only in the main thread.

    After SIGTERM, the worker completes its step, saves a checkpoint with the other workers, leaves the job,
    and ends its process. After SIGUSR1, it saves a checkpoint and continues.

    - **SIGNALS-1** a handler that the program has set, in any language, is not replaced. The handlers of this
      class are removed when the training is over, and in forked children.
    - **SIGNALS-2** a second SIGTERM ends the worker at once. A worker that leaves the job also ends if it is
      in no round (a meeting of the workers) for :data:`MEETING_LIMIT` seconds.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._caught = CaughtSignals()
        self._is_leaving = False
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        if not self._coordinator.takes_requests or threading.current_thread() is not threading.main_thread():
            return
        for signum in _ASKING:
            if is_default(signum):
                self._caught.catch(signum, self._ask)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._caught.release(_ASKING)

    def _ask(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- handler signature
        if signum == signal.SIGTERM:
            if self._is_leaving:
                self.end_process()
            self._is_leaving = True
            threading.Thread(target=self._watch_meeting, name="elasticrs-leaving", daemon=True).start()
        self._coordinator.request(leave=signum == signal.SIGTERM)

    def _watch_meeting(self) -> None:
        limit = MEETING_LIMIT if self._coordinator.others_come_back else _LEAVE_TICK
        left = limit
        while left > 0:
            if self._is_over.wait(_LEAVE_TICK):
                return
            left = limit if self._coordinator.has_round else left - _LEAVE_TICK
        # Send a second SIGTERM, on which the handler in the main thread ends the process.
        os.kill(os.getpid(), signal.SIGTERM)

    def end_process(self) -> None:
        """End this process with SIGTERM, as if this module had not handled the signal."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def is_default(signum: int) -> bool:
    """Return true if a signal has its default action. Look into ``/proc``, too, to see handlers in C code."""
    if signal.getsignal(signum) != signal.SIG_DFL:
        return False
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    except OSError:
        return True
    return not caught >> (signum - 1) & 1


class _Run:
    def __init__(
        self,
        coordinator: Coordinator,
        steps_of: Callable[[State], Iterator[Any]],
        state: State,
        retryable: tuple[type[Exception], ...],
        max_failures: int | None,
        *,
        is_generator: bool,
    ) -> None:
        if not isinstance(coordinator, Coordinator):
            raise TypeError(f"coordinator: got {coordinator!r}, expected a Coordinator")
        if not isinstance(state, State):
            raise TypeError(f"state: got {state!r}, expected a State")
        _require_saving(state)
        self._plain = coordinator
        self._coordinator: Any = coordinator
        self._state = state
        self._steps_of = steps_of
        self._is_generator = is_generator
        self._retryable = retryable
        self._loop = Loop(MAX_FAILURES if max_failures is None else max_failures)
        self._steps: Any = None
        self._snapshot: Any = _NOTHING
        self._error: Exception | None = None
        # Detect forks by a counter, because a system call in each step would be slower than the rest.
        self._pid, self._forks = os.getpid(), groups.forks
        self._checkpoints: CheckpointSaver | None = None
        self._is_meeting = self._is_loaded = self._is_measured = False
        # Progress of this worker in the current round, which it sends at the start of the next round.
        self._vote = Vote()
        self._votes: list[Vote] = []
        # True if the newest checkpoint holds the current state.
        self._is_stored = False
        # True if the current state is the result of the finished training.
        self._is_final = False
        self._rank, self._world_size = -1, 0
        self._signals = RequestSignals(coordinator)
        self._outer_began, self._inner_began = time.perf_counter(), 0.0

    def run(self) -> State:
        effects: dict[Action, Callable[[], Event | None]] = {
            Action.MEET: self._meet,
            Action.SYNC: self._sync,
            Action.ROLL_BACK: self._roll_back,
            Action.CLOSE: self._close,
            Action.LEAVE: self._leave,
            Action.GIVE_UP: self._give_up,
            Action.RAISE: self._raise,
        }
        groups.refuse_in_forked_children()
        event = Event.BEGIN
        try:
            with self._signals:
                while True:
                    self._loop, actions = state_machine.transition(self._loop, event)
                    if actions is state_machine.ONE_STEP:
                        event = self._step()
                        continue
                    for action in actions:
                        if action is Action.RETURN:
                            return self._state
                        event = effects[action]() or event
        except BaseException as error:
            # Leave the job even on an interrupt, because if the program caught it, the others would wait
            # for this worker. But a forked child must not leave, because its parent is still in the job.
            if self._forks == groups.forks:
                self._plain.leave()
            if isinstance(error, SystemExit) and not error.code:
                # Do not exit with code 0, because to the agent, that would mean that the worker has finished.
                raise CannotContinueError("the program has ended in the middle of the training") from error
            raise
        finally:
            self._close_steps()
            self._snapshot = _NOTHING
            self._error = None
            self._publish_durations()

    def _meet(self) -> Event:
        self._error, self._snapshot, self._is_meeting = None, _NOTHING, False
        _begin_meeting()
        self._listen()
        try:
            self._close_steps()
            _require_saving(self._state)
            if self._coordinator.should_stop_training():
                return self._come_late()
            self._snapshot = self._state.capture_snapshot()
            self._is_meeting = True
            try:
                _, self._rank, self._world_size = self._coordinator.rendezvous_barrier()
            except StopException:
                return self._come_late()
            self._coordinator.init_process_group()
            self._coordinator.barrier()
            self._exchange_votes()
            at_the_end = any(vote.at_the_end for vote in self._votes)
            return Event.MET_AT_THE_END if at_the_end else Event.MET
        except Exception as error:
            return self._judge(error)

    def _listen(self) -> None:
        """Measure how long the coordinator's calls take in this round, if anyone receives the metrics."""
        self._publish_durations()
        self._is_measured = metrics.has_listener(GROUP)
        self._coordinator = _Measured(self._plain) if self._is_measured else self._plain
        self._outer_began, self._inner_began = time.perf_counter(), 0.0

    def _publish_durations(self) -> None:
        if self._is_measured:
            if self._inner_began:
                _publish_duration("inner_train_loop", self._inner_began)
            _publish_duration("outer_train_loop", self._outer_began)

    def _exchange_votes(self) -> None:
        manager = get_checkpoint_manager()
        self._checkpoints = None if manager is None else CheckpointSaver(self._coordinator)
        own = self._vote
        own.has_manager, own.is_loaded = manager is not None, self._is_loaded
        own.at_the_end, own.next_round = self._loop.at_the_end, random.SystemRandom().randrange(1, 2**62)
        if not is_torchelastic_program():
            # With 0, the last `sync` is not skipped. Other programs than those for torchelastic 0.1 need it,
            # because BatchNorm buffers may differ between ranks.
            own.next_step = 0
        numbers = self._coordinator.exchange([int(number) for number in own.values()])
        self._votes = [Vote(*each) for each in numbers]
        if trouble := disagreement(self._votes):
            with suppress(RuntimeError):
                # Wait, because an exit now would abort the other workers' exchange of votes.
                self._coordinator.barrier()
            raise CannotContinueError(trouble)
        self._vote = Vote(last_round=self._votes[0].next_round)

    def _sync(self) -> Event:
        self._is_meeting = False
        try:
            if not any(vote.is_loaded for vote in self._votes):
                self._begin_state()
            # If all workers have ended together, skip `sync`. All have the last state, and a `sync` with new
            # data loaders would fail.
            if not have_ended_together(self._votes):
                began = time.perf_counter()
                self._state.sync(self._world_size, self._rank)
                if self._is_measured:
                    _publish_duration("state_sync", began)
            # From now on, keep the state that sync has received, even if another worker fails.
            self._is_loaded, self._snapshot = True, _NOTHING
            self._coordinator.barrier()
            if self._loop.at_the_end:
                self._is_final = True
                self._keep_final_state()
            else:
                self._steps = self._steps_of(self._state)
                if not hasattr(self._steps, "__next__"):
                    raise TypeError(f"train_step_gen returned {self._steps!r}, expected a generator")
                self._vote.next_step = 1
                self._inner_began = time.perf_counter()
            return Event.SYNCED
        except Exception as error:
            return self._judge(error)

    def _begin_state(self) -> None:
        """Load the newest checkpoint, if any, because no worker holds a state from this run of the job."""
        is_found = self._checkpoints is not None and self._checkpoints.load_checkpoint(
            self._state, self._rank
        )
        self._is_stored = is_found
        if self._coordinator.rounds_before and self._rank == 0:
            where = "the newest checkpoint" if is_found else "the beginning"
            _log.warning("no worker is left that holds the state of the last round: starting from %s", where)

    def _keep_final_state(self) -> None:
        """Save the final state in a checkpoint, or keep it in memory if there is no checkpoint manager."""
        in_checkpoint = False
        if self._checkpoints is not None:
            in_checkpoint = all(flag for (flag,) in self._coordinator.exchange([int(self._is_stored)]))
            if not in_checkpoint:
                in_checkpoint = self._checkpoints.save_checkpoint(self._state, self._rank)
            self._is_stored = in_checkpoint
            if not in_checkpoint:
                # All workers raise this error. Another attempt continues from the last checkpoint.
                raise CheckpointError(
                    "the final checkpoint could not be written (rank 0 has logged why), so the result of the "
                    "training would be lost"
                )
        content = None
        if self._plain.keeps_final_state and not in_checkpoint and why_not_saved(self._state) is None:
            content = self._saved_content()
        self._coordinator.keep_final_state(content, in_checkpoint=in_checkpoint)
        self._coordinator.barrier()

    def _saved_content(self) -> memoryview | None:
        stream = io.BytesIO()
        try:
            self._state.save(stream)
        except Exception:
            # Only log, because training itself has succeeded.
            _log.warning(
                "rank %d: the final state cannot be saved: a worker that is replaced now cannot get it from"
                " this one",
                self._rank,
                exc_info=True,
            )
            return None
        return stream.getbuffer()

    def _come_late(self) -> Event:
        """Load the final state of a finished job, unless this worker already has it."""
        final = None if self._is_final else self._plain.final_state()
        if final is None:
            if not (self._is_final or self._is_loaded):
                raise CannotContinueError(
                    "the training had ended before this worker joined, and its coordinator cannot get the "
                    "final state"
                )
            return Event.ENDED
        ended = "the training had ended before this worker joined"
        reason = why_not_saved(self._state)
        try:
            if reason is None and final.content is not None:
                load_from_peer(self._state, io.BytesIO(final.content), is_protected=final.is_protected)
                self._is_final = True
            elif reason is None and final.in_checkpoint:
                self._is_final = load_newest(self._state)
        except Exception as error:
            raise CannotContinueError(
                f"{ended}, and its final state cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not self._is_final:
            raise CannotContinueError(
                f"{ended}, and its final state is not available: {reason or final.trouble}"
            )
        _log.warning("%s: the final state was loaded", ended)
        return Event.ENDED

    def _step(self) -> Event:
        coordinator = self._coordinator
        self._snapshot = _NOTHING
        try:
            if self._forks != groups.forks:
                raise CannotContinueError(groups.not_a_worker(self._pid))
            if coordinator.should_stop_training():
                return Event.ENDED
            self._snapshot = self._state.capture_snapshot()
            began = time.perf_counter() if self._is_measured else 0.0
            result: Any = next(self._steps, _END)
            if result is _END:
                coordinator.announce_end()
                return Event.OUT_OF_DATA
            is_pair = isinstance(result, tuple) and len(result) == 2
            if not is_pair or not (self._is_generator or isinstance(result[0], State)):
                origin = "train_step_gen yielded" if self._is_generator else "train_step returned"
                raise TypeError(f"{origin} {result!r}, expected (state, worker_stats)")
            stats = result[1]
            if stats is not None and not isinstance(stats, WorkerStats):
                raise TypeError(f"worker_stats: got {stats!r}, expected a WorkerStats or None")
            if not self._is_generator:
                # Ignore the state that a generator yields, because the generator changes the state in place.
                self._state = result[0]
            self._is_stored = False
            self._vote.next_step += 1
            if self._is_measured:
                _publish_duration("train_step", began)
            _end_step()
            coordinator.monitor_progress(self._state, stats)
            is_saved = None if self._checkpoints is None else self._save_if_due(self._checkpoints)
            if coordinator.should_rendezvous(self._state):
                return self._leave_round(is_saved)
            coordinator.report_progress(self._state)
            return state_machine.STEPPED
        except Exception as error:
            return self._judge(error)

    def _save_if_due(self, checkpoints: CheckpointSaver) -> bool | None:
        # Call both methods on every worker, because each may count its calls.
        is_asked = self._coordinator.should_save_checkpoint()
        is_due = self._state.should_save_checkpoint(self._rank) or is_asked
        vote = self._vote
        vote.asked += 1
        if is_due:
            vote.said_yes, vote.is_saving = vote.asked, True
            is_saved: bool = checkpoints.save_checkpoint(self._state, self._rank)
            vote.is_saving, self._is_stored = False, is_saved
            return is_saved
        return None

    def _leave_round(self, is_saved: bool | None) -> Event:
        """Leave the round after a step. First save a checkpoint if one was requested, and none was saved at
        the end of the step (``is_saved`` is ``None``). If that save is aborted, the step is not rolled back,
        because all workers have completed it.
        """
        coordinator, self._snapshot = self._coordinator, _NOTHING
        if self._checkpoints is not None and coordinator.should_save_before_meeting():
            if is_saved is None:
                is_saved = self._checkpoints.save_checkpoint(self._state, self._rank)
                self._is_stored = is_saved
            coordinator.saved(is_saved)
        return Event.LEAVES if coordinator.should_leave() else Event.CHANGED

    def _leave(self) -> None:
        self._close_steps()
        self._coordinator.leave()
        self._signals.end_process()

    def _judge(self, error: Exception) -> Event:
        if self._forks != groups.forks:
            # This process is a forked child, which must not use the parent's coordinator.
            self._error = (
                error
                if isinstance(error, NonRetryableException)
                else CannotContinueError(groups.not_a_worker(self._pid))
            )
            return Event.BROKE
        if isinstance(error, StopException):
            if self._is_loaded:
                return Event.CUT
            error = CannotContinueError("the job was closed before this worker had the state of the others")
        self._plain.on_error(error)
        self._error = error
        if isinstance(error, _MISTAKES) or not isinstance(error, self._retryable):
            return Event.BROKE
        is_broken_off = self._plain.was_broken_off(is_meeting=self._is_meeting)
        _log.warning(
            "rank %d: %s%s: %s; regrouping; resuming from the last completed step",
            self._rank,
            "interrupted by other workers: " if is_broken_off else "",
            type(error).__name__,
            textwrap.shorten(str(error), _SHOWN) if is_broken_off else error,
            # Print one traceback, because a retried step can fail many times.
            exc_info=None if is_broken_off or self._loop.failures else error,
        )
        return Event.BROKEN_OFF if is_broken_off else Event.FAILED

    def _roll_back(self) -> None:
        try:
            self._close_steps()
            if self._snapshot is not _NOTHING and self._snapshot is not None:
                self._state.apply_snapshot(self._snapshot)
        except Exception as error:
            # Give up. The rollback has failed halfway, so the state is neither the old one nor the new one.
            self._plain.on_error(error)
            raise

    def _close_steps(self) -> None:
        """Close the generator, so that its cleanup code does not run during the next round."""
        steps, self._steps = self._steps, None
        if hasattr(steps, "close"):
            steps.close()

    def _close(self) -> None:
        try:
            self._coordinator.signal_training_done()
        except Exception as error:
            # Only log, because all workers already have the final state.
            _log.warning("the job could not be closed: %s: %s", type(error).__name__, error)

    def _give_up(self) -> Event:
        if self._coordinator.should_stop_training():
            return Event.ENDED
        error = RuntimeError(
            f"Exceeded max number of recoverable failures: {self._loop.failures} of this worker and "
            f"{self._loop.broken_off} interrupted collectives with no completed step"
        )
        self._plain.on_error(error)
        raise error from self._error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


# --- metrics and heartbeats ---

GROUP = "torchelastic"

_METHODS = (
    *("rendezvous_barrier", "init_process_group", "barrier", "exchange", "should_save_checkpoint"),
    *("should_rendezvous", "should_stop_training", "announce_end", "signal_training_done"),
    *("monitor_progress", "report_progress", "on_error"),
)


def _publish_duration(activity: str, began: float) -> None:
    metrics.put_metric(f"{activity}.duration.ms", int((time.perf_counter() - began) * 1000), GROUP)


class _Measured:
    """Coordinator whose calls are measured."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        for name in _METHODS:
            setattr(self, name, metrics.prof(getattr(coordinator, name), group=GROUP))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)


_meeting = Section("meeting of the workers", None)
_is_meeting = False
_count = 0
_are_watched: bool | None = None


def _begin_meeting() -> None:
    """Suspend the time limit for heartbeats until a step is done. A rendezvous has its own time limits."""
    global _is_meeting  # noqa: PLW0603 -- process-wide, like the heartbeats
    # Before the first heartbeat, only the time limit for the start applies.
    if _count > 0 and not _is_meeting:
        _is_meeting = True
        _meeting.__enter__()


def _end_step() -> None:
    """Send a heartbeat, unless the program has already sent one during the step."""
    global _is_meeting, _count, _are_watched  # noqa: PLW0603 -- see above
    if _are_watched is None:
        # The parent (nursery) process may have imported this module before it forked this worker.
        _are_watched = "ELASTICRS_HEARTBEAT" in os.environ
    if not _are_watched:
        return
    if _is_meeting:
        _is_meeting = False
        _meeting.__exit__(None, None, None)
    _count = heartbeat_unless_given(_count)
