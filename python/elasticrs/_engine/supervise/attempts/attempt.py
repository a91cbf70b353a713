"""Result of a job, and the record of each attempt to run its workers."""

from __future__ import annotations

import time

from elasticrs._engine.failures.files import error_file_of
from elasticrs._engine.job import phrases
from elasticrs._engine.job.failure_cause import Verdict
from elasticrs._engine.job.restart_policy import FailureHistory, recent
from elasticrs._engine.job.value import Record, Value, fresh
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.process.clock import Clock
from elasticrs._engine.supervise.attempts.evidence import read_counters
from elasticrs._engine.supervise.attempts.state_machine import Phase
from elasticrs._engine.workers.logs import LogPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from elasticrs._core import Heartbeat, TimerExpired, WorkerExited, WorkerHung, WorkerRaised
    from elasticrs._engine.gpus.xids import Xid
    from elasticrs._engine.hangs.culprits import Blame
    from elasticrs._engine.hangs.values import Diagnosis
    from elasticrs._engine.job.failure_cause import Cause
    from elasticrs._engine.job.restart_policy import RestartSettings
    from elasticrs._engine.workers.node_page import Met
    from elasticrs._engine.workers.plan import Plan


class Overdue(Value):
    """Reason why a worker counts as failed, whatever its exit code: it exceeded a time limit, or the other
    workers of the job hung because they waited for it. At most one of ``timer``, ``hung`` and ``raised`` is
    set.

    Args:
        seen_ns: time when the agent noticed that the limit was exceeded, in monotonic nanoseconds.
        timer: timer that the worker did not release in time; ``None`` for the other limits.
        hung: details of the missed heartbeat deadline; ``None`` for the other limits.
        raised: the uncaught exception after which the worker did not exit in time; ``None`` for the other
            limits.
        is_blamed: true if :attr:`Attempt.blame` names this worker.
    """

    seen_ns: int
    timer: TimerExpired | None = None
    hung: WorkerHung | None = None
    raised: WorkerRaised | None = None
    is_blamed: bool = False


class Attempt(Record):
    """Record of one attempt to run the workers of this node.

    Attributes:
        round: number of the rendezvous round.
        restarts: number of charged restarts when the attempt started.
        name: name of the log directory: the number of restarts, followed by the round if an earlier attempt
            had the same number of restarts.
        plan: ranks and addresses of the workers.
        paths: files of the attempt; no files until its workers are about to be started.
        variables: variables added to each worker's environment, by local rank.
        pids: pids of the workers, by local rank. For a replaced worker, the pid of the latest replacement.
        exits: exits of the workers, by local rank, in the order in which the agent saw them. Replaced workers
            are not included.
        met: last rendezvous of each worker that has exited, by local rank. Contains only workers that took
            part in a rendezvous and recorded it; see :mod:`.node_page`.
        replaced_workers: one record for each worker that was replaced. The record is an attempt with only
            this worker.
        first_failure: local rank of the worker that failed first.
        raised: uncaught exception that each worker reported, by local rank.
        expired: reasons why workers count as failed regardless of their exit code, by local rank. The reasons
            are timers, heartbeat deadlines, ``--exit-timeout``, and other workers that waited for them.
        blame: decision about which ranks of this node are to blame for a hang or a failed collective; see
            :mod:`.blame`. ``None`` if no worker hung and no collective failed, or if the
            cause of the failed collective is unknown.
        diagnosis: diagnosis that names the ranks that keep the others waiting. ``None`` if no worker hung and
            no collective failed, or if there is not enough evidence.
        heartbeats: last heartbeat of each worker that sent any. Set when the attempt has ended.
        xids: Xid errors that NVIDIA's driver has reported since the start of the attempt, by GPU and code.
        oom_kills: counters of the kernel's OOM killer at the start of the attempt.
        oom_kills_after: the same counters after the attempt failed.
        signalled: number of other workers that were signalled because of the first failure.
        cause: reason for the end of the attempt, as one line. ``None`` until the reason is known, and for the
            job's last attempt.
        silent: workers that exited with 0 before their function returned, if no other worker failed.
        warm: true if the workers were forked from a process that had already imported the modules; ``None``
            without ``--warm``.
        why_cold: reason why the workers were started cold despite ``--warm``.
        phases: milliseconds of each phase of the restart that led to this attempt, in order; see
            :func:`phases`.
        delay: seconds by which the restart policy delayed the next attempt.
        files: object that accesses the workers' files with a time limit.
        stamps: times of events in monotonic nanoseconds. The events are ``planned``, ``imported``,
            ``started``, ``raised``, ``failure_seen``, ``siblings_signalled``, ``stopped``, ``ended`` and
            ``memory_free``. ``imported`` is set only if the start had to wait for the imports. ``raised`` is
            set only if the agent waited for the exit of a worker that had raised an exception. ``stopped`` is
            set only if this agent was asked to stop the workers. ``memory_free`` is set only if the agent
            waited for dead workers to release device memory.
    """

    round: int
    restarts: int
    plan: Plan
    name: str = ""
    paths: LogPaths = fresh(factory=LogPaths)
    variables: dict[int, dict[str, str]] = fresh(factory=dict)
    pids: list[int] = fresh(factory=list)
    exits: dict[int, WorkerExited] = fresh(factory=dict)
    met: dict[int, Met] = fresh(factory=dict)
    replaced_workers: list[Attempt] = fresh(factory=list)
    first_failure: int | None = None
    raised: dict[int, WorkerRaised] = fresh(factory=dict)
    expired: dict[int, Overdue] = fresh(factory=dict)
    blame: Blame | None = None
    diagnosis: Diagnosis | None = None
    heartbeats: list[Heartbeat] = fresh(factory=list)
    xids: dict[tuple[int, int], Xid] = fresh(factory=dict)
    oom_kills: dict[str, int] = fresh(factory=dict)
    oom_kills_after: dict[str, int] = fresh(factory=dict)
    signalled: int = 0
    cause: str | None = None
    silent: frozenset[int] = frozenset()
    nursery_exitcode: int | None = None
    nursery_hung: bool = False
    warm: bool | None = None
    why_cold: str | None = None
    phases: dict[str, float] = fresh(factory=dict)
    delay: float = 0.0
    stamps: dict[str, int] = fresh(factory=dict)
    files: FileAccess = fresh(factory=FileAccess)

    @property
    def world_size(self) -> int:
        """Number of workers in this attempt, on all nodes."""
        return self.plan.ranks[0].world_size

    @property
    def has_ended(self) -> bool:
        """True if the workers have exited and their leftover processes are cleaned up."""
        return "ended" in self.stamps

    @property
    def failed_ns(self) -> int:
        """Time of the first failure in monotonic nanoseconds. If the agent waited for the exit of a worker
        that had raised an exception, this is the time of the exception.

        Raises:
            KeyError: no worker has failed.
        """
        return self.stamps.get("raised", self.stamps["failure_seen"])

    def see_failure(self, local_rank: int, seen_ns: int) -> None:
        """Record the time at which the first failure was seen. If the worker raised an exception before that,
        also record the time of the exception.
        """
        self.stamps["failure_seen"] = seen_ns
        raised = self.raised.get(local_rank)
        if raised is not None and raised.pid == self.pids[local_rank] and raised.seen_ns < seen_ns:
            self.stamps["raised"] = raised.seen_ns

    def running(self) -> dict[int, int]:
        """Pids of the workers that are still running, by local rank. The pid of an exited worker is left out,
        because the kernel may have reused it.
        """
        return {rank: pid for rank, pid in enumerate(self.pids) if rank not in self.exits}

    def replace(self, local_rank: int, pid: int, restarts: int) -> Attempt:
        """Record the replacement of a worker and return the record of the replaced worker.

        Args:
            local_rank: local rank of the worker.
            pid: pid of the replacement.
            restarts: number of restarts charged so far.
        """
        paths = self.paths
        if error_file := paths.error_files.get(local_rank):
            path = error_file_of(error_file, self.pids[local_rank])
            paths = paths.replaced(error_files={**paths.error_files, local_rank: path})
        failed = Attempt(self.round, self.restarts, self.plan, self.name, paths=paths, pids=list(self.pids))
        failed.files = self.files
        self.restarts = restarts
        failed.blame, self.blame = self.blame, None
        for name in ("exits", "met", "expired", "raised"):
            known = getattr(self, name)
            if local_rank in known:
                getattr(failed, name)[local_rank] = known.pop(local_rank)
        failed.first_failure = local_rank
        if failed.expired:
            failed.diagnosis, self.diagnosis = self.diagnosis, None
        failed.oom_kills, failed.oom_kills_after = self.oom_kills, read_counters(self.oom_kills)
        failed.see_failure(local_rank, failed.exits[local_rank].seen_ns)
        self.oom_kills = failed.oom_kills_after
        self.replaced_workers.append(failed)
        self.pids[local_rank] = pid
        others = sorted(self.failed_exits(), key=lambda worker: worker.seen_ns)
        self.first_failure = others[0].local_rank if others else None
        for name in ("raised", "failure_seen"):
            self.stamps.pop(name, None)
        if others:
            self.see_failure(others[0].local_rank, others[0].seen_ns)
        return failed

    def how_it_began(self) -> str:
        """Describe the restart that led to this attempt: its total duration, the duration of each phase, and
        whether the workers were forked from a process with preloaded modules.
        """
        span = phrases.milliseconds(round(1e6 * sum(self.phases.values())))
        how = {None: "", True: ", warm", False: f", cold: {self.why_cold}"}[self.warm]
        is_elsewhere = "stopping" in self.phases and "signalling" not in self.phases
        since = "the workers were told to stop" if is_elsewhere else "the failure was seen"
        return f"{span} after {since}{phrases.phases(self.phases)}{how}"

    def why_expired(self, local_rank: int) -> str | None:
        """Describe the time limit that made the agent kill this worker. Return ``None`` if the agent did not
        kill the worker.
        """
        event = self.expired.get(local_rank)
        if event is None:
            return None
        if event.timer is not None:
            return phrases.timer_expired(event.timer)
        if event.raised is not None:
            was = "was still exiting" if event.raised.exit == "slow" else "its exit made no progress"
            return f"it raised an exception, and {was} {event.raised.limit:g} s later (--exit-timeout)"
        if event.hung is None and not event.is_blamed:
            return None
        try:
            return self._why_blamed(event, local_rank)
        # Catch every exception, because an error in the code that writes this text must not end the job
        # without a report.
        except Exception as error:
            from elasticrs._engine.hangs.values import failed

            return f"{'failed' if event.hung is None else 'hung'}; {failed(error).summary}"

    def _why_blamed(self, event: Overdue, local_rank: int) -> str:
        from elasticrs._engine.supervise.attempts.hangs import hung, kept_waiting

        if event.hung is None:
            return kept_waiting(self.exits.get(local_rank), event.seen_ns, self.diagnosis)
        is_found_here = self.first_failure is not None
        return hung(
            event.hung,
            self.global_ranks(),
            self.diagnosis,
            was_found_here=is_found_here,
            local_rank=local_rank,
            exited=self.exits.get(local_rank),
        )

    def accuse(self, blame: Blame, at_ns: int, event: WorkerHung | None = None) -> None:
        """Record which workers are to blame for a hang or a failed collective. They replace the worker that
        the core killed, or whose failure the core saw first.

        Args:
            blame: the decision. All of its ranks are on this node.
            at_ns: time of the hang or failure, in nanoseconds of the monotonic clock.
            event: event that reports the hang; ``None`` if a collective failed.
        """
        self.blame = blame
        places = {rank: local_rank for local_rank, rank in self.global_ranks().items()}
        named = [places[rank] for rank in blame.ranks]
        if not blame.is_decided:
            seen_first = self.first_failure if event is None else event.local_rank
            named = [seen_first if seen_first in named else named[0]]
        if event is not None:
            del self.expired[event.local_rank]
        for local_rank in named:
            exited = self.exits.get(local_rank)
            is_early = exited is not None and exited.seen_ns < at_ns
            seen_ns = exited.seen_ns if exited is not None and is_early else at_ns
            self.expired.setdefault(local_rank, Overdue(seen_ns, hung=event, is_blamed=True))
        if event is None:
            self.first_failure = named[0]

    def accused(self, local_rank: int) -> int:
        """Return the local rank of the worker that is to blame for the failure of a given worker. The result
        is another worker if a hang is blamed on that worker. Otherwise, the result is the given worker.
        """
        if self.blame is None or local_rank in self.expired:
            return local_rank
        return next((each for each, why in self.expired.items() if why.is_blamed), local_rank)

    def who_failed(self, local_rank: int, pid: int | None = None, *, of: str = "") -> str:
        """Return text that identifies the worker that failed first. After a hang, the text identifies all
        workers that are to blame, or all candidates. ``of`` is text that follows the ranks.
        """
        event = self.expired.get(local_rank)
        if self.blame is None or event is None or not event.is_blamed:
            return self.who(local_rank, pid) + of
        if self.blame.is_decided and len(self.blame.ranks) == 1:
            return self.who(local_rank, pid) + of
        return self.blame.text + of

    def is_told_at_once(self, local_rank: int) -> bool:
        """Return true if the failure of a worker is reported before the worker exits. This is the case if the
        worker has hung, if its exception has stopped the others, or if it is slow to exit.
        """
        if local_rank == self.first_failure and self.was_stopped_by_exception():
            return True
        event = self.expired.get(local_rank)
        return event is not None and (event.is_blamed or self.is_slow_to_exit(local_rank))

    def was_stopped_by_exception(self) -> bool:
        """Return true if the agent stopped the other workers because of the exception of the worker that
        failed first, before that worker exited.
        """
        raised = None if self.first_failure is None else self.raised.get(self.first_failure)
        return raised is not None and self.stamps.get("failure_seen") == raised.seen_ns

    def is_slow_to_exit(self, local_rank: int) -> bool:
        """Return true if a worker exceeded ``--exit-timeout`` after an uncaught exception although its exit
        was still making progress.
        """
        event = self.expired.get(local_rank)
        return event is not None and event.raised is not None and event.raised.exit == "slow"

    def ended_ns(self, worker: WorkerExited) -> int:
        """Return the time when a worker failed, in monotonic nanoseconds. The worker may have exited
        later.
        """
        event = self.expired.get(worker.local_rank)
        return worker.seen_ns if event is None else event.seen_ns

    def how_it_ended(self, worker: WorkerExited) -> str:
        """Return a phrase that describes how a worker exited, to append to the worker's name."""
        return phrases.SILENT if worker.local_rank in self.silent else phrases.how_it_ended(worker.exitcode)

    def last_met(self, local_rank: int) -> Met | None:
        """Return the last rendezvous of a worker; ``None`` if the worker has not recorded a rendezvous."""
        page = self.plan.page
        if local_rank in self.met or local_rank in self.exits or page is None:
            return self.met.get(local_rank)
        return page.last_met(local_rank)

    def global_ranks(self) -> dict[int, int]:
        """Return a unique global rank for each worker, by local rank.

        A worker that takes part in a rendezvous keeps the rank of its last round. Before its first round, a
        worker has the rank from the plan. A worker whose rank was taken over by another worker gets a
        negative placeholder; see :meth:`shown_ranks`.
        """
        began = {ranks.local_rank: ranks.global_rank for ranks in self.plan.ranks}
        if self.plan.members is None:
            return began
        met = {local_rank: self.last_met(local_rank) for local_rank in began}
        taken: dict[int, int] = {}
        # If two workers have held the same rank, give the rank to the worker that held it in the later round.
        for local_rank, last in sorted(met.items(), key=lambda each: -each[1].round if each[1] else 0):
            rank = last.rank if last else began[local_rank]
            taken[-1 - local_rank if rank in taken else rank] = local_rank
        found = {local_rank: rank for rank, local_rank in taken.items()}
        return dict(sorted(found.items()))

    def shown_ranks(self) -> dict[int, int | None]:
        """Return global ranks by local rank; ``None`` for a worker whose rank another worker has taken
        over.
        """
        return {place: rank if rank >= 0 else None for place, rank in self.global_ranks().items()}

    def who(self, local_rank: int, pid: int | None = None) -> str:
        """Return text that identifies a worker to the user: its global rank if it is known, its local rank
        otherwise.
        """
        pids = "" if pid is None else f"pid {pid}"
        if self.plan.members is None:
            rank = f"rank {self.plan.ranks[local_rank].global_rank}"
        elif (met := self.last_met(local_rank)) is not None:
            rank, pids = f"rank {met.rank}", f"local_rank {local_rank}{pids and ', '}{pids}"
        else:
            rank = f"local rank {local_rank}"
        return f"{rank} ({pids})" if pids else rank

    def who_are(self, local_ranks: Sequence[int]) -> str:
        """Return text that identifies several workers to the user."""
        if self.plan.members is not None:
            return ", ".join(self.who(local_rank) for local_rank in local_ranks)
        return phrases.ranks_text(
            sorted(self.plan.ranks[local_rank].global_rank for local_rank in local_ranks)
        )

    def failed_exits(self) -> list[WorkerExited]:
        """Return the failed workers, starting with the first failure. The others follow in the order in which
        the agent saw their exits.

        A worker has failed if its exit code is not 0, if it exceeded a time limit, if it exited before its
        work was done, or if the others were stopped because of its exception.
        """
        ended = {*self.expired, *self.silent}
        if self.first_failure is not None and self.was_stopped_by_exception():
            ended.add(self.first_failure)
        failed = [each for each in self.exits.values() if each.exitcode != 0 or each.local_rank in ended]
        return sorted(failed, key=lambda worker: (worker.local_rank != self.first_failure, worker.seen_ns))

    def fail_silently(self, local_ranks: Collection[int], ended_ns: int) -> None:
        """Mark these workers as failed, because they exited with 0 before their work was done.

        Args:
            local_ranks: local ranks of the workers; at least one.
            ended_ns: time at which the attempt ended, in nanoseconds of the monotonic clock.
        """
        self.silent = frozenset(local_ranks)
        self.first_failure = min(self.silent, key=lambda rank: self.exits[rank].seen_ns)
        self.stamps["failure_seen"] = ended_ns


def phases(failed: Attempt, running: Attempt) -> dict[str, float]:
    """Return the duration of each phase of a restart in milliseconds, in order. The durations add up to the
    duration of the whole restart.

    The first phase starts at the exception if the agent waited for the exit of a worker that had raised one.
    Otherwise, it starts when the failure was seen, or, after a failure on another node, when the workers were
    stopped. The phases are:

    - ``exiting``: until the failure was seen. Present only if the phase starts at the exception.
    - ``signalling``: until the other workers have been signalled.
    - ``stopping``: until all processes have exited.
    - ``freeing``: until their device memory is free. Omitted if it was free immediately.
    - ``delay``: until the restart policy's delay is over.
    - ``rendezvous``: until ranks and addresses are known.
    - ``importing``: until the warm nursery is ready. Omitted if the start did not have to wait for the
      nursery.
    - ``starting``: until all workers run.

    If the end of a phase is unknown, its time counts as part of the next phase.

    Args:
        failed: the attempt that has ended.
        running: the attempt that replaces it.
    """
    ends = {
        "exiting": failed.stamps.get("failure_seen"),
        "signalling": failed.stamps.get("siblings_signalled"),
        "stopping": failed.stamps.get("ended"),
        "freeing": failed.stamps.get("memory_free"),
        "rendezvous": running.stamps.get("planned"),
        "importing": running.stamps.get("imported"),
        "starting": running.stamps.get("started"),
    }
    found: dict[str, float] = {}
    begins = (failed.stamps.get(name) for name in ("raised", "failure_seen", "stopped", "ended"))
    last = next((begin for begin in begins if begin is not None), None)
    for name, end in ends.items():
        if name == "rendezvous" and failed.delay > 0 and last is not None and end is not None:
            # The leader measures the restart delay. Count at most the time for which this node waited,
            # because a late node waits for less than the full delay.
            delay_ns = max(0, min(int(failed.delay * 1e9), end - last))
            found["delay"], last = delay_ns / 1e6, last + delay_ns
        if last is not None and end is not None and end > last:
            found[name] = (end - last) / 1e6
            last = end
    return found


class JobResult(Record):
    """Result of a job on this node.

    Attributes:
        phase: terminal phase of the job.
        exit_code: exit code of the launcher.
        signum: signal that stopped the job, if any.
        message: reason for a failure that was not caused by a worker.
        verdict: advice to the scheduler if the job has failed: whether another attempt may succeed, and on
            which nodes.
        ending: summary line of a failed job, in two parts, between which the launcher inserts the root cause.
            The launcher prints the line below the report.
        start_errno: ``errno`` of the error that prevented the start of the last attempt.
        first_cause: first failure of a job on several nodes; see :mod:`.failure_cause`.
        clock: wall clock of the nodes' store, as estimated on this node.
        attempts: all attempts, in order.
        read_history: function that returns the history of the job's failures on all nodes. The times in the
            history are seconds of this node's monotonic clock.
        shared_cause: function that returns the first failure across all nodes; see
            :meth:`.Decisions.shared_cause`.
        node_names: function that returns the names of the nodes; see :meth:`.Decisions.node_names`.
        return_values: return values of the workers, by global rank.
    """

    phase: Phase = Phase.INIT
    exit_code: int = 1
    signum: int | None = None
    message: str | None = None
    verdict: Verdict = Verdict.FAILED
    ending: tuple[str, str] | None = None
    start_errno: int | None = None
    first_cause: Cause | None = None
    clock: Clock = Clock()
    attempts: list[Attempt] = fresh(factory=list)
    read_history: Callable[[], FailureHistory] = FailureHistory
    shared_cause: Callable[[], Mapping[str, Any] | None] = lambda: None
    node_names: Callable[[], Sequence[str] | None] = lambda: None
    return_values: dict[int, object] = fresh(factory=dict)

    @property
    def restarts(self) -> int:
        """Number of restarts counted against the restart budget. Includes a restart that was decided but has
        not started its workers yet.
        """
        return max(self.read_history().charged, self.attempts[-1].restarts if self.attempts else 0)

    def restarts_left(self, policy: RestartSettings) -> int:
        """Return the number of restarts left in the restart budget."""
        history = self.read_history()
        if policy.window is None or not history.charged:
            # Count every restart if there is no restart window. Also count every restart if the rendezvous
            # handler keeps no failure history, because the restart times are then unknown.
            return policy.max_restarts - self.restarts
        return max(0, policy.max_restarts - len(recent(policy, history, time.monotonic_ns() / 1e9)))
