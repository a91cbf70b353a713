"""Coordinator for workers that find each other through a rendezvous URL, with or without an agent."""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

from elasticrs._engine.workers.node_page import page_of
from elasticrs.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from elasticrs.store import DistError
from elasticrs.train import groups
from elasticrs.train.checkpoint import get_checkpoint_manager
from elasticrs.train.coordinator import CannotContinueError, Coordinator, FinalState, StopException
from elasticrs.train.events import record
from elasticrs.train.meeting_url import parse
from elasticrs.train.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from elasticrs.train.meeting_url import MeetingPlace
    from elasticrs.train.membership import Round
    from elasticrs.train.state import State
    from elasticrs.train.worker_stats import WorkerStats

__all__ = ["CoordinatorP2P"]

_log = logging.getLogger("elasticrs.train")

STRAGGLER_THRESHOLD = 0.8
"""A worker is a straggler if its rate is less than this fraction of the best rate."""

ASK_AGAIN = 5.0
"""Seconds between two attempts to end a round for a requested checkpoint."""

_trained: set[tuple[str, str]] = set()
"""Jobs that this process has trained to the end, as pairs of the store's address and the job's name."""


def _rate_of(stats: WorkerStats) -> float | None:
    """Return the progress rate in the worker's statistics. Return ``None`` if it is unknown, infinite or NaN,
    because such a rate cannot be compared or written as JSON.
    """
    rate = stats.get_progress_rate()
    return None if rate is None or not math.isfinite(rate) else float(rate)


class CoordinatorP2P(Coordinator):
    """Coordinator that makes each worker a member of the rendezvous given by a URL. See
    :mod:`elasticrs.train.meeting_url`.

    With ``elasticrs://``, the first worker on the machine that the URL names hosts the coordination store,
    and the job ends when that process exits. If workers may die, host the store with ``python -m
    elasticrs.store``, with etcd, or with an agent (:class:`~elasticrs.train.agent.AgentCoordinator`).

    Args:
        c10d_backend: backend of the default process group, such as ``"gloo"``.
        init_method: rendezvous URL.
        max_num_trainers: maximum number of workers, if it is less than the URL's ``max_workers``.
        process_group_timeout: timeout of a collective, in milliseconds.
        coordinator_pg_timeout: time limit for all workers to reach :meth:`barrier`, in milliseconds.

    Attributes:
        rank: rank in the current round; -1 before the first round.
        world_size: number of workers in the current round.
        is_worker_straggler: true if this worker was much slower than the fastest worker at the last
            comparison.
        last_relative_prog_rate: rate of this worker divided by the rate of the fastest worker at the last
            comparison. The attribute does not exist until this worker has reported a rate.
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
        place = parse(init_method, os.environ, max_num_trainers)
        self._begin(c10d_backend, place, (process_group_timeout, coordinator_pg_timeout))

    def _begin(self, c10d_backend: str, place: MeetingPlace, timeouts: tuple[int, int]) -> None:
        process_group_timeout, coordinator_pg_timeout = timeouts
        if not 0 < process_group_timeout < coordinator_pg_timeout:
            raise ValueError(
                f"coordinator_pg_timeout: got {coordinator_pg_timeout} ms, expected more than "
                f"process_group_timeout ({process_group_timeout} ms), which has to be more than 0"
            )
        for notice in place.notices:
            _log.warning("%s", notice)
        self.c10d_backend = c10d_backend
        self.init_method = place.url
        self.max_num_trainers = place.rendezvous.max_nodes
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
        self._job = place.rendezvous.endpoint, place.rendezvous.job or place.rendezvous.run_id
        self._member = Membership(place.rendezvous, place.backend, stuck_timeout=place.stuck_timeout)
        # If an agent started this process, report training progress to it, even if the program uses its own
        # rendezvous URL.
        self._member.page = page_of(os.environ)
        if "nccl" in c10d_backend:
            self._member.abort = groups.abort

    def rendezvous_barrier(self) -> tuple[Any, int, int]:
        """Destroy the previous round's process groups, and wait for the next rendezvous round.

        Each call sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in the environment.

        Raises:
            StopException: the job is closed.
            NonRetryableException: the job has failed, too few workers joined in time, or the store is lost.
            RuntimeError: the round ended before its store was reached. The call can be repeated.
        """
        record("rendezvous_started", self.rank)
        groups.destroy()
        current = self._meet()
        self.rank, self.world_size, self.rounds_before = current.rank, current.world_size, current.number - 1
        self.is_worker_straggler, self.monitor_progress_step, self._gathered = False, 0, 0
        self._has_saved, self._ask_again_at = False, 0.0
        with current.connections.recorded():
            self._store = groups.connect(
                current.master_addr, current.master_port, lambda: self._member.is_broken
            )
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
                # Raise an error, because the job has failed. Without an error, the training loop would return
                # this worker's current state as the result of the training.
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
        """Create the default process group.

        Raises:
            RuntimeError: the round has ended. Call :meth:`rendezvous_barrier` for the next one.
        """
        current = self._member.round
        if current is None:
            raise RuntimeError("there is no round: call rendezvous_barrier() first")
        timeout = datetime.timedelta(milliseconds=self.process_group_timeout)
        with current.connections.recorded():
            groups.create(self.c10d_backend, self._store, self.rank, self.world_size, timeout)
        groups.record_further_groups(current.connections)

    def barrier(self) -> None:
        """Wait until all workers of this round have called this method.

        Raises:
            RuntimeError: the round has ended, or a worker did not arrive in time.
        """
        self._gather("")

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange numbers with all workers, and return each worker's numbers, ordered by rank. All workers
        must call this together.

        Raises:
            RuntimeError: see :meth:`barrier`.
        """
        return [json.loads(each) for each in self._gather(json.dumps(list(numbers)))]

    def _gather(self, own: str) -> list[bytes]:
        """Exchange texts through the round's store, and return the texts of all workers, ordered by rank.
        Collectives are not used, because they could interfere with the collectives of a training step.
        """
        if self._store is None:
            raise RuntimeError("there is no round: call rendezvous_barrier() first")
        last, self._gathered = self._gathered, self._gathered + 1
        store = self._store
        keys = [f"elasticrs/{self._gathered}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], own)
        store.wait(keys, datetime.timedelta(milliseconds=self.coordinator_pg_timeout))
        found: list[bytes] = store.multi_get(keys)
        # Delete this worker's key of the previous exchange. No worker still reads it, because all workers
        # have reached this exchange.
        store.delete_key(f"elasticrs/{last}/{self.rank}")
        return found

    def should_rendezvous(self, state: State) -> bool:  # noqa: ARG002 -- the loop's interface
        """Return true if this worker must leave the round now. The reason is a lost member, or an agreement
        to admit new workers or save a checkpoint. If nothing has changed, the call only reads memory.
        """
        if self._is_asked or (self._member.page is not None and self._member.page.is_asked):
            self._ask_the_others()
        return self._member.passed()

    def was_broken_off(self, *, is_meeting: bool) -> bool:
        """Return true if this worker's error was caused by the loss of a member or by the end of
        the round.
        """
        return self._member.was_broken_off(is_meeting=is_meeting)

    # --- requested checkpoints ---

    takes_requests = True

    @property
    def has_round(self) -> bool:
        return self._member.round is not None

    def request(self, *, leave: bool) -> None:
        """Record that a checkpoint was requested from this worker."""
        self._leaves = self._leaves or leave
        self._is_asked = True

    def _ask_the_others(self) -> None:
        """Ask all workers to leave the round after the same step. They do so to save a checkpoint, or to let
        this worker leave the job.
        """
        page = self._member.page
        has_manager = get_checkpoint_manager() is not None
        if not has_manager:
            if not self._was_told:
                _log.warning(
                    "rank %d: the requested checkpoint is not saved, because set_checkpoint_manager was not "
                    "called",
                    self.rank,
                )
            # Discard the request, because no checkpoint can be saved. A worker that is leaving the job keeps
            # the request, because the round must still end, and warns only once.
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
        # Record the number of the latest request before the save, because the save may be too early for
        # requests that arrive later.
        self._serves = 0 if self._member.page is None else self._member.page.asked
        return saves

    def saved(self, is_saved: bool) -> None:
        """Report to the agent whether the requested checkpoint was saved, then wait until all living workers
        have left the round.
        """
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
        """Announce that this worker has no more data. The other workers stop after the same number of steps.
        Then all workers start a final round.
        """
        self._member.announce_end()

    keeps_final_state = True

    def keep_final_state(self, content: memoryview | None, *, in_checkpoint: bool) -> None:
        """Keep the final state for workers that start after training has finished."""
        _trained.add(self._job)
        self._member.keep_final_state(content, in_checkpoint=in_checkpoint)

    def final_state(self) -> FinalState | None:
        """Return the final state of a job that finished before this worker joined it.

        ``None`` if no worker has published a final state.

        Raises:
            NonRetryableException: This process has already trained in this job, and cannot train in it again.
        """
        if self._job in _trained:
            raise CannotContinueError(
                f"this process has already trained in job {self._job[1]}, which has ended: a process trains "
                "once in a job"
            )
        return self._final

    def signal_training_done(self) -> None:
        """Close the job. Workers that join later receive the final state, or fail if it is not available."""
        self.stop_training = True
        _trained.add(self._job)
        self._member.shutdown()
        groups.destroy()

    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:  # noqa: ARG002
        """Compare the rates of all workers every :attr:`MONITOR_PROGRESS_FREQ` steps. Set
        :attr:`is_worker_straggler` to true if this worker is much slower than the fastest worker.

        The comparison costs two messages to the store in a thousand steps, or about 0.3 µs for each step. It
        does not use the collectives of the step.
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
        """Record a ``RuntimeError`` as an event."""
        if isinstance(e, RuntimeError):
            record("train_step_runtime_error", self.rank)

    def leave(self) -> None:
        """Leave the job, so that the other workers continue without this worker. Destroy the
        process groups.
        """
        self._member.leave()
        groups.destroy()
