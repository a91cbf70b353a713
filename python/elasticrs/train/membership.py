"""A worker as a member of its own rendezvous: it stays, while rounds come and go.

The session with the coordination store is the worker's lease. When a member dies, the store tells the others
in about a millisecond; a watching thread then takes this process's main thread out of its collective
(:mod:`~elasticrs.train.groups`), and all meet again. Changes in which nobody failed are no reason to break a
step: all leave at an agreed one (:mod:`~elasticrs.train.leave_step`).

- **MEMBER-1** steps cost no message: :meth:`Membership.passed` is a look at this object.
- **MEMBER-2** the watching thread ends connections until the main thread is *out*, which is when it asks for
  the next round; it never raises into code of the user.
- **MEMBER-3** one that does not come out in time ends its process: others, or an agent, go on without it.
- **MEMBER-4** a child made by ``fork`` takes no part, and holds none of its parent's connections.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from elasticrs.job.value import Record, fresh
from elasticrs.rendezvous.api import RendezvousClosedError, RendezvousError
from elasticrs.rendezvous.elastic.handler import ElasticRendezvousHandler
from elasticrs.store import DistError
from elasticrs.train.groups import Connections
from elasticrs.train.leave_step import AT_ONCE, LeaveStep, agreed, heard, said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticrs.rendezvous.elastic.messages import Stop
    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous
    from elasticrs.store import Store
    from elasticrs.train.final_state import Late
    from elasticrs.workers.node_page import WorkerPage

__all__ = ["Membership", "Round"]

_log = logging.getLogger("elasticrs.train")

STUCK_TIMEOUT = 10.0
"""Seconds that the main thread may take to come out, besides twice the longest time between two boundaries
that was seen here: a step is left alone while it is as long as others were.
"""

_FIRST_SPAN = 25.0
"""What counts for that until a boundary was passed: the first step may compile."""

_TICK = 0.01
_AGREE_TIMEOUT = 10.0
"""Seconds for the watching threads of all workers to agree on a step."""

_END_TIMEOUT = 5.0
"""Seconds for the others to come to the end of the job, too."""

_NEWS_TIMEOUT = 0.1
"""Seconds to wait for the store to report a lost member after an error. The store usually needs a few
milliseconds. If its report comes too late, the error is counted as this worker's own, which does little harm.
"""


class Round(Record):
    """One round, as a member has it.

    Args:
        number: from 1.
        rank: of this worker.
        world_size: how many they are.
        master_addr, master_port: where the workers' store listens.
        board: a store of ours that the members share, for what the watching threads agree on.
        connections: of the process groups.
    """

    number: int
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    board: Store
    connections: Connections = fresh(factory=Connections)
    step: LeaveStep = fresh(factory=LeaveStep)


class Membership:
    """One worker among those of a job. Rounds are asked for, and steps counted, by one thread.

    Args:
        rendezvous: with whom to meet, and where.
        backend: the name under which it was asked for.
        on_change: called by the watching thread when a round ends while this worker is in it, before anything
            else is done about that; what it raises is logged.
        stuck_timeout: see :data:`STUCK_TIMEOUT`.

    Attributes:
        abort: ends what is no connection of a recorded group, such as communicators of NCCL; called once for
            each broken round, by the watching thread.
        page: shared with the agent, where there is one: it is told of each round, and when the training has
            ended.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        backend: str,
        *,
        on_change: Callable[[Stop], None] | None = None,
        stuck_timeout: float = STUCK_TIMEOUT,
    ) -> None:
        self._handler = ElasticRendezvousHandler(rendezvous, backend, on_stop=self._told)
        self.abort: Callable[[], None] | None = None
        self.page: WorkerPage | None = None
        self._on_change = on_change
        self._stuck_timeout = stuck_timeout
        self._is_alone = self._has_failed = False
        # Keep a reference to the lock, because every training step acquires it, and acquiring it through the
        # condition takes twice as long.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._round: Round | None = None
        self._stop: Stop | None = None
        self._longest, self._since = _FIRST_SPAN, 0.0
        self._has_passed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._is_over = False
        etcd = rendezvous.etcd
        self._ports = {rendezvous.port, *(port for _, port in (etcd.endpoints if etcd is not None else ()))}
        _members.append(self)

    # --- the main thread ---

    @property
    def round(self) -> Round | None:
        """The round that this worker is in; ``None`` while it is out."""
        return self._round

    @property
    def is_broken(self) -> bool:
        """True if the round has ended in a way that ends its process groups, too, or there is none."""
        current, stop = self._round, self._stop
        if current is None or current.step.at == AT_ONCE:
            return True
        return stop is not None and stop.round >= current.number and not stop.planned

    def meet(self) -> Round:
        """Leave the round, and wait for the next one; the process groups are gone.

        Sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, so that nobody reads those of an
        earlier round; what is listening there is a store of torch's kind, served by this library
        (``TORCHELASTIC_USE_AGENT_STORE``).

        Raises:
            RendezvousError: there is none for this worker: the job is closed, too few came, no store answers.
            RuntimeError: this process was forked by a worker.
        """
        if self._pid != os.getpid():
            raise RuntimeError("a process that a worker has forked cannot take its place among the workers")
        with self._changed:
            # Out: the watching thread does nothing any more.
            self._round = None
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
        place = (info.rank, info.world_size, address.master_addr, address.master_port)
        current = Round(self._handler.round, *place, info.store, Connections(address.master_port))
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
            # Without it a planned change is not waited for.
            current.board.hold(f"here/{current.rank}")
        self._since = time.monotonic()
        with self._changed:
            self._round = current
            self._changed.notify_all()
        return current

    def passed(self) -> bool:
        """Count a boundary: one more step is done. True if it is time to leave the round.

        May wait while a planned change is agreed on.
        """
        with self._lock:
            current, now = self._round, time.monotonic()
            if current is None:
                return True
            step = current.step
            step.done += 1
            if now - self._since > self._longest or not self._has_passed:
                self._longest, self._has_passed = now - self._since, True
            self._since = now
            while (verdict := step.verdict()) == "wait":
                self._changed.wait()
                self._since = time.monotonic()
            return verdict == "leave"

    def was_broken_off(self, *, is_meeting: bool) -> bool:
        """Return true if an error of this worker was caused by the end of the round, because another member
        was lost, or failed and left.

        While all connections of the process groups are open, no other member can have caused the error. If a
        connection was closed, wait for the store's report: it notices a lost member only when its lease
        expires.

        Args:
            is_meeting: true if the process groups are still being created, so their connections prove
                nothing.
        """
        current = self._round
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
        """All shall leave the round at an agreed step, and meet anew; nobody has failed.

        Args:
            reason: a few words for the log.
            saves: they shall save a checkpoint there.
        """
        current = self._round
        if current is None:
            return
        if saves:
            with suppress(DistError):
                # Before the round ends: whoever sets the step, sees it.
                current.board.set("save", "")
        self._handler.ask_for_round(reason)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this block the main thread is in no collective, and may take any time to leave a round."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @property
    def has_left_as_agreed(self) -> bool:
        """True if all leave the round at the step that this worker has just done."""
        with self._lock:
            current = self._round
            return current is not None and bool(current.step.at) and current.step.at == current.step.done

    @property
    def saves(self) -> bool:
        """True if they save a checkpoint there."""
        with self._lock:
            current = self._round
            return self.has_left_as_agreed and current is not None and current.step.saves

    def wait_for_others(self) -> None:
        """Wait until all that live are out of this round, 5 s at most. It is left: what they read of each
        other is there until then.
        """
        current = self._round
        if current is not None:
            with suppress(DistError):
                _wait_for_all(current)

    def announce_end(self) -> None:
        """The training has ended here. When the round ends, as it does when this worker asks for the next
        one, the others first do the steps that were done here.
        """
        current = self._round
        if current is not None:
            with suppress(DistError):
                current.board.compare_set("done", "", str(current.step.done))

    def keep_final_state(self, content: memoryview | None, *, in_checkpoint: bool) -> None:
        """Publish the final state for workers that start after the training has ended.

        Args:
            content: copy to serve to these workers. ``None`` if this worker has no copy.
            in_checkpoint: true if the newest checkpoint holds the final state.
        """
        from elasticrs.train import final_state

        current = self._round
        if current is None:
            return
        near = current.master_addr, current.master_port
        place, seat = self._place(), (current.rank, current.world_size)
        try:
            with closing(self._handler.open_job_store()) as store:
                final_state.publish(store, place, *seat, content, near, in_checkpoint=in_checkpoint)
        except (DistError, OSError, RendezvousError) as error:
            _log.warning(
                "rank %d: the final state is not kept, so a worker that is replaced from now on may fail: %s",
                current.rank,
                error,
            )

    def join_late(self) -> Late | None:
        """Get a rank for this process, and the final state of a job that ended before this process took part.

        Sets ``RANK`` and ``WORLD_SIZE``. Returns ``None`` if no worker has published a final state.

        Raises:
            DistError: The store cannot be reached.
            OSError: The copy cannot be served to other workers.
            RendezvousError: This process has not joined the rendezvous, or has left it.
        """
        from elasticrs.train import final_state

        with closing(self._handler.open_job_store()) as store:
            late = final_state.join_late(store, self._place())
        if late is not None:
            os.environ.update(RANK=str(late.rank), WORLD_SIZE=str(late.world_size))
        return late

    def _place(self) -> str | None:
        from elasticrs.train import final_state

        return None if self.page is None else final_state.place_of(os.environ)

    def leave(self) -> None:
        """Leave the job at once. The other workers abort their current step and continue without this one."""
        has_left = self.has_left_as_agreed
        with self._changed:
            current, self._round = self._round, None
        if current is not None and not has_left:
            with suppress(DistError):
                current.board.set("gone", "")
        if self._thread is None:
            # This worker has never joined a round, or has already left the job.
            return
        self._handler.leave()
        # Finish in the background: the thread runs until the store has recorded that this worker left, or, if
        # this worker hosts the store, until no other worker needs the store.
        farewell = threading.Thread(target=self._farewell, name="elasticrs-farewell", daemon=True)
        farewell.start()
        if has_left:
            # Wait for the thread, because this process is about to exit.
            farewell.join(_END_TIMEOUT)

    def _farewell(self) -> None:
        with suppress(RendezvousError):
            self._handler.next_rendezvous()
        self._end_thread()

    def shutdown(self) -> None:
        """Leave the round, close the job for all workers, and release all resources. The job is not closed if
        it has already ended or if this worker has left it. A worker that hosts the coordination store waits
        up to about ``close_timeout`` for the other workers to read how the job ended.

        All workers call this after the last barrier. Each first waits up to 5 s for the other workers to pass
        the barrier, because closing the job aborts collectives, and because rank 0 hosts the store of the
        round.
        """
        self._finish()
        with self._changed:
            current, self._round = self._round, None
        if current is not None:
            with suppress(DistError):
                _wait_for_all(current)
        if self in _members:
            _members.remove(self)
        self._handler.shutdown()
        self._end_thread()

    def _end_thread(self) -> None:
        """Stop the watching thread, and wait for at most :data:`_END_TIMEOUT` until it has stopped.

        The thread first completes the request or the handling of a round's end that it is working on.
        """
        with self._changed:
            thread, self._thread, self._is_over = self._thread, None, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_TIMEOUT)

    def _finish(self) -> None:
        """From now on this worker may end, for the agent."""
        if self.page is not None and not self._has_failed:
            self.page.finish()

    # --- what the rendezvous tells, under its lock ---

    def _told(self, stop: Stop) -> None:
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
        current, stop = self._round, self._stop
        if current is None or stop is None or not last < current.number <= stop.round:
            return None
        return current, stop

    def _act(self, current: Round, stop: Stop) -> None:
        if self._on_change is not None:
            try:
                self._on_change(stop)
            except Exception:
                _log.exception("on_change failed")
        if stop.planned and self._left_as_agreed(current):
            return
        if not stop.fenced:
            self._await_end(current)
        self._break_off(current)

    def _is_in(self, current: Round) -> bool:
        return self._round is current

    def _set_leave_step(self, current: Round, at: int, *, saves: bool = False) -> None:
        with self._changed:
            current.step.at, current.step.saves = at, saves
            self._changed.notify_all()

    def _left_as_agreed(self, current: Round) -> bool:
        """Agree on a step and wait until the main thread is out; false if that fails: a worker dies, say."""
        try:
            return self._agree(current)
        except DistError as error:
            if self._is_in(current):
                _log.warning("round %s: no agreement on a step: %s", current.number, error)
            return not self._is_in(current)

    def _agree(self, current: Round) -> bool:
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
                    at, saves = heard(board.get("leave").decode())
                    self._set_leave_step(current, at, saves=saves)
                elif current.rank == 0 and keys.issuperset(caps):
                    at = agreed([int(each) for each in board.multi_get(caps)])
                    board.set("leave", said(at, saves="save" in keys))
                    continue
                elif time.monotonic() > deadline:
                    return False
            time.sleep(_pause(current))
        return True

    def _await_end(self, current: Round) -> None:
        """If the training has ended for one worker, let the main thread do the steps that were done there."""
        with suppress(DistError):
            if self._is_in(current) and current.board.check(["done"]):
                self._set_leave_step(current, int(current.board.get("done")))
        while self._is_in(current) and current.step.done < (current.step.at or AT_ONCE):
            time.sleep(_TICK)

    def _break_off(self, current: Round) -> None:
        """Abort the collective that the main thread is in. Exit if that takes too long."""
        self._set_leave_step(current, AT_ONCE)
        connections, limit = current.connections, self._stuck_timeout + 2 * self._longest
        began = time.monotonic()
        if self.abort is not None and self._is_in(current):
            try:
                self.abort()
            except Exception:
                _log.exception("round %s: a process group could not be aborted", current.number)
        is_told = False
        while self._is_in(current):
            try:
                connections.shut()
                connections.knock(current.world_size)
                if connections.needs_last_resort(began, limit):
                    _shut_others(current)
            except Exception:
                # The error may be temporary, such as a lack of file descriptors, so retry until the deadline.
                if not is_told:
                    _log.exception("round %s: a collective could not be broken off yet", current.number)
                is_told = True
            if self._is_alone:
                began = time.monotonic()
            elif time.monotonic() - began > limit:
                _end_process(current, limit)
            time.sleep(_TICK)


def _shut_others(current: Round) -> None:
    if peers := current.connections.shut_others():
        _log.warning(
            "rank %d: the process groups of round %d do not stop: shut down %d connections that were opened"
            " while a group was created and may belong to other threads; peers: %s",
            current.rank,
            current.number,
            len(peers),
            ", ".join(peers),
        )


def _has_lost(seen: set[str], keys: set[str]) -> bool:
    """True if a member has died: its key ends with its connection. One that was out before is no loss."""
    return any(each.replace("here/", "out/") not in keys for each in seen - keys)


def _wait_for_all(current: Round) -> None:
    """Say that this worker is out of the round, and wait until all that live are."""
    board, ranks = current.board, range(current.world_size)
    board.set(f"out/{current.rank}", "")
    deadline = time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        keys = set(board.list_keys())
        if all(f"out/{rank}" in keys or f"here/{rank}" not in keys for rank in ranks):
            return
        time.sleep(_pause(current))


def _pause(current: Round) -> float:
    """Seconds between two looks at the board; it holds a few keys for each worker, and each worker looks."""
    return 0.002 * current.world_size


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
        current, member._round = member._round, None
        connections = current.connections if current is not None else Connections()
        ports = member._ports | ({current.master_port} if current is not None else set())
        connections.leave_to_parent(ports)


os.register_at_fork(after_in_child=_after_fork_in_child)
