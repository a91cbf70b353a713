"""Elastic rendezvous with torch's handler interface, for agents that poll for waiting nodes. The agent of
elasticrs drives the same state machine with events.

- **POLL-1** One thread handles the events of the store and the timers, so that the node takes part in the
  rendezvous (and may lead it) while its agent is busy. Other events come from the threads that call the
  handler.
- **POLL-2** All work is done under one lock, which is released only while a thread waits. Waiting threads are
  notified of every change.
- **POLL-3** An agent requests the next round only while it has no workers. If the last round is still
  running, the request means that its workers have failed on this node.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from elasticrs._engine.job.restart_policy import RestartSettings
from elasticrs._engine.nodes.driver import Driver
from elasticrs._engine.nodes.protocol import messages
from elasticrs._engine.nodes.rendezvous_store import KeptState, node_name
from elasticrs._engine.workers.plan import agent_hosts_store
from elasticrs.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.nodes.transport.store import Store

__all__ = ["ElasticRendezvousHandler", "error_of"]

_log = logging.getLogger("elasticrs.rendezvous")

_ERRORS: dict[str, type[RendezvousError]] = {
    "timeout": RendezvousTimeoutError,
    "lost": RendezvousConnectionError,
    "refused": RendezvousConnectionError,
    "spare": RendezvousGracefulExitError,
}

_MANY = 2**31 - 1
"""Maximum number of restarts: never reached, because an agent that polls counts restarts itself."""

_TICK = 60.0
_LAST_WORD = 1.0
"""Seconds to wait, after this node's workers have finished, until the leader reports success."""

_MARGIN = 5.0
_FAREWELL_TICK = 0.01


class ElasticRendezvousHandler(RendezvousHandler):
    """Handler for the back ends ``c10d``, ``elasticrs`` and ``etcd``, and for ``static`` with several nodes.

    All methods may be called from any thread. Torch has no ``leave``, ``ask_for_round``, ``open_job_store``
    and ``set_succeeded``.

    Args:
        rendezvous: description of the rendezvous.
        backend: name of the back end that the user has given.
        on_stop: called under a lock at the end of a round. It must neither block nor call this object.

    Attributes:
        round: number of the last round that :meth:`next_rendezvous` has returned; 0 before the first round.
        kept: state that is kept between the runs of an agent that uses :attr:`rendezvous` directly.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        backend: str,
        on_stop: Callable[[messages.Stop], None] | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.round = 0
        self._on_stop = on_stop
        self.kept = KeptState()
        self._backend = backend
        self._use_agent_store = not rendezvous.is_static and agent_hosts_store(os.environ)
        self._news = threading.Condition(threading.Lock())
        self._driver: Driver | None = None
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._start: messages.Start | None = None
        self._runs = self._is_to_stop = self._has_succeeded = self._is_shut = False
        self._outcome: messages.Outcome | None = None
        self._trouble: BaseException | None = None

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """False with ``static`` or ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, where rank 0 hosts the store."""
        return self._use_agent_store

    def get_run_id(self) -> str:
        return self.rendezvous.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. The caller must not have any workers at that time.

        If a round is running, and :meth:`num_nodes_waiting` has not reported a change, workers of this node
        have failed, and the round ends for all nodes. The store in the result has the interface of torch's
        ``Store``, and is closed when the next round starts on this node.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousConnectionError: the store cannot be reached, or rejects this node.
            RendezvousGracefulExitError: the job has succeeded, and did not need this node.
            RendezvousTimeoutError: too few nodes joined in time.
            ValueError: the endpoint cannot be used on this machine.
        """
        with self._news:
            if self._is_shut:
                raise RendezvousClosedError(f"the rendezvous of job {self.get_run_id()} is closed")
            if self._driver is None:
                self._begin()
            elif self._runs:
                self._without_workers()
            if self._thread is None:
                threading.Thread(target=self._work, name="elasticrs-rdzv", daemon=True).start()
            while True:
                self._raise_the_end()
                if self._is_to_stop:
                    # The round had already ended before `next_rendezvous` returned it.
                    self._without_workers()
                elif self._start is not None:
                    start, self._start, self._runs = self._start, None, True
                    info = self._info(start)
                    if info is not None:
                        return info
                else:
                    self._news.wait()

    def num_nodes_waiting(self) -> int:
        """Return a positive number if the current round has ended, even if no node waits.

        In torch, it is the number of waiting nodes.
        """
        with self._news:
            if self._outcome is not None:
                return int(self._outcome.kind != "succeeded")
            return int(self._is_to_stop or self._trouble is not None)

    def is_closed(self) -> bool:
        with self._news:
            return self._is_shut or self._outcome is not None

    def set_closed(self) -> None:
        """End the job for all nodes. If this node has not joined yet, close only this handler."""
        with self._news:
            if self._driver is None:
                self._is_shut = True
            elif self._outcome is None:
                self._close_job(self._driver)

    def leave(self) -> None:
        """Leave the job as a planned change, not a failure.

        The current round ends for all nodes, and this handler is closed.
        """
        with self._news:
            if self._driver is not None and self._outcome is None:
                self._tell(self._driver, messages.Leave(f"node {node_name()} leaves"))

    def ask_for_round(self, reason: str) -> None:
        """End the current round, if any, as a planned change, not a failure.

        All nodes show ``reason``, a short text.
        """
        with self._news:
            if self._driver is not None and self._outcome is None:
                self._tell(self._driver, messages.AskForRound(reason))

    def open_job_store(self) -> Store:
        """Open a store for all nodes and rounds of the job. The caller has to close it.

        Raises:
            DistNetworkError: the store cannot be reached.
            RendezvousStateError: this node has not joined the rendezvous yet, or the handler was shut down.
        """
        with self._news:
            driver = self._driver
        if driver is None:
            raise RendezvousStateError(f"the rendezvous of job {self.get_run_id()} has no connection")
        return driver.store.open_job_store()

    def set_succeeded(self) -> None:
        """Record that this node's workers have succeeded, so that :meth:`shutdown` stops no other node."""
        with self._news:
            self._has_succeeded = self._runs and not self._is_to_stop

    def shutdown(self) -> bool:
        """Leave the job. Unless this node has succeeded, end the job for all nodes.

        All workers of this node must have exited. The call takes at most about ``close_timeout`` seconds.
        Return true if the other nodes can see that the job has ended.
        """
        with self._news:
            self._is_shut = True
            driver = self._driver
            if driver is None:
                return self._leave_kept_store()
            driver.store.close_shared_store()
            if self._outcome is None and self._trouble is None:
                self._leave(driver)
            self._driver = None
            self._news.notify_all()
            knows = self._outcome is not None
        self._end_thread()
        driver.close()
        return knows

    def _leave_kept_store(self) -> bool:
        """Close the job's store, if this process serves it. First wait a limited time, because other nodes
        may still have to read the job's outcome there. Return true if all have disconnected.
        """
        deadline = time.monotonic() + self.rendezvous.settings.close_timeout
        while (is_needed := self.kept.is_needed()) and time.monotonic() < deadline:
            time.sleep(_FAREWELL_TICK)
        self.kept.close()
        return not is_needed

    # --- methods whose caller must hold the lock ---

    def _begin(self) -> None:
        driver = Driver(
            self.rendezvous,
            role="default",
            nproc=1,
            policy=RestartSettings(_MANY),
            supervisor=None,
            use_agent_store=self._use_agent_store,
        )
        wake = -1
        try:
            wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            actions = driver.begin()
        except BaseException:
            driver.close()
            if wake >= 0:
                os.close(wake)
            raise
        self._driver, self._wake = driver, wake
        self._take(actions)

    def _tell(self, driver: Driver, *events: messages.Event) -> None:
        self._take(driver.tell(*events))
        # Wake the thread that waits for events, because it may have to wait for a new timer or connection.
        os.eventfd_write(self._wake, 1)

    def _without_workers(self) -> None:
        driver = self._driver
        if driver is None:
            return
        has_failed = self._runs and not self._is_to_stop
        self._runs = self._is_to_stop = self._has_succeeded = False
        cause = None
        if has_failed:
            cause = {
                "node": node_name(),
                "message": "the agent has asked for another round: its workers have failed",
                "time_ns": time.time_ns() + driver.store.clock.offset_ns,
            }
            self._tell(driver, messages.WorkerFailed(cause))
            self._is_to_stop = False
        self._take(driver.group_over(messages.GroupEnded(cause)))
        os.eventfd_write(self._wake, 1)

    def _close_job(self, driver: Driver) -> None:
        self._tell(driver, messages.Leave(f"closed by node {node_name()}", close=True))

    def _leave(self, driver: Driver) -> None:
        if self._has_succeeded and not self._is_to_stop:
            self._runs = False
            self._take(driver.group_over(messages.WorkersDone()))
            os.eventfd_write(self._wake, 1)
            self._await_outcome(_LAST_WORD)
            if self._outcome is None:
                self._tell(driver, messages.Leave(f"node {node_name()} has finished"))
        else:
            self._close_job(driver)
        self._await_outcome(self.rendezvous.settings.close_timeout + _MARGIN)

    def _await_outcome(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._outcome is None and self._trouble is None:
            if self._is_to_stop:
                self._without_workers()
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._news.wait(left)

    def _take(self, actions: Iterable[messages.LoopAction]) -> None:
        for action in actions:
            if isinstance(action, messages.Start):
                self._start, self._is_to_stop = action, False
            elif isinstance(action, messages.Stop):
                self._start, self._is_to_stop = None, True
                if self._on_stop is not None:
                    self._on_stop(action)
            elif isinstance(action, messages.Announce):
                _log.info("%s", action.text)
            elif isinstance(action, messages.Exit):
                self._start, self._outcome = None, action.outcome
        self._news.notify_all()

    def _raise_the_end(self) -> None:
        if self._trouble is not None:
            raise RendezvousStateError(f"the rendezvous failed: {self._trouble!r}") from self._trouble
        if self._outcome is not None:
            raise error_of(self._outcome)
        if self._is_shut:
            raise RendezvousClosedError(f"the rendezvous of job {self.get_run_id()} is closed")

    def _info(self, start: messages.Start) -> RendezvousInfo | None:
        driver = self._driver
        if driver is None:
            return None
        trouble = driver.open_store() if start.serves_store else None
        if trouble is not None:
            self._runs = False
            self._take(driver.group_over(messages.StartFailed(trouble)))
            return None
        address = RendezvousStoreInfo(start.master_addr, start.master_port)
        from elasticrs._engine.nodes.transport.store import DistNetworkError

        try:
            store = driver.store.open_shared_store(start.round)
        except DistNetworkError as error:
            text = f"no connection to {self.rendezvous.store}: {error}"
            raise RendezvousConnectionError(text) from error
        self.round = start.round
        return RendezvousInfo(store, start.group_rank, start.ranks.group_world_size, address)

    # --- the thread that waits for events ---

    def _work(self) -> None:
        with self._news:
            # If an exception interrupts `next_rendezvous` before this thread has begun, the next call starts
            # another thread. Only one of them may run the loop.
            if self._thread is not None or self._driver is None:
                return
            self._thread = threading.current_thread()
        try:
            while True:
                with self._news:
                    driver = self._driver
                    if driver is None or self._outcome is not None:
                        return
                    self._take(driver.poll())
                    seconds = driver.seconds_left(_TICK)
                    fds = [self._wake, *driver.fds]
                poll = select.poll()
                for fd in fds:
                    poll.register(fd, select.POLLIN)
                # Round up. Otherwise, a timer that is due in less than 1 ms would cause a busy loop.
                poll.poll(int(seconds * 1000) + 1)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        except Exception as error:
            with self._news:
                self._trouble = error
                self._news.notify_all()

    def _end_thread(self) -> None:
        with self._news:
            thread, self._thread = self._thread, None
        os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join()
        os.close(self._wake)
        self._wake = -1


def error_of(outcome: messages.Outcome) -> RendezvousError:
    """Return the rendezvous error that tells a caller about this outcome of the job."""
    kind = _ERRORS.get(outcome.kind, RendezvousClosedError)
    error = kind(outcome.message or f"the rendezvous is closed: {outcome.kind}")
    if isinstance(error, RendezvousClosedError):
        error.has_failed = outcome.has_failed or outcome.kind == "failed"
    return error
