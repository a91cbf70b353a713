"""Result of a job, and the record of each attempt to run its workers.

The record includes counters that show whether the kernel's OOM killer has killed a worker. Such a kill looks
like any other SIGKILL, but the kernel counts OOM kills for each memory cgroup (v2: ``memory.events``, v1:
``memory.oom_control``) and for the machine (``/proc/vmstat``). If a counter has risen during the attempt and
the agent did not send the SIGKILL, the OOM killer almost certainly did.
"""

from __future__ import annotations

import signal
import time

from elasticrs._engine.failures.failure import Clock, error_file_of, flight_records
from elasticrs._engine.job import phrases
from elasticrs._engine.job.restart_policy import FailureHistory, Verdict, recent
from elasticrs._engine.job.value import Record, fresh
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.supervise.state_machine import Phase
from elasticrs._engine.workers.event_log import Adopted, Blamed, EventLog, Stamp
from elasticrs._engine.workers.logs import LogPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from elasticrs._core import Heartbeat, WorkerExited, WorkerHung, WorkerReplaced
    from elasticrs._engine.gpus.xids import Xid
    from elasticrs._engine.hangs.culprits import Blame, Diagnosis
    from elasticrs._engine.hangs.late import Look
    from elasticrs._engine.inside.keep.choice import Choice
    from elasticrs._engine.job.restart_policy import Cause, RestartSettings
    from elasticrs._engine.workers.keep_files import KeepFiles
    from elasticrs._engine.workers.node_page import Met
    from elasticrs._engine.workers.plan import Plan


class Attempt(EventLog):
    """One attempt to run this node's workers: its plan, and the log of what happened.

    Attributes:
        restarts: number of charged restarts.
        plan: present ranks and addresses of the workers. With ``--on-failure replace`` on several nodes, the
            ranks change when a node joins or leaves.
        agents_round: number of the agents' present round. It changes when the ranks in the plan do.
        name: name of the log directory.
        paths: files of the attempt. There are none until its workers are about to be started.
        variables: variables added to each worker's environment, by local rank.
        met: last rendezvous of each worker that has exited and has taken part in one, by local rank.
        replaced_workers: an attempt of its own for each worker that was replaced. The worker's events are
            moved there from this log.
        heartbeats: last heartbeat of each worker that sent any; set when the attempt has ended.
        xids: errors of NVIDIA's driver since the start of the attempt, by GPU and code.
        oom_kills: counters of the kernel's OOM killer at the start of the attempt. ``oom_kills_after`` has
            their values after the failure.
        cause: one line that says why the attempt ended; ``None`` for the job's last attempt.
        warm: true if the workers were forked from a preloaded process; ``None`` without ``--warm``.
        after: attempt whose end led to this one; ``None`` for the first start of the workers.
        delay: seconds by which the restart policy delayed the next attempt.
        kept: training step to which the workers return at the start, and the copies of the training state
            that they restore; ``None`` if no worker has used ``Keep``.
        keep_files: the files into which the workers copy their training state.
        look: result of the last search for workers that are late; ``None`` if nobody has asked.
    """

    def __init__(
        self,
        round: int,  # noqa: A002 -- the usual name for this number
        restarts: int,
        plan: Plan,
        name: str = "",
        paths: LogPaths | None = None,
        *,
        replaces: bool = False,
        files: FileAccess | None = None,
    ) -> None:
        super().__init__(replaces=replaces)
        self.round, self.restarts, self.plan, self.name = round, restarts, plan, name
        self.agents_round = round
        self.paths, self.files = paths or LogPaths(), files or FileAccess()
        self.variables: dict[int, dict[str, str]] = {}
        self.met: dict[int, Met] = {}
        self.replaced_workers: list[Attempt] = []
        self.diagnosis: Diagnosis | None = None
        self.heartbeats: Sequence[Heartbeat] = ()
        self.xids: dict[tuple[int, int], Xid] = {}
        self.oom_kills: dict[str, int] = {}
        self.oom_kills_after: dict[str, int] = {}
        self.cause: str | None = None
        self.warm: bool | None = None
        self.why_cold: str | None = None
        self.after: Attempt | None = None
        self.delay = 0.0
        self.kept: Choice | None = None
        self.keep_files: KeepFiles | None = None
        self.paused: set[int] = set()
        self.look: Look | None = None

    @property
    def world_size(self) -> int:
        """Present number of workers on all nodes."""
        return self.plan.ranks[0].world_size

    @property
    def phases(self) -> Mapping[str, float]:
        """Phases of the restart that led to this attempt; see :func:`phases`."""
        return {} if self.after is None else phases(self.after, self)

    @property
    def nursery_end(self) -> str | None:
        """How the nursery (the process that starts the workers) was lost; ``None`` if it was not lost."""
        end = self.end
        if end is None or (end.nursery_exitcode is None and not end.nursery_hung):
            return None
        how = phrases.how_the_nursery_ended(end.nursery_exitcode, end.nursery_hung)
        return f"the nursery {how}{f' ({BY_OOM_KILLER})' if self.is_nursery_oom else ''}"

    @property
    def is_nursery_oom(self) -> bool:
        """True if the OOM killer probably killed the nursery."""
        end = self.end
        code = None if end is None or end.nursery_hung else end.nursery_exitcode
        return probably_oom(code, None, self.oom_kills, self.oom_kills_after)

    @property
    def is_undecided(self) -> bool:
        """True if several workers may be to blame, and the evidence does not show which of them is."""
        return self.blame is not None and not self.blame.is_decided

    def replace(self, event: WorkerReplaced, restarts: int) -> Attempt:
        """Move the events of a worker that is replaced to an attempt of its own, and return that attempt."""
        local_rank, paths, pids = event.local_rank, self.paths, self.pids
        if error_file := paths.error_files.get(local_rank):
            path = error_file_of(error_file, pids[local_rank])
            paths = paths.replaced(error_files={**paths.error_files, local_rank: path})
        # Copy the plan, so that the ranks at the time of the failure are kept.
        plan = self.plan.replaced()
        failed = Attempt(self.round, self.restarts, plan, self.name, paths, replaces=True, files=self.files)
        failed.agents_round = self.agents_round
        self.restarts = restarts
        self.paused.discard(local_rank)
        failed.append(Adopted(pids))
        for kind, own in self._take(local_rank):
            failed.append(own, kind)
        # The recovery ends when the worker that replaces the failed one runs.
        failed.append(Stamp("started", event.started_ns))
        if local_rank in self.met:
            failed.met[local_rank] = self.met.pop(local_rank)
        if failed.expired:
            failed.diagnosis, self.diagnosis = self.diagnosis, None
        failed.oom_kills, failed.oom_kills_after = self.oom_kills, self.oom_kills_after
        self.oom_kills = self.oom_kills_after
        self.replaced_workers.append(failed)
        return failed

    def count_oom_kills(self) -> None:
        self.oom_kills_after = read_counters(self.oom_kills)

    def how_it_began(self) -> str:
        """Describe the restart that led to this attempt: its duration, its longest phase, and whether it was
        warm (the workers were forked from a preloaded process).
        """
        span = phrases.milliseconds(round(1e6 * sum(self.phases.values())))
        how = {None: "", True: ", warm", False: f", cold: {self.why_cold}"}[self.warm]
        is_elsewhere = "stopping" in self.phases and "signalling" not in self.phases
        since = "the stop" if is_elsewhere else "the failure was seen"
        return f"{span} after {since}{phrases.longest_phase(self.phases)}{how}"

    def aborted(self) -> int | None:
        """Return the local rank of the first worker that died by SIGABRT although elasticrs sent it no
        signal. Its peers may have exited before it: the kernel closes a dying worker's connections before it
        reports the worker's exit.
        """
        own = [each for each in self.exits.values() if each.sent_signal is None]
        return next((each.local_rank for each in own if each.exitcode == -signal.SIGABRT), None)

    def flight_records(self, local_rank: int, since: float = 0.0) -> list[str]:
        """Return the paths of torch's logs of a worker's collectives; see :func:`.failure.flight_records`."""
        error_file = self.paths.error_files.get(local_rank)
        return (
            flight_records(error_file, self.plan.ranks[local_rank].global_rank, since) if error_file else []
        )

    def has_flight_records(self) -> bool:
        return any(map(self.flight_records, self.global_ranks()))

    def has_left(self, local_rank: int) -> bool:
        """Return true if a worker has exited with code 0, without a signal from elasticrs."""
        exited = self.exits.get(local_rank)
        return exited is not None and exited.exitcode == 0 and exited.sent_signal is None

    def leavers(self) -> tuple[int, ...]:
        """Return the ranks that have exited with code 0, if others may wait for them. Return none if the job
        has workers on other nodes, if the workers are members of a rendezvous, or if most have exited so.
        """
        ranks = self.global_ranks()
        if self.plan.page is not None or len(ranks) != self.world_size:
            return ()
        left = [ranks[local_rank] for local_rank in self.exits if self.has_left(local_rank)]
        return tuple(sorted(left)) if 2 * len(left) <= len(ranks) else ()

    def left_before(self, at_ns: int) -> list[int]:
        """Return the ranks that had exited with code 0 before ``at_ns`` (monotonic)."""
        ranks = self.global_ranks()
        here = [place for place, exited in self.exits.items() if exited.seen_ns < at_ns]
        return sorted(ranks[local_rank] for local_rank in here if self.has_left(local_rank))

    def accuse(self, blame: Blame, at_ns: int, event: WorkerHung | None = None) -> None:
        places = {rank: local_rank for local_rank, rank in self.global_ranks().items()}
        self.append(Blamed(blame, [places[rank] for rank in blame.ranks], at_ns, event))

    def who_failed(self, local_rank: int, pid: int | None = None, *, of: str = "") -> str:
        """Name the first failed worker, or all to blame for a hang; ``of`` (`` of 8``) follows the ranks."""
        event = self.expired.get(local_rank)
        if self.blame is None or event is None or not event.is_blamed:
            return self.who(local_rank, pid) + of
        if self.blame.is_decided and len(self.blame.ranks) == 1:
            return self.who(local_rank, pid) + of
        return self.blame.text + of

    def how_it_ended(self, worker: WorkerExited) -> str:
        return phrases.SILENT if worker.local_rank in self.silent else phrases.how_it_ended(worker.exitcode)

    def last_met(self, local_rank: int) -> Met | None:
        """Return a worker's last rendezvous; ``None`` if it has recorded none."""
        page = self.plan.page
        if local_rank in self.met or local_rank in self.exits or page is None:
            return self.met.get(local_rank)
        return page.last_met(local_rank)

    def global_ranks(self) -> dict[int, int]:
        """Return the workers' global ranks by local rank, all different: from each worker's last rendezvous,
        or from the plan if it took part in none. If another worker has taken over a worker's rank, the value
        is a negative placeholder; see :meth:`shown_ranks`.
        """
        began = {ranks.local_rank: ranks.global_rank for ranks in self.plan.ranks}
        if self.plan.members is None:
            return began
        met = {local_rank: self.last_met(local_rank) for local_rank in began}
        taken: dict[int, int] = {}
        # If two workers had the same rank in different rounds, the one of the later round keeps it.
        for local_rank, last in sorted(met.items(), key=lambda each: -each[1].round if each[1] else 0):
            rank = last.rank if last else began[local_rank]
            taken[-1 - local_rank if rank in taken else rank] = local_rank
        found = {local_rank: rank for rank, local_rank in taken.items()}
        return dict(sorted(found.items()))

    def shown_ranks(self) -> dict[int, int | None]:
        """Return global ranks by local rank; ``None`` if another worker has taken over the rank."""
        return {place: rank if rank >= 0 else None for place, rank in self.global_ranks().items()}

    def who(self, local_rank: int, pid: int | None = None) -> str:
        """Name a worker in a message, by its global rank if known, otherwise by its local rank."""
        pids = "" if pid is None else f"pid {pid}"
        if self.plan.members is None:
            rank = f"rank {self.plan.ranks[local_rank].global_rank}"
        elif (met := self.last_met(local_rank)) is not None:
            rank, pids = f"rank {met.rank}", f"local_rank {local_rank}{pids and ', '}{pids}"
        else:
            rank = f"local rank {local_rank}"
        return f"{rank} ({pids})" if pids else rank

    def who_are(self, local_ranks: Sequence[int]) -> str:
        if self.plan.members is not None:
            return ", ".join(self.who(local_rank) for local_rank in local_ranks)
        return phrases.ranks_text(
            sorted(self.plan.ranks[local_rank].global_rank for local_rank in local_ranks)
        )


def phases(failed: Attempt, running: Attempt) -> dict[str, float]:
    """Return the durations of a restart's phases in milliseconds. Their sum is the whole restart.

    The restart starts when the agent sees the failure, or earlier, at the exception of a worker that took
    time to exit. After a failure on another node, it starts when the workers here are stopped. The phases
    end:

    - ``exiting``: when the failure was seen. Only after an exception.
    - ``signalling``: when the other workers have been signalled, except those that first copy their training
      state (``Keep``).
    - ``keeping``: when these workers have copied it and been signalled. Only if there were such workers.
    - ``stopping``: when all processes have exited.
    - ``freeing``: when their device memory is free, if it was not free immediately.
    - ``delay``: when the restart policy's delay is over.
    - ``rendezvous``: when ranks and addresses are known.
    - ``importing``: when the warm nursery is ready, if the start had to wait for it.
    - ``starting``: when all workers run.

    If it is unknown when a phase ended, its time counts as part of the next phase.
    """
    ends = {
        "exiting": failed.stamps.get("failure_seen"),
        "signalling": failed.stamps.get("siblings_signalled"),
        "keeping": failed.stamps.get("kept"),
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
            # The delay is measured by the leader. A node that is late waits for less than the full delay.
            delay_ns = max(0, min(int(failed.delay * 1e9), end - last))
            found["delay"], last = delay_ns / 1e6, last + delay_ns
        if last is not None and end is not None and end > last:
            found[name] = (end - last) / 1e6
            last = end
    return found


class JobResult(Record):
    """Result of a job on this node.

    Attributes:
        signum: signal that stopped the job.
        order: command of ``elasticctl`` that stopped the job; empty if none did.
        was_killed: true if this command has killed workers that were running.
        message: reason for a failure that was not caused by a worker.
        has_taken_part: true if workers of this node ran in the last round (an attempt of all nodes).
        is_outside: true if an error outside of the workers ended the job, for example of the rendezvous.
        verdict: advice to the scheduler if the job has failed.
        ending: summary line of a failed job, in two parts around the root cause, which the launcher inserts.
        start_errno: ``errno`` of the error that prevented the start of the last attempt.
        first_cause: first failure of the job, over all nodes, if it has several.
        clock: wall clock of the nodes' store, as estimated on this node.
        read_history: see :class:`.Decisions`; ``find_overdue``, ``shared_cause`` and ``node_names`` likewise.
        ask_others: function that asks the other nodes' agents for the states of their ranks, unless they have
            just answered. It does not wait for the answers.
        others_running: function that returns on how many nodes the job runs now without this node; 0 if this
            node takes part.
        waits_for: function that returns what this node waits for before it starts workers, as a text.
        is_ending: function that returns true while the job is being stopped; see :class:`.Decisions`.
        others: function that returns the last answers of the other nodes' agents about their ranks.
        return_values: return values of the workers, by global rank.
        kept: training step to which a failed job would return in another attempt, and the copies of the
            training state that it would restore. ``None`` unless workers use ``Keep``.
    """

    phase: Phase = Phase.INIT
    exit_code: int = 1
    signum: int | None = None
    order: str = ""
    was_killed: bool = False
    message: str | None = None
    has_taken_part: bool = True
    is_outside: bool = False
    verdict: Verdict = Verdict.FAILED
    ending: tuple[str, str] | None = None
    start_errno: int | None = None
    first_cause: Cause | None = None
    clock: Clock = Clock()
    attempts: list[Attempt] = fresh(factory=list)
    read_history: Callable[[], FailureHistory] = FailureHistory
    find_overdue: Callable[[], tuple[float, str | None]] = lambda: (0.0, None)
    shared_cause: Callable[[], Mapping[str, Any] | None] = lambda: None
    node_names: Callable[..., Sequence[str] | None] = lambda **_: None
    ask_others: Callable[[], None] = lambda: None
    others: Callable[[], list[dict[str, Any]]] = list
    others_running: Callable[[], int] = int
    waits_for: Callable[[], str | None] = lambda: None
    is_ending: Callable[[], bool] = bool
    return_values: dict[int, object] = fresh(factory=dict)
    kept: Choice | None = None

    @property
    def how_stopped(self) -> str | None:
        """Text with the ``elasticctl`` command or the signal that stopped the job on this node; ``None`` if
        the job was not stopped in this way.
        """
        if self.signum is None:
            return None
        by = f"elasticctl {self.order}" if self.order else phrases.signal_name(self.signum)
        return f"stopped by {by}"

    @property
    def restarts(self) -> int:
        """Number of charged restarts, including one whose workers have not been started yet."""
        return max(self.read_history().charged, self.attempts[-1].restarts if self.attempts else 0)

    def restarts_left(self, policy: RestartSettings) -> int:
        history = self.read_history()
        if policy.window is None or not history.charged:
            # Without a time window, or if the history has no times of restarts, all restarts count.
            return policy.max_restarts - self.restarts
        return max(0, policy.max_restarts - len(recent(policy, history, time.monotonic_ns() / 1e9)))


# --- the kernel's OOM killer ---

VMSTAT = "/proc/vmstat"
"""File with the number of the machine's OOM kills, used only if no memory cgroup's counters can be read."""


BY_OOM_KILLER = "probably by the kernel's OOM killer"

_ADVICE = (
    "raise the memory limit of its control group, or use smaller batches or fewer data loader workers",
    "the machine was out of memory: use smaller batches or fewer data loader workers",
)
"""Advice to a user whose job exceeded a cgroup's limit, and to one whose machine ran out of memory."""


def memory_counters(cgroups: str, mountinfo: str) -> list[str]:
    """Return the paths of the files in which the kernel counts OOM kills for a process's memory cgroups. Some
    of the files may not exist. ``cgroups`` is the text of the process's file ``/proc/PID/cgroup``, and
    ``mountinfo`` is the text of ``/proc/self/mountinfo``.
    """
    counters = []
    for line in cgroups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if not controllers:
            kind, option, name = "cgroup2", "", "memory.events"
        elif "memory" in controllers.split(","):
            kind, option, name = "cgroup", "memory", "memory.oom_control"
        else:
            continue
        directory = _mounted_at(path, mountinfo, kind, option)
        if directory is not None:
            counters.append(f"{directory.rstrip('/')}/{name}")
    return counters


def _mounted_at(path: str, mountinfo: str, kind: str, option: str) -> str | None:
    """Return the path of a cgroup's directory in the closest mount that shows it; ``None`` if none does."""
    best = None
    best_root = ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, source = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(source) < 3:
            continue
        if source[0] != kind or (option and option not in source[2].split(",")):
            continue
        root, point = _unescape(fields[3]), _unescape(fields[4])
        inside = root.rstrip("/")
        if (path == root or path.startswith(f"{inside}/")) and len(root) >= len(best_root):
            best, best_root = point.rstrip("/") + path[len(inside) :], root
    return best


def _unescape(field: str) -> str:
    # The kernel writes a space, tab, newline or backslash in mountinfo as a backslash and octal digits.
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def parse_oom_kill(text: str) -> int | None:
    """Return the number of OOM kills in the text of a file of the kernel; ``None`` if the text has none."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdecimal():
            return int(value)
    return None


def oom_kills(pids: Iterable[int] = ()) -> dict[str, int]:
    """Return the numbers of OOM kills on this machine, and in the memory cgroups of this process and of
    ``pids``. The keys are the paths of the files from which the numbers were read.
    """
    mountinfo = file_text("/proc/self/mountinfo")
    paths = {VMSTAT: None}
    known = set()
    for process in ("self", *pids):
        cgroups = file_text(f"/proc/{process}/cgroup")
        if cgroups not in known:
            known.add(cgroups)
            paths.update(dict.fromkeys(memory_counters(cgroups, mountinfo)))
    return read_counters(paths)


def read_counters(paths: Iterable[str]) -> dict[str, int]:
    """Return the numbers of OOM kills in these files, by path. Leave out files that have no such number."""
    counts = {}
    for path in paths:
        count = parse_oom_kill(file_text(path))
        if count is not None:
            counts[path] = count
    return counts


def file_text(path: str) -> str:
    """Return the text of a file of the kernel; an empty text if the file cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def oom_rise(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the file whose number of OOM kills has risen the most, and by how many; ``None`` if none has."""
    rises = {path: after[path] - count for path, count in before.items() if after.get(path, 0) > count}
    if any(path != VMSTAT for path in before):
        rises.pop(VMSTAT, None)
    return max(rises.items(), key=lambda item: item[1], default=None)


def probably_oom(
    exitcode: int | None, sent_signal: int | None, before: Mapping[str, int], after: Mapping[str, int]
) -> bool:
    """Return true if the OOM killer probably killed a worker. If the worker is a shell, it may have killed a
    command of that shell, which then exits with code 137.
    """
    killed = exitcode in {-signal.SIGKILL, 128 + signal.SIGKILL}
    return killed and sent_signal != signal.SIGKILL and oom_rise(before, after) is not None


def oom_note(
    exitcode: int | None, sent_signal: int | None, before: Mapping[str, int], after: Mapping[str, int]
) -> str | None:
    """Return a line about OOM kills for the report of a failure; ``None`` if there have been no new ones."""
    rise = oom_rise(before, after)
    if rise is None:
        return None
    path, count = rise
    counted, advice = f"oom_kill rose by {count} in {path}", _ADVICE[path == VMSTAT]
    if probably_oom(exitcode, sent_signal, before, after):
        return f"probably the kernel's OOM killer ({counted}); {advice}"
    struck = f"the kernel's OOM killer killed a process during this attempt ({counted})"
    return f"{struck}, perhaps a child of the worker; {advice}"
