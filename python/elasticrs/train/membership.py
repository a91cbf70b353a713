"""Membership of a worker in a job's rendezvous, over any number of rounds.

When a member dies, the store notifies the others within about a millisecond. Each worker's watching thread
then aborts the main thread's collective (:mod:`~elasticrs.train.groups`), and all start a new rendezvous
round. If the members change without a failure, all leave the round after an agreed step
(:mod:`~elasticrs.train.state_machine`).

- **MEMBER-1** a step sends no message: :meth:`Membership.passed` only reads memory.
- **MEMBER-2** the watching thread shuts down connections until the main thread has requested the next round.
  The watching thread never raises an exception in user code.
- **MEMBER-3** if the main thread does not leave a broken round in time, the watching thread ends the process,
  and the others continue without it.
- **MEMBER-4** a forked child takes no part in the rendezvous, and holds none of its parent's connections.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from elasticrs._engine.job.value import Record, fresh
from elasticrs._engine.workers.node_page import page_of
from elasticrs.rendezvous.api import RendezvousClosedError, RendezvousError
from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler
from elasticrs.store import DistError
from elasticrs.train import final_state, groups
from elasticrs.train.groups import Connections
from elasticrs.train.state_machine import (
    AT_ONCE,
    LeaveStep,
    decode_leave_step,
    encode_leave_step,
    largest_cap,
)

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterator
    from typing import Any

    from elasticrs._engine.nodes.protocol.messages import Stop
    from elasticrs.store import Store
    from elasticrs.train.final_state import LateWorker
    from elasticrs.train.rendezvous import WorkerRendezvous

__all__ = ["Membership", "Round"]

_log = logging.getLogger("elasticrs.train")

_FIRST_SPAN = 25.0
"""Initial longest time between two step boundaries, in seconds, because the first step may compile code."""

_TICK = 0.01
_AGREE_TIMEOUT = 10.0
"""Time limit in seconds for the watching threads of all workers to agree on a step."""

_END_TIMEOUT = 5.0
"""Seconds to wait for other workers, or for a thread, when this worker leaves a round or the job."""

_NEWS_TIMEOUT = 0.1
"""Seconds to wait for the report of a lost member after an error. Without one, this worker is the cause."""


class Round(Record):
    """A rendezvous round: a period in which the same workers train together, until one joins or leaves. Round
    numbers start at 1. ``board`` is the store in which the workers' watching threads exchange messages.
    """

    number: int
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    board: Store
    connections: Connections
    step: LeaveStep = fresh(factory=LeaveStep)


class Membership:
    """Membership of one worker in a job, whose workers train together in rounds.

    The thread that requests the rounds must be the one that counts the steps.

    Args:
        settings: settings of the rendezvous.
        on_change: called first by the watching thread when a round ends. Its errors are logged.

    Attributes:
        round: current round; ``None`` if there is none.
        page: memory page in which this worker shows its agent, if any, each round and the end of training.
    """

    def __init__(self, settings: WorkerRendezvous, on_change: Callable[[Stop], None] | None = None) -> None:
        self._handler = ElasticRendezvousHandler(
            settings.rendezvous, settings.backend, on_stop=self._record_stop
        )
        # Use the agent's page even if the program has its own URL, because the agent has to see the rounds.
        self.page = page_of(os.environ)
        self._on_change = on_change
        self._stuck_timeout = settings.stuck_timeout
        self._uses_nccl = False
        self._is_alone = self._has_failed = False
        # Keep the lock itself. Every step acquires it, which takes twice as long through the condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.round: Round | None = None
        self._stop: Stop | None = None
        self._longest, self._since = _FIRST_SPAN, 0.0
        self._has_passed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._is_over = False
        etcd = settings.rendezvous.etcd
        endpoints = () if etcd is None else etcd.endpoints
        self._ports = {settings.rendezvous.port, *(port for _, port in endpoints)}
        _members.append(self)

    # --- the main thread ---

    @property
    def is_broken(self) -> bool:
        """True if no round is running, or if the round ended before its members agreed on a last step."""
        current, stop = self.round, self._stop
        if current is None or current.step.at == AT_ONCE:
            return True
        return stop is not None and stop.round >= current.number and not stop.planned

    def meet(self) -> Round:
        """Destroy the process groups, leave the current round, and wait for the next one.

        Sets the environment variables ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. The last
        two are the address of the new round's store.

        Raises:
            RendezvousError: the job is closed, too few workers joined, or the store does not respond.
            RuntimeError: this process was forked from a worker.
        """
        if self._pid != os.getpid():
            raise RuntimeError(groups.not_a_worker(self._pid))
        groups.destroy()
        with self._changed:
            # From here on, the watching thread must ignore the previous round.
            self.round = None
        if self._thread is None:
            self._is_over = False
            self._thread = threading.Thread(target=self._watch, name="elasticrs-train", daemon=True)
            self._thread.start()
        try:
            info = self._handler.next_rendezvous()
        except RendezvousClosedError as error:
            self._has_failed = error.has_failed
            self._finish()
            raise
        address = info.bootstrap_store_info
        assert address is not None
        ranks = info.rank, info.world_size
        host, port = address.master_addr, address.master_port
        current = Round(self._handler.round, *ranks, host, port, info.store, Connections(port))
        os.environ.update(
            RANK=str(current.rank),
            WORLD_SIZE=str(current.world_size),
            MASTER_ADDR=current.master_addr,
            MASTER_PORT=str(current.master_port),
            TORCHELASTIC_USE_AGENT_STORE=str(self._handler.use_agent_store),
        )
        if self.page is not None:
            self.page.place(current.rank, current.world_size, current.number)
        with suppress(DistError):
            # Ignore errors: this key is optional. Without it, the other workers do not wait for this worker.
            current.board.hold(f"here/{current.rank}")
        self._since = time.monotonic()
        with self._changed:
            self.round = current
            self._changed.notify_all()
        return current

    def connect(self) -> Any:
        """Return a client (torch's) of the round's store. Raise ``RuntimeError`` if the round has ended."""
        current = self._joined()
        with current.connections.recorded():
            return groups.connect(current.master_addr, current.master_port, lambda: self.is_broken)

    def create_group(self, backend: str, store: Any, timeout: datetime.timedelta) -> None:
        """Create torch's default process group in such a way that its collectives can be aborted. ``timeout``
        is the time limit of a collective. Raise ``RuntimeError`` if the round has ended.
        """
        current = self._joined()
        self._uses_nccl = "nccl" in backend
        with current.connections.recorded():
            groups.create(backend, store, current.rank, current.world_size, timeout)
        groups.record_further_groups(current.connections)

    def _joined(self) -> Round:
        if self.round is None:
            raise RuntimeError("there is no round: call meet() first")
        return self.round

    def passed(self) -> bool:
        """Count a training step. Return true if this worker must leave the round now. If the round is ending,
        wait until all workers have agreed on the step after which they leave.
        """
        with self._lock:
            current, now = self.round, time.monotonic()
            if current is None:
                return True
            step = current.step
            step.done += 1
            if now - self._since > self._longest or not self._has_passed:
                self._longest, self._has_passed = now - self._since, True
            self._since = now
            while (decision := step.decision()) == "wait":
                self._changed.wait()
                self._since = time.monotonic()
            return decision == "leave"

    def was_broken_off(self, *, is_meeting: bool) -> bool:
        """Return true if another worker's loss or failure ended the round and caused this worker's error.
        Return false at once if all connections are open, unless groups are being created (``is_meeting``).
        Otherwise, wait until the store has reported a loss, because a lease may have to expire first.
        """
        current = self.round
        if current is None:
            return True
        timeout = _NEWS_TIMEOUT
        if not is_meeting:
            if current.connections.are_intact():
                timeout = 0.0
            else:
                timeout += self._handler.rendezvous.settings.ttl
        with self._changed:
            return self._changed.wait_for(lambda: self.is_broken, timeout)

    def ask_for_round(self, reason: str, *, saves: bool) -> None:
        """Ask all workers to leave the round after an agreed step, maybe to save first. Log ``reason``."""
        current = self.round
        if current is None:
            return
        if saves:
            with suppress(DistError):
                # Set the key first, because rank 0 may read it right after the request.
                current.board.set("save", "")
        self._handler.ask_for_round(reason)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Set no time limit for leaving a broken round during a ``with`` block without collectives."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @property
    def has_left_as_agreed(self) -> bool:
        """True if this worker has just completed the step after which all workers leave the round."""
        with self._lock:
            current = self.round
            return current is not None and bool(current.step.at) and current.step.at == current.step.done

    @property
    def saves(self) -> bool:
        """True if all workers must save a checkpoint now, before they leave the round."""
        with self._lock:
            current = self.round
            return self.has_left_as_agreed and current is not None and current.step.saves

    def wait_for_others(self) -> None:
        """Wait up to 5 s until all living workers have left this round. They may still read from this one."""
        current = self.round
        if current is not None:
            with suppress(DistError):
                _wait_for_all(current)

    def announce_end(self) -> None:
        """Announce that this worker has finished training. The others stop after the same number of steps."""
        current = self.round
        if current is not None:
            with suppress(DistError):
                current.board.compare_set("done", "", str(current.step.done))

    def keep_final_state(self, content: memoryview | None, *, in_checkpoint: bool) -> None:
        """Publish the final state for workers that start later. See :meth:`.Coordinator.keep_final_state`."""
        current = self.round
        if current is None:
            return
        near = current.master_addr, current.master_port
        try:
            with closing(self._handler.open_job_store()) as store:
                final_state.publish(
                    store, current.rank, current.world_size, content, near, in_checkpoint=in_checkpoint
                )
        except (DistError, OSError, RendezvousError) as error:
            _log.warning(
                "rank %d: the final state is not kept, so a worker that is replaced from now on may fail: %s",
                current.rank,
                error,
            )

    def join_late(self) -> LateWorker | None:
        """Return a rank and the final state of a finished job, if any. Raise ``DistError`` or ``OSError``."""
        rendezvous = self._handler.rendezvous
        password = None if rendezvous.etcd is None else rendezvous.etcd.password
        is_protected = bool(rendezvous.settings.token or password)
        with closing(self._handler.open_job_store()) as store:
            late = final_state.join_late(store, is_protected=is_protected)
        if late is not None:
            os.environ.update(RANK=str(late.rank), WORLD_SIZE=str(late.world_size))
        return late

    def leave(self) -> None:
        """Leave the job at once. The other workers abort their current step and continue."""
        has_left = self.has_left_as_agreed
        with self._changed:
            current, self.round = self.round, None
        if current is not None and not has_left:
            with suppress(DistError):
                current.board.set("gone", "")
        if self._thread is not None:
            self._handler.leave()
            # This new thread runs until the store has recorded that this worker has left. If this process
            # hosts the store, the thread also waits until the other workers no longer need the store.
            farewell = threading.Thread(target=self._farewell, name="elasticrs-farewell", daemon=True)
            farewell.start()
            if has_left:
                # Wait, because this process is about to exit and would kill the thread.
                farewell.join(_END_TIMEOUT)
        groups.destroy()

    def _farewell(self) -> None:
        with suppress(RendezvousError):
            self._handler.next_rendezvous()
        self._end_thread()

    def shutdown(self) -> None:
        """Leave the round, and release all resources. Unless this worker has left the job, close the job. All
        workers call this after their last barrier. Closing aborts collectives, so each worker first waits up
        to 5 s until the others have passed that barrier. A process that hosts the store waits about
        ``close_timeout`` seconds longer.
        """
        self._finish()
        with self._changed:
            current, self.round = self.round, None
        if current is not None:
            with suppress(DistError):
                _wait_for_all(current)
        if self in _members:
            _members.remove(self)
        self._handler.shutdown()
        self._end_thread()
        groups.destroy()

    def _end_thread(self) -> None:
        """Stop the watching thread after its current work, and wait at most :data:`_END_TIMEOUT` for it."""
        with self._changed:
            thread, self._thread, self._is_over = self._thread, None, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_TIMEOUT)

    def _finish(self) -> None:
        """Notify the agent that this worker may exit now, unless the job has failed."""
        if self.page is not None and not self._has_failed:
            self.page.finish()

    # --- rendezvous callback, called while the rendezvous holds its lock ---

    def _record_stop(self, stop: Stop) -> None:
        with self._changed:
            self._stop = stop
            self._changed.notify_all()

    # --- the watching thread ---

    def _watch(self) -> None:
        last = 0
        while True:
            with self._changed:
                while (due := self._due(last)) is None:
                    if self._is_over:
                        return
                    self._changed.wait()
            current, stop = due
            last = current.number
            try:
                self._act(current, stop)
            except Exception:
                _log.exception("round %s: the watching thread failed", current.number)
                self._break_off(current)

    def _due(self, last: int) -> tuple[Round, Stop] | None:
        current, stop = self.round, self._stop
        if current is None or stop is None or not last < current.number <= stop.round:
            return None
        return current, stop

    def _act(self, current: Round, stop: Stop) -> None:
        if self._on_change is not None:
            try:
                self._on_change(stop)
            except Exception:
                _log.exception("on_change failed")
        try:
            if stop.planned and self._agree(current):
                return
        except DistError as error:
            if not self._is_in(current):
                return
            _log.warning("round %s: no agreement on a step: %s", current.number, error)
        if not stop.fenced:
            self._await_end(current)
        self._break_off(current)

    def _is_in(self, current: Round) -> bool:
        return self.round is current

    def _set_leave_step(self, current: Round, at: int, *, saves: bool = False) -> None:
        with self._changed:
            current.step.at, current.step.saves = at, saves
            self._changed.notify_all()

    def _agree(self, current: Round) -> bool:
        """Leave the round after an agreed step. Return false if that fails, for example if a worker dies."""
        board, step, world = current.board, current.step, current.world_size
        with self._changed:
            cap = step.set_cap()
        board.set(f"cap/{current.rank}", str(cap))
        caps = [f"cap/{rank}" for rank in range(world)]
        deadline = time.monotonic() + _AGREE_TIMEOUT
        seen: set[str] = set()
        while self._is_in(current):
            keys = set(board.list_keys())
            if _has_lost(seen, keys) or not keys.isdisjoint(("done", "gone")):
                return False
            seen |= keys
            if step.at is None:
                if "leave" in keys:
                    at, saves = decode_leave_step(board.get("leave").decode())
                    self._set_leave_step(current, at, saves=saves)
                elif current.rank == 0 and keys.issuperset(caps):
                    at = largest_cap([int(each) for each in board.multi_get(caps)])
                    board.set("leave", encode_leave_step(at, saves="save" in keys))
                    continue
                elif time.monotonic() > deadline:
                    return False
            time.sleep(_pause(current))
        return True

    def _await_end(self, current: Round) -> None:
        """If a worker has finished, wait until this worker has done as many steps, or a worker has died."""
        with suppress(DistError):
            if self._is_in(current) and current.board.check(["done"]):
                self._set_leave_step(current, int(current.board.get("done")))
        seen: set[str] = set()
        silent_since: float | None = None
        while self._is_in(current) and current.step.done < (current.step.at or AT_ONCE):
            # Look for dead peers, because a collective with a dead peer may never return.
            try:
                keys = set(current.board.list_keys())
            except DistError:
                silent_since = time.monotonic() if silent_since is None else silent_since
                if time.monotonic() - silent_since > self._stuck_timeout:
                    return
                keys = seen
            if _has_lost(seen, keys):
                return
            seen |= keys
            time.sleep(_pause(current))

    def _break_off(self, current: Round) -> None:
        """Abort the collective that blocks the main thread. End this process if that takes too long."""
        self._set_leave_step(current, AT_ONCE)
        connections, limit = current.connections, self._stuck_timeout + 2 * self._longest
        began = time.monotonic()
        if self._uses_nccl and self._is_in(current):
            try:
                groups.abort()
            except Exception:
                _log.exception("round %s: a process group could not be aborted", current.number)
        is_logged = False
        while self._is_in(current):
            try:
                connections.shut()
                connections.knock(current.world_size)
                if connections.needs_last_resort(began, limit) and (peers := connections.shut_others()):
                    _log.warning(
                        "rank %d: the process groups of round %d do not stop: shut down %d connections that "
                        "were opened while a group was created and may belong to other threads; peers: %s",
                        current.rank,
                        current.number,
                        len(peers),
                        ", ".join(peers),
                    )
            except Exception:
                # The error may be temporary, such as `EMFILE`.
                if not is_logged:
                    _log.exception("round %s: a collective could not be interrupted yet", current.number)
                is_logged = True
            if self._is_alone:
                began = time.monotonic()
            elif time.monotonic() - began > limit:
                _end_process(current, limit)
            time.sleep(_TICK)


def _has_lost(seen: set[str], keys: set[str]) -> bool:
    """Return true if a worker died in the round: its ``here`` key has gone, and it has no ``out`` key."""
    return any(each.replace("here/", "out/") not in keys for each in seen - keys)


def _wait_for_all(current: Round) -> None:
    """Announce that this worker has left the round, and wait until all living workers have left it too."""
    board, ranks = current.board, range(current.world_size)
    board.set(f"out/{current.rank}", "")
    deadline = time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        keys = set(board.list_keys())
        if all(f"out/{rank}" in keys or f"here/{rank}" not in keys for rank in ranks):
            return
        time.sleep(_pause(current))


def _pause(current: Round) -> float:
    return 0.002 * current.world_size  # Poll less often with more workers, because each of them polls.


def _end_process(current: Round, limit: float) -> NoReturn:
    text = f"rank {current.rank} did not leave round {current.number} within {limit:.1f} s and ends itself"
    try:
        os.write(2, f"elasticrs.train: {text}; where it is:\n".encode())
        faulthandler.dump_traceback(2, all_threads=True)
    finally:
        os._exit(1)


_members: list[Membership] = []


def _after_fork_in_child() -> None:
    while _members:
        member = _members.pop()
        current, member.round = member.round, None
        connections = current.connections if current is not None else Connections()
        ports = member._ports | ({current.master_port} if current is not None else set())
        connections.leave_to_parent(ports)


os.register_at_fork(after_in_child=_after_fork_in_child)
