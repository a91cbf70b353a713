"""Log of the events of a group of workers, from which the facts about a failure are derived.

Independent events are ordered by their times, not by their places in the log, because they may be logged in
any order.
"""

from __future__ import annotations

from functools import cached_property

from elasticrs import _core
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from elasticrs._core import FailureSeen, GroupEnded, TimerExpired, WorkerExited, WorkerHung, WorkerRaised
    from elasticrs._engine.hangs.culprits import Blame


class Overdue(Value):
    """Reason why a worker counts as failed, whatever its exit code: an exceeded time limit, or blame. At most
    one of ``timer``, ``hung`` and ``raised`` is set.
    """

    seen_ns: int
    timer: TimerExpired | None = None
    hung: WorkerHung | None = None
    raised: WorkerRaised | None = None
    is_blamed: bool = False


# The agent itself, not the Rust extension, creates the events below. Times are monotonic nanoseconds.


class Stamp(Value):
    """Event: the agent has finished a step of its work, at this time; see :attr:`EventLog.stamps`."""

    name: str
    at_ns: int


class Adopted(Value):
    """Event: other code than the Rust extension has started the workers. ``pids`` are by local rank."""

    pids: Sequence[int]


class Blamed(Value):
    """Event: the agent has decided which workers, at least one, are to blame for a hang (``hung``) or for a
    failed collective. These workers count as the cause of the failure, instead of the worker that the core
    (the Rust extension) has killed, or has seen fail first.
    """

    blame: Blame
    local_ranks: Sequence[int]
    at_ns: int
    hung: WorkerHung | None = None


class Silent(Value):
    """Event: these workers exited with 0 before their work was done. ``ended_ns`` is the time at which the
    whole group had ended; ``None`` while other workers run.
    """

    local_ranks: Collection[int]
    ended_ns: int | None = None


_LIMITS = {_core.TimerExpired: "timer", _core.WorkerHung: "hung", _core.WorkerRaised: "raised"}
_OF_A_WORKER = {*_LIMITS, _core.FailureSeen, _core.WorkerExited}
_DERIVED = ("first_failure", "expired", "stamps")
"""Attributes of :class:`EventLog` that are cached until an event may change them."""


class EventLog:
    """Events of a group of workers, in the order in which they became known. Only :meth:`append` changes it.
    If ``replaces`` is true, a failed worker is replaced while the others run, and the core reports no first
    failure. ``pids``, ``exits`` and ``raised`` (the last uncaught exception of each worker) are by local
    rank. ``signalled`` is the number of workers that were signalled because another worker failed first.
    """

    def __init__(self, *, replaces: bool = False) -> None:
        self._replaces = replaces
        self._forget()

    def _forget(self) -> None:
        self.events: list[tuple[type, Any]] = []
        self.pids: Sequence[int] = ()
        self.exits: dict[int, WorkerExited] = {}
        self.raised: dict[int, WorkerRaised] = {}
        self.end: GroupEnded | None = None
        self.blame: Blame | None = None
        self.silent: Collection[int] = ()
        self.signalled = 0
        self._times: dict[str, int] = {}
        self._overdue: list[tuple[int, Overdue]] = []
        self._failures: list[FailureSeen] = []
        self._blames: list[Blamed] = []
        self._silent: list[Silent] = []

    def append(self, event: Any, kind: type | None = None) -> None:
        kind = kind or type(event)
        self.events.append((kind, event))
        if kind is _core.WorkerExited:
            self.exits.setdefault(event.local_rank, event)
            if not (self._replaces or self._blames or self._silent):
                return
        elif kind is Stamp:
            self._times[event.name] = event.at_ns
        elif kind is _core.GroupStarted or kind is Adopted:
            self.pids = event.pids
        elif kind is _core.WorkerReplaced:
            self.pids = [*self.pids[: event.local_rank], event.pid, *self.pids[event.local_rank + 1 :]]
        elif kind is _core.GroupEnded:
            self.end, self._times["ended"] = event, event.ended_ns
        elif kind in _LIMITS:
            if kind is _core.WorkerRaised:
                known = self.raised.get(event.local_rank, event)
                self.raised[event.local_rank] = max(event, known, key=lambda each: each.seen_ns)
            is_notice = (kind is _core.TimerExpired and event.signal is None) or (
                kind is _core.WorkerRaised and event.exit == "begun"
            )
            if not is_notice:
                why = {_LIMITS[kind]: event}
                self._overdue.append((event.local_rank, Overdue(event.seen_ns, **why)))
        else:
            more: dict[type, list[Any]] = {
                _core.FailureSeen: self._failures,
                Silent: self._silent,
                Blamed: self._blames,
            }
            more[kind].append(event)
            self._blames.sort(key=lambda each: each.at_ns)
            self.blame = self._blames[-1].blame if self._blames else None
            self.silent = {rank for each in self._silent for rank in each.local_ranks}
            self.signalled = self._failures[0].siblings if self._failures else 0
        for name in _DERIVED:
            self.__dict__.pop(name, None)

    def _take(self, local_rank: int) -> list[tuple[type, Any]]:
        own: list[tuple[type, Any]] = []
        rest: list[tuple[type, Any]] = []
        for kind, event in self.events:
            if kind is Blamed and local_rank in event.local_ranks:
                own.append((kind, event.replaced(local_ranks=[local_rank])))
            elif kind is not Blamed:
                is_own = kind in _OF_A_WORKER and event.local_rank == local_rank
                (own if is_own else rest).append((kind, event))
        self._forget()
        for kind, event in rest:
            self.append(event, kind)
        return own

    @property
    def has_ended(self) -> bool:
        """True if the workers have exited and their leftover processes are cleaned up."""
        return self.end is not None

    def running(self) -> dict[int, int]:
        """Pids of the running workers, by local rank. The kernel may reuse the pids of exited workers."""
        return {rank: pid for rank, pid in enumerate(self.pids) if rank not in self.exits}

    # --- the first failure ---

    def _seen_first(self) -> tuple[int, int] | None:
        """Return the time and local rank of the first failure that the core has seen, or ``None``."""
        found = [(each.seen_ns, each.local_rank) for each in self._failures]
        if not found and self._replaces:
            stopped_ns = self._times.get("stopped")
            failed = {*self.silent, *(rank for rank, _ in self._overdue)}
            failed.update(rank for rank, each in self.exits.items() if each.exitcode != 0)
            found = [(each.seen_ns, rank) for rank, each in self.exits.items() if rank in failed]
            found = [each for each in found if stopped_ns is None or each[0] < stopped_ns]
        return min(found, default=None)

    def _silent_end(self) -> tuple[int, int] | None:
        """Return the first worker that exited with 0 before its work was done, and when that became known."""
        for each in self._silent:
            ranks = [rank for rank in each.local_ranks if rank in self.exits]
            if each.ended_ns is not None and ranks:
                return min(ranks, key=lambda rank: self.exits[rank].seen_ns), each.ended_ns
        return None

    @cached_property
    def first_failure(self) -> int | None:
        """Local rank of the worker that failed first. ``None`` if none has failed."""
        if (silent := self._silent_end()) is not None:
            return silent[0]
        if self._blames and self._blames[-1].hung is None:
            return self._named(self._blames[-1])[0]
        first = self._seen_first()
        return None if first is None else self.accused(first[1])

    def _named(self, blamed: Blamed) -> Sequence[int]:
        """Return the local ranks of the workers to blame. As long as the blame is not decided, return only
        one of them: if possible, the worker that the core has named.
        """
        if blamed.blame.is_decided:
            return blamed.local_ranks
        first = self._seen_first()
        seen = blamed.hung.local_rank if blamed.hung is not None else -1 if first is None else first[1]
        return [seen] if seen in blamed.local_ranks else blamed.local_ranks[:1]

    @cached_property
    def expired(self) -> Mapping[int, Overdue]:
        """Each worker's first reason to count as failed whatever its exit code, by local rank."""
        found: dict[int, Overdue] = {}
        for local_rank, why in sorted(self._overdue, key=lambda each: each[1].seen_ns):
            # If the agent has blamed workers for a hang, leave out the worker that the core has named for it.
            if why.hung is None or all(each.hung is not why.hung for each in self._blames):
                found.setdefault(local_rank, why)
        for blamed in self._blames:
            for local_rank in self._named(blamed):
                exited, at_ns = self.exits.get(local_rank), blamed.at_ns
                seen_ns = at_ns if exited is None else min(at_ns, exited.seen_ns)
                found.setdefault(local_rank, Overdue(seen_ns, hung=blamed.hung, is_blamed=True))
        return found

    def accused(self, local_rank: int) -> int:
        """Return the local rank of the worker that is blamed instead of this one; this one's if none is."""
        if self.blame is None or local_rank in self.expired:
            return local_rank
        return next((each for each, why in self.expired.items() if why.is_blamed), local_rank)

    def was_stopped_by_exception(self) -> bool:
        """Return true if the others were stopped because the first worker to fail raised an exception."""
        raised = None if self.first_failure is None else self.raised.get(self.first_failure)
        return raised is not None and self.stamps.get("failure_seen") == raised.seen_ns

    def is_slow_to_exit(self, local_rank: int) -> bool:
        """Return true if a worker exceeded ``--exit-timeout``, although its exit still made progress."""
        event = self.expired.get(local_rank)
        return event is not None and event.raised is not None and event.raised.exit == "slow"

    def is_told_at_once(self, local_rank: int) -> bool:
        """Return true if a worker's failure (hang, exception or slow exit) is reported before its exit."""
        if local_rank == self.first_failure and self.was_stopped_by_exception():
            return True
        event = self.expired.get(local_rank)
        return event is not None and (event.is_blamed or self.is_slow_to_exit(local_rank))

    def ended_ns(self, worker: WorkerExited) -> int:
        event = self.expired.get(worker.local_rank)
        return worker.seen_ns if event is None else event.seen_ns

    def failed_exits(self) -> list[WorkerExited]:
        """Return the exits of the failed workers: first that of the first failure, then by time."""
        first, ended = self.first_failure, {*self.expired, *self.silent}
        if first is not None and self.was_stopped_by_exception():
            ended.add(first)
        failed = [each for rank, each in self.exits.items() if each.exitcode != 0 or rank in ended]
        return sorted(failed, key=lambda worker: (worker.local_rank != first, worker.seen_ns))

    # --- times ---

    @cached_property
    def stamps(self) -> Mapping[str, int]:
        """Times of events of the agent and of the workers, by name, such as ``planned`` and ``failure_seen``.
        ``imported``, ``raised`` and ``memory_free`` exist only if the agent waited for the imports, for a
        worker's exit after its exception, or for free device memory. ``stopped`` exists only after a request
        to stop.
        """
        found = dict(self._times)
        if self._failures:
            found["siblings_signalled"] = self._failures[0].signalled_ns
        if (first := self._seen_first()) is not None:
            found["failure_seen"], rank = first
            for kind, event in self.events if rank in self.raised else ():
                is_own = kind is _core.WorkerRaised and event.local_rank == rank
                if is_own and [event.pid] == [*self.pids[rank : rank + 1]] and event.seen_ns < first[0]:
                    found["raised"] = max(event.seen_ns, found.get("raised", 0))
        if (silent := self._silent_end()) is not None:
            found["failure_seen"] = silent[1]
        return found

    @property
    def failed_ns(self) -> int:
        """Time of the first failure. If the agent waited for a worker to exit after an exception, time of the
        exception. Raise ``KeyError`` if no worker has failed.
        """
        raised_ns = self.stamps.get("raised")
        return self.stamps["failure_seen"] if raised_ns is None else raised_ns
