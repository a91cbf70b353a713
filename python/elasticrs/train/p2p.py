"""Ways to take part in a job whose workers find each other at a URL or through an agent: the coordinators for
:func:`~elasticrs.train.train`, and :func:`on_change`, for custom training loops and frameworks.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

from elasticrs.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from elasticrs.store import DistError
from elasticrs.train.checkpoint import get_checkpoint_manager
from elasticrs.train.coordinator import CannotContinueError, Coordinator, FinalState, StopException
from elasticrs.train.events import record
from elasticrs.train.membership import Membership
from elasticrs.train.rendezvous import URL_VARIABLE, parse, rendezvous_of_agent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

    from elasticrs._engine.nodes.protocol.messages import Stop
    from elasticrs.train.membership import Round
    from elasticrs.train.rendezvous import WorkerRendezvous
    from elasticrs.train.state import State, WorkerStats

__all__ = ["AgentCoordinator", "CoordinatorP2P", "Participant", "on_change"]

_log = logging.getLogger("elasticrs.train")

STRAGGLER_THRESHOLD = 0.8
"""A worker is a straggler if its rate is less than this fraction of the best rate."""

ASK_AGAIN = 5.0
"""Seconds between two attempts to end a round for a requested checkpoint."""

_trained: set[tuple[str, str]] = set()
"""Jobs that this process has trained to the end, as pairs of the store's address and the job's name."""


def _rate_of(stats: WorkerStats) -> float | None:
    """Return the progress rate in a worker's statistics; ``None`` if there is none or it is not finite."""
    rate = stats.get_progress_rate()
    return None if rate is None or not math.isfinite(rate) else float(rate)


class CoordinatorP2P(Coordinator):
    """Coordinator whose workers meet at a rendezvous URL; see :mod:`elasticrs.train.rendezvous`.

    With ``elasticrs://``, the first worker on the URL's machine hosts the store, and the job ends when that
    worker exits. If workers may die, use ``python -m elasticrs.store``, etcd, or an agent
    (:class:`AgentCoordinator`).

    Args:
        c10d_backend: backend of the default process group, such as ``"gloo"``.
        init_method: rendezvous URL.
        max_num_trainers: maximum number of workers, if it is less than the URL's ``max_workers``.
        process_group_timeout: timeout of a collective, in milliseconds.
        coordinator_pg_timeout: time limit for all workers to reach :meth:`barrier`, in milliseconds.

    Attributes:
        rank: rank in the current round; -1 before the first round.
        world_size: number of workers in the current round.
        is_worker_straggler: true if this worker was much slower than the fastest one at the last comparison.
        last_relative_prog_rate: this worker's rate, divided by that of the fastest; set by the first report.
        stop_training: true if the job is closed.

    Raises:
        ValueError: the URL is invalid, or the timeouts contradict each other.
    """

    MONITOR_PROGRESS_FREQ = 1000
    """Steps between two comparisons of the workers' rates."""

    last_relative_prog_rate: float

    def __init__(
        self,
        c10d_backend: str,
        init_method: str,
        max_num_trainers: int,
        process_group_timeout: int = 10000,
        coordinator_pg_timeout: int = 600000,
    ) -> None:
        settings = parse(init_method, os.environ, max_num_trainers)
        self._begin(c10d_backend, settings, process_group_timeout, coordinator_pg_timeout)

    def _begin(
        self,
        c10d_backend: str,
        settings: WorkerRendezvous,
        process_group_timeout: int,
        coordinator_pg_timeout: int,
    ) -> None:
        if not 0 < process_group_timeout < coordinator_pg_timeout:
            raise ValueError(
                f"coordinator_pg_timeout: got {coordinator_pg_timeout} ms, expected more than "
                f"process_group_timeout ({process_group_timeout} ms), which has to be more than 0"
            )
        for notice in settings.notices:
            _log.warning("%s", notice)
        self.c10d_backend = c10d_backend
        self.init_method = settings.url
        self.max_num_trainers = settings.rendezvous.max_nodes
        self.process_group_timeout = process_group_timeout
        self.coordinator_pg_timeout = coordinator_pg_timeout
        self.rank = -1
        self.world_size = 0
        self.is_worker_straggler = False
        self.stop_training = False
        self.monitor_progress_step = 0
        self._gathered = 0
        self._store: Any = None
        self._is_asked = self._leaves = self._was_told = False
        self._ask_again_at = 0.0
        self._serves = 0
        self._has_saved = False
        self._final: FinalState | None = None
        self._job = settings.rendezvous.endpoint, settings.rendezvous.job or settings.rendezvous.run_id
        self._member = Membership(settings)

    def rendezvous_barrier(self) -> tuple[Any, int, int]:
        """Join the next round, and set ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

        Raises:
            StopException: the job is closed.
            NonRetryableException: the job has failed, too few workers joined in time, or the store is lost.
            RuntimeError: the round ended before its store was reached. The call can be repeated.
        """
        record("rendezvous_started", self.rank)
        current = self._meet()
        self.rank, self.world_size, self.rounds_before = current.rank, current.world_size, current.number - 1
        self.is_worker_straggler, self.monitor_progress_step, self._gathered = False, 0, 0
        self._has_saved, self._ask_again_at = False, 0.0
        self._store = self._member.connect()
        record("rendezvous_succeeded", self.rank)
        return self._store, self.rank, self.world_size

    def _meet(self) -> Round:
        try:
            return self._member.meet()
        except RendezvousClosedError as error:
            record("rendezvous_closed", self.rank)
            if not error.has_failed and self._job not in _trained:
                self._join_late()
            self._member.shutdown()
            if error.has_failed:
                # After a `StopException`, the loop would return this worker's state as the result.
                raise CannotContinueError(f"the training has failed: {error}") from error
            self.stop_training = True
            raise StopException(str(error)) from error
        except RendezvousTimeoutError as error:
            record("rendezvous_failed_timeout", self.rank)
            raise CannotContinueError(f"permanently stuck: {error}") from error
        except RendezvousError as error:
            record("rendezvous_failed", self.rank)
            raise CannotContinueError(str(error)) from error

    def _join_late(self) -> None:
        try:
            late = self._member.join_late()
        except (DistError, OSError, RendezvousError) as error:
            self._final = FinalState(None, False, f"the store cannot be reached: {error}")
            return
        if late is not None:
            self._final, self.rank, self.world_size = late.final, late.rank, late.world_size

    def init_process_group(self) -> None:
        """Create the default process group. Raise ``RuntimeError`` if the round has ended."""
        timeout = datetime.timedelta(milliseconds=self.process_group_timeout)
        self._member.create_group(self.c10d_backend, self._joined_store(), timeout)

    def _joined_store(self) -> Any:
        if self._store is None:
            raise RuntimeError("there is no round: call rendezvous_barrier() first")
        return self._store

    def barrier(self) -> None:
        self._gather("")

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return [json.loads(each) for each in self._gather(json.dumps(list(numbers)))]

    def _gather(self, own: str) -> list[bytes]:
        """Send a text to all workers, and return the texts of all workers, ordered by rank. Use the store,
        because a step may be using collectives.
        """
        store = self._joined_store()
        last, self._gathered = self._gathered, self._gathered + 1
        keys = [f"elasticrs/{self._gathered}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], own)
        store.wait(keys, datetime.timedelta(milliseconds=self.coordinator_pg_timeout))
        found: list[bytes] = store.multi_get(keys)
        # All workers have reached this exchange, so none still reads the key of the previous one.
        store.delete_key(f"elasticrs/{last}/{self.rank}")
        return found

    def should_rendezvous(self, state: State) -> bool:  # noqa: ARG002 -- the loop's interface
        """Return true if this worker must leave the round now. Only reads memory if nothing has changed."""
        if self._is_asked or (self._member.page is not None and self._member.page.is_asked):
            self._ask_the_others()
        return self._member.passed()

    def was_broken_off(self, *, is_meeting: bool) -> bool:
        return self._member.was_broken_off(is_meeting=is_meeting)

    takes_requests = True

    @property
    def has_round(self) -> bool:
        return self._member.round is not None

    def request(self, *, leave: bool) -> None:
        self._leaves = self._leaves or leave
        self._is_asked = True

    def _ask_the_others(self) -> None:
        """Ask all workers to leave the round after the same step."""
        page = self._member.page
        has_manager = get_checkpoint_manager() is not None
        if not has_manager:
            if not self._was_told:
                _log.warning(
                    "rank %d: the requested checkpoint is not saved, because set_checkpoint_manager was not "
                    "called",
                    self.rank,
                )
            # If this worker is leaving, keep the request, because the round must end, and warn only once.
            self._was_told = self._leaves
            self._is_asked = self._leaves
            if page is not None:
                page.serve(page.asked, "no manager")
        now = time.monotonic()
        if now < self._ask_again_at or not (has_manager or self._leaves):
            return
        # Schedule a retry, because the request is lost if the store cannot be reached now.
        self._ask_again_at = now + ASK_AGAIN
        reason = "rank {} leaves" if self._leaves else "a checkpoint was requested from rank {}"
        self._member.ask_for_round(reason.format(self.rank), saves=has_manager)

    def should_save_before_meeting(self) -> bool:
        saves = self._member.saves
        # This save fulfils only the requests that have arrived so far.
        self._serves = 0 if self._member.page is None else self._member.page.asked
        return saves

    def saved(self, is_saved: bool) -> None:
        """Report the result to the agent, then wait until all living workers have left the round."""
        if self._member.page is not None:
            self._member.page.serve(self._serves, "saved" if is_saved else "failed")
        self._is_asked, self._has_saved = self._leaves, True
        self._member.wait_for_others()

    def should_leave(self) -> bool:
        has_tried = self._has_saved or get_checkpoint_manager() is None
        return self._leaves and has_tried and self._member.has_left_as_agreed

    def alone(self) -> AbstractContextManager[None]:
        return self._member.alone()

    def should_stop_training(self) -> bool:
        return self.stop_training

    def announce_end(self) -> None:
        self._member.announce_end()

    keeps_final_state = True

    def keep_final_state(self, content: memoryview | None, *, in_checkpoint: bool) -> None:
        _trained.add(self._job)
        self._member.keep_final_state(content, in_checkpoint=in_checkpoint)

    def final_state(self) -> FinalState | None:
        """Return the final state of a job that finished before this worker joined it, if any.

        Raises:
            NonRetryableException: This process has already trained in this job, and cannot do so again.
        """
        if self._job in _trained:
            raise CannotContinueError(
                f"this process has already trained in job {self._job[1]}, which has ended: a process trains "
                "once in a job"
            )
        return self._final

    def signal_training_done(self) -> None:
        self.stop_training = True
        _trained.add(self._job)
        self._member.shutdown()

    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:  # noqa: ARG002
        """Compare all workers' rates, and set :attr:`is_worker_straggler`.

        The rates are compared every :attr:`MONITOR_PROGRESS_FREQ` steps.
        """
        page = self._member.page
        if page is not None and page.stepped() and worker_stats is not None:
            page.tell_rate(_rate_of(worker_stats))
        self.monitor_progress_step += 1
        if self.monitor_progress_step < self.MONITOR_PROGRESS_FREQ:
            return
        self.monitor_progress_step = 0
        rate = None if worker_stats is None else _rate_of(worker_stats)
        rates = [json.loads(each) for each in self._gather(json.dumps(rate))]
        best = max((each for each in rates if each is not None), default=None)
        if rate is None or best is None:
            self.is_worker_straggler = False
            return
        self.last_relative_prog_rate = rate / best if best > 0 else 1.0
        self.is_worker_straggler = self.last_relative_prog_rate < STRAGGLER_THRESHOLD
        if self.is_worker_straggler:
            _log.warning("rank %s is a straggler: its rate is %s, the best one is %s", self.rank, rate, best)

    def on_error(self, e: Exception) -> None:
        if isinstance(e, RuntimeError):
            record("train_step_runtime_error", self.rank)

    def leave(self) -> None:
        self._member.leave()


class AgentCoordinator(CoordinatorP2P):
    """Coordinator that finds the other workers through environment variables that the agent has set.

    If a worker exits, the agent replaces it with ``--on-failure replace``; otherwise, it restarts all
    workers. The constructor raises ``RuntimeError`` if no agent started this process. For its arguments, see
    :class:`CoordinatorP2P`.
    """

    def __init__(
        self, c10d_backend: str, process_group_timeout: int = 10000, coordinator_pg_timeout: int = 600000
    ) -> None:
        self._begin(c10d_backend, rendezvous_of_agent(), process_group_timeout, coordinator_pg_timeout)
        # An agent that restarts all workers does not set the variable.
        self.others_come_back = URL_VARIABLE in os.environ


def on_change(callback: Callable[[Stop], None] | None = None, init_method: str | None = None) -> Participant:
    """Join the job with a custom training loop, so that the loop survives failures of other workers.

    ::

        with elasticrs.train.on_change() as job:
            while not is_finished(model):
                job.meet()                               # a new round: RANK, WORLD_SIZE, MASTER_* are set
                try:
                    job.init_process_group("gloo")
                    synchronise(model)                   # the most advanced worker sends to all
                    while not is_finished(model):
                        step(model)
                        if job.passed():                 # once after each step
                            break
                except RuntimeError:                     # a collective was aborted
                    roll_back(model)
            job.close()                                  # end the job for all workers

    Args:
        callback: Called on a separate thread with a :class:`.Stop` as soon as a round ends for this worker.
            It should abort the communication that this library does not know, unless the stop is
            ``planned``. Must not raise.
        init_method: Rendezvous URL, as for :class:`CoordinatorP2P`. ``None`` for the agent's.

    Raises:
        RuntimeError: This process was not started by an agent.
        ValueError: The URL is invalid.
    """
    settings = rendezvous_of_agent() if init_method is None else parse(init_method, os.environ)
    return Participant(Membership(settings, callback))


class Participant:
    """Membership of a worker in a job. Only :meth:`close` ends the job, not the end of a ``with`` block."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._is_over = False

    def meet(self) -> Round:
        """Destroy the process group, wait for the next rendezvous round, and return that round.

        Raises:
            RendezvousError: this worker cannot join; ``RendezvousClosedError`` if the job has ended.
        """
        return self._member.meet()

    def init_process_group(self, backend: str, timeout: float = 10.0) -> None:
        """Create a default process group whose collectives (``timeout`` in seconds) can be aborted.

        If a program creates its default group in another way, it must do so in a block
        ``with round.connections.recorded()``. Raise ``RuntimeError`` if the round has ended, so that the
        program must call :meth:`meet`.
        """
        self._member.create_group(backend, self._member.connect(), datetime.timedelta(seconds=timeout))

    def passed(self) -> bool:
        """Count a completed step. Return true if the program must now call :meth:`meet`.

        The call sends no message, but may block while the workers agree on their last step.
        """
        return self._member.passed()

    def announce_end(self) -> None:
        """Announce that this worker has finished. The others stop after the same number of steps."""
        self._member.announce_end()

    def close(self) -> None:
        """End the job for all workers."""
        self._is_over = True
        self._member.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._is_over:
            self._member.leave()
