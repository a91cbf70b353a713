"""Diagnoses hangs and failed collectives from flight records (torch's logs of collectives) and stacks.

It also writes the texts about them, and is imported only after a hang or failed collective, or at the end of
a job whose workers sent heartbeats.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import stat
import time
from binascii import a2b_base64, b2a_base64
from itertools import islice

from elasticrs._engine.failures.failure import (
    OWN_THREAD,
    fault_file,
    flight_dumps,
    flight_record_file,
    flight_requests_file,
    hang_file,
)
from elasticrs._engine.hangs.culprits import decide, decide_failure, shows_waiting
from elasticrs._engine.hangs.diagnose import RankEvidence, observe, telling
from elasticrs._engine.hangs.flight_record import MAX_BYTES, MAX_NAME, NoRecord
from elasticrs._engine.hangs.late import Look, arrivals_of, late_ranks
from elasticrs._engine.hangs.node_evidence import decode, encode
from elasticrs._engine.hangs.stacks import MAX_TEXT, Frame, abort, frame_of, merge, short, threads
from elasticrs._engine.inside.flight import MAX_ENTRIES
from elasticrs._engine.job.phrases import how_it_ended, printable, ranks_text
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any

    from elasticrs._core import Heartbeat, RankSeen, WorkerExited, WorkerHung
    from elasticrs._engine.hangs.culprits import Blame, Diagnosis
    from elasticrs._engine.hangs.flight_record import RankFacts
    from elasticrs._engine.supervise.attempt import Attempt
    from elasticrs._engine.workers.event_log import Overdue

_MAX_FRAMES = 200
_MAX_RECORDS = 4
"""Maximum number of records of one worker, one for each recorder of torch."""

_MAX_RANK = 1 << 31
_MAX_AGE = 600.0
"""Maximum age of a failed collective's record in seconds. NCCL's watchdog writes it before the exit."""

_EXIT_NS = 100_000_000
"""Nanoseconds by which the exit of a process may be seen after the errors that it causes on other ranks. The
kernel closes the sockets of a process before its parent can see the exit.
"""

_RAISING_NS = 1_000_000_000
"""Maximum time from a failed collective until its exception is in the error file, in nanoseconds. Torch marks
the collective as retired before Python raises the exception, and the record may be written in between.
"""

_FIRST_PAUSE, _PAUSE = 0.001, 0.01
"""Seconds between the first two looks whether workers have written their flight records (torch's logs of
collectives), and the maximum between later looks.
"""

_TIME_LIMIT = 1.0
"""Maximum number of seconds to spend on reading flight records. The remaining records are skipped."""

_ALL_BYTES, _MOST_BYTES, _LEAST_BYTES = 16 << 20, 32 << 10, 1 << 10
"""Maximum bytes of evidence of a job, divided among its nodes; then the largest and smallest for one node."""

_ALL_STEPS = 1 << 15
"""Maximum number of collectives compared for each process group, all ranks together, to limit the time."""


def examine(attempt: Attempt) -> Diagnosis | None:
    """Find the ranks that keep the others waiting after a hang. Call this before the attempt records that
    workers were killed and have exited. Return ``None`` if the flight records show neither an incomplete
    collective nor a rank to blame, or if the job has workers on other nodes, because their evidence arrives
    later.
    """
    return _telling(attempt, _facts(attempt))


def examine_failure(attempt: Attempt) -> tuple[Diagnosis | None, Blame | None]:
    """Find the ranks that made a collective fail, if all workers of the job ran on this node. Call this after
    the worker that failed first has exited. The second result names the ranks to blame; ``None`` if no
    evidence speaks against blaming the rank that failed first.
    """
    facts, first = _facts_of_failure(attempt), attempt.aborted()
    first = attempt.first_failure if first is None else first
    if len(facts) != attempt.world_size or first is None:
        return None, None
    diagnosis = telling(facts)
    if diagnosis is not None and diagnosis.blamed() & _unexplained(attempt, diagnosis):
        return None, None
    rank = attempt.global_ranks()[first]
    own = next(each for each in facts if each.rank == rank)
    may_be_innocent = own.record is NoRecord.ABORTED and _may_have_waited(attempt, first, own)
    ranks = [each.rank for each in facts]
    return diagnosis, decide_failure(diagnosis, rank, ranks, may_be_innocent=may_be_innocent)


def _unexplained(attempt: Attempt, diagnosis: Diagnosis) -> set[int]:
    """Return the ranks whose flight record may be missing because they failed, and not because they were slow
    to answer. If the exit of a rank has not been noticed yet, gloo may have aborted it. A rank failed by
    itself if its exit code is not 0, and the supervisor has sent it no signal.
    """

    def may_have_failed(local_rank: int) -> bool:
        exited = attempt.exits.get(local_rank)
        return exited is None or (exited.exitcode != 0 and exited.sent_signal is None)

    ranks = {rank for local_rank, rank in attempt.global_ranks().items() if may_have_failed(local_rank)}
    return {rank for rank, why in diagnosis.no_record.items() if why is NoRecord.LATE} & ranks


def _may_have_waited(attempt: Attempt, local_rank: int, facts: RankFacts) -> bool:
    """Return true if a rank's stack shows that it waited, or if its stack is unknown and it uses torch."""
    if facts.frames:
        return bool(shows_waiting(facts.frames))
    return os.path.lexists(flight_requests_file(attempt.paths.error_files.get(local_rank, "")))


def accuse(attempt: Attempt, event: WorkerHung) -> None:
    """Record which workers of this node are to blame for a hang. Call this after :func:`examine`. With
    several nodes, the agent that leads the rendezvous makes the final decision, when it has all nodes'
    evidence.
    """
    ranks = attempt.global_ranks()
    rank = ranks[event.local_rank]
    left: list[int] = []
    # A worker whose program has returned waits for no other worker.
    if event.missed != "exit":
        # A worker may also exit between the detection of the hang and this event.
        left = sorted({*attempt.leavers()}.intersection(attempt.left_before(event.seen_ns)))
    suspects = [rank]
    if len(ranks) == attempt.world_size and not _is_odd(event):
        late = [seen.local_rank for seen in event.ranks if seen.is_late]
        suspects = sorted(ranks[each] for each in late if not attempt.has_left(each))
        if left and _stopped_with(event, max(exited.seen_ns for exited in attempt.exits.values())):
            suspects = []  # The same wait for the ranks that have exited probably stopped all others.
    blame = decide(attempt.diagnosis, rank, event.ground, suspects=suspects, left=left)
    attempt.accuse(blame, event.seen_ns, event)


def _is_odd(event: WorkerHung) -> bool:
    """Return true if the worker that the core names for a hang differs clearly from other silent workers: in
    its step or place, because it exceeded a time limit of its own, or its last heartbeat is much older.
    """
    late = [seen for seen in event.ranks if seen.is_late and seen.local_rank != event.local_rank]
    if event.ground not in ("apart", "oldest") or event.missed in ("section", "exit") or not late:
        return True
    least_ns = int(min(_CLEARLY, event.limit * _CLEAR_PART) * 1e9)
    beats = [seen.heartbeat for seen in late]
    return all(beat is not None and beat.at_ns - event.since_ns >= least_ns for beat in beats)


def _stopped_with(event: WorkerHung, left_ns: int) -> bool:
    """Return true if no silent worker made progress for long after workers exited at ``left_ns``."""
    beats = [seen.heartbeat for seen in event.ranks if seen.is_late and seen.heartbeat is not None]
    return all(beat.at_ns - left_ns <= event.limit * 1e9 for beat in beats)


def diagnose_running(attempt: Attempt, seconds: float) -> Diagnosis | None:
    """Find the ranks that other ranks of a running job wait for; ``None`` if unknown, or if no rank waits.
    Block for at most ``seconds``. A rank that is waiting is not necessarily stuck, because every collective
    takes some time.
    """
    return _telling(attempt, facts_of_running(attempt, seconds))


_asking = _thread.allocate_lock()
"""Lock for asking workers for flight records, because each request deletes the file of the last answer."""


def facts_of_running(attempt: Attempt, seconds: float) -> list[RankFacts]:
    """Ask this node's workers for their flight records (torch's logs of collectives) and for the stacks of
    their main threads. Block for at most ``seconds``, until all workers that can answer have done so.

    A thread of each worker answers. Do not use the signal on which ``faulthandler`` writes stacks, except for
    workers that are killed anyway: this signal interrupts system calls, and in one of some thousand cases it
    crashes a busy process, because its handler reads frames while the interpreter changes them.
    """
    with _asking:
        _request(attempt, seconds)
        return _facts(attempt, has_stacks=False)


def _request(attempt: Attempt, seconds: float) -> dict[int, str]:
    """Ask this node's workers for their flight records. Wait for at most ``seconds``. Return the paths of the
    records, by local rank.
    """
    files = attempt.paths.error_files.items()
    paths = {local_rank: path for local_rank, path in files if path and local_rank not in attempt.exits}
    requested = {
        local_rank: flight_record_file(path) for local_rank, path in paths.items() if _is_requested(path)
    }
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while not all(map(os.path.lexists, requested.values())) and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, _PAUSE)
    return requested


def look_for_late(attempt: Attempt, seconds: float) -> Look:
    """Ask this node's workers at what times they called collectives, and find the late ones. Block for at
    most ``seconds``, as in :func:`facts_of_running`.
    """
    with _asking:
        paths = _request(attempt, seconds)
        documents = {local_rank: _content(path, MAX_BYTES) for local_rank, path in paths.items()}
    headers = {each: _header(document)[0] or {} for each, document in documents.items() if document}
    told = {each: arrivals_of(header) for each, header in headers.items()}
    off = {each for each, header in headers.items() if header.get("no_record") == NoRecord.OFF.value}
    ranks = attempt.global_ranks()
    late = late_ranks({ranks[each]: arrivals for each, arrivals in told.items() if arrivals is not None})
    return Look(
        time.monotonic(),
        {each: late[rank] for each, rank in ranks.items() if rank in late},
        {each: each not in off for each, arrivals in told.items() if each in off or arrivals is not None},
    )


class RunningRanks(Value):
    """What the ranks of a node are doing, for ``elasticctl stacks``.

    Args:
        facts: for each rank that has answered, its flight record (torch's log of collectives) and the stack
            of its main thread.
        silent: for each rank that has not told its stack, who it is, and whether it can answer at all.
        count: number of ranks that run on the node.
    """

    facts: list[RankFacts]
    silent: list[dict[str, Any]]
    count: int

    def encoded(self, nodes: int, world_size: int) -> dict[str, Any]:
        """Return these ranks as a JSON object, which this agent sends to the agent of another node."""
        evidence = encode(self.facts, **limits(nodes, world_size)) or b""
        return {
            "evidence": b2a_base64(evidence, newline=False).decode(),
            "silent": self.silent,
            "count": self.count,
        }

    @staticmethod
    def decoded(fields: Mapping[str, Any]) -> RunningRanks:
        """Return the ranks from another agent's JSON object; no ranks if its fields are not as expected."""
        from elasticrs._engine.nodes.protocol.records import COUNT, FLAG, NAME, row_of

        try:
            facts, count = decode(a2b_base64(fields["evidence"])), fields["count"]
            rows = [[each[name] for name in _SILENT] for each in fields["silent"]]
        except (ValueError, TypeError, LookupError):
            return RunningRanks([], [], 0)
        if not COUNT(count) or not all(map(row_of(COUNT, COUNT, FLAG, NAME), rows)):
            return RunningRanks([], [], 0)
        return RunningRanks(facts, [dict(zip(_SILENT, row, strict=True)) for row in rows], count)


_SILENT = ("rank", "pid", "can_answer", "node")


def where_running(attempt: Attempt, seconds: float) -> RunningRanks:
    """Find out what code the ranks of this node are running. Block for at most ``seconds``."""
    facts = facts_of_running(attempt, seconds)
    running = {attempt.global_ranks()[local_rank]: local_rank for local_rank in attempt.running()}
    silent = []
    for rank in sorted(running.keys() - {each.rank for each in facts if each.frames}):
        error_file = attempt.paths.error_files.get(running[rank], "")
        can_answer = bool(error_file) and os.path.lexists(flight_requests_file(error_file))
        values = (rank, attempt.pids[running[rank]], can_answer, os.uname().nodename)
        silent.append(dict(zip(_SILENT, values, strict=True)))
    return RunningRanks(facts, silent, len(running))


def told_stacks(nodes: Sequence[RunningRanks], world_size: int) -> dict[str, Any]:
    """Return the answer to ``elasticctl`` about what the ranks of these nodes are doing. ``stacks`` has the
    stacks of their main threads, from the innermost frame on; ranks with equal stacks share one. ``silent``
    has the ranks that have not told their stack. ``message`` tells which ranks wait for which.
    """
    facts = [each for node in nodes for each in node.facts]
    diagnosis = telling(facts) if len(facts) == world_size else None
    if diagnosis is not None and NoRecord.OUTDATED in diagnosis.no_record.values():
        # Some ranks have completed collectives after others had answered. So the job goes on: no rank hangs.
        diagnosis = None
    stacks = merge({each.rank: each.frames for each in facts})
    return {
        "message": None if diagnosis is None else diagnosis.summary,
        "stacks": [{"ranks": stack.ranks, "frames": stack.frames} for stack in stacks],
        "silent": [each for node in nodes for each in node.silent],
        "ranks": sum(node.count for node in nodes),
        "world_size": world_size,
        "node": os.uname().nodename,
    }


def _is_requested(error_file: str) -> bool:
    """Request a worker's log of collectives, without blocking. Return false if it cannot write one."""
    record, requests = flight_record_file(error_file), flight_requests_file(error_file)
    try:
        if os.path.lexists(record):
            os.unlink(record)  # Delete the record of an earlier hang, from which the worker has recovered.
        descriptor = os.open(requests, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False  # The worker has no thread that answers requests.

    # Opening the FIFO for writing requests a record. The worker reads until EOF, and then writes the record.
    os.close(descriptor)
    return True


def _telling(attempt: Attempt, facts: list[RankFacts]) -> Diagnosis | None:
    return telling(facts) if len(facts) == attempt.world_size else None


def node_evidence(attempt: Attempt, *, is_hang: bool) -> bytes | None:
    """Encode this node's evidence for the diagnosis of the whole job; ``None`` if it would be too large. Call
    this after the workers have exited. If ``is_hang`` is true, a worker hung, and the core (the Rust
    extension) has gathered evidence about all local ranks. Otherwise, a collective failed.
    """
    stamps, nodes = attempt.stamps, attempt.plan.ranks[0].group_world_size
    if is_hang:
        facts = _facts(attempt, stamps.get("stopped", stamps.get("failure_seen")))
    else:
        facts = _facts_of_failure(attempt)
    return encode(facts, **limits(nodes, attempt.world_size))


def limits(nodes: int, world_size: int) -> dict[str, int]:
    return {
        "max_bytes": max(_LEAST_BYTES, min(_MOST_BYTES, _ALL_BYTES // nodes)),
        "max_steps": max(1, min(MAX_ENTRIES, _ALL_STEPS // world_size)),
    }


def _facts(attempt: Attempt, stopped_ns: int | None = None, *, has_stacks: bool = True) -> list[RankFacts]:
    """Read the flight records and stacks of the workers. There are none from workers that exited before
    ``stopped_ns``, the monotonic time at which all were stopped (``None`` if they were not). Without
    ``has_stacks``, ignore the stack files, because they are outdated. If a worker has written no stack file,
    its stack comes from its flight record: a worker that goes on when another one hangs gets no signal to
    write the file.
    """
    deadline = time.monotonic() + _TIME_LIMIT
    facts = []
    for local_rank, rank in attempt.global_ranks().items():
        exited = attempt.exits.get(local_rank)
        error_file = attempt.paths.error_files.get(local_rank, "")
        found = RankEvidence(rank, os.uname().nodename, NoRecord.LATE)
        if exited is not None and (stopped_ns is None or exited.seen_ns < stopped_ns):
            found = found._replace(records=NoRecord.EXITED)
        elif not error_file:
            found = found._replace(records=NoRecord.NO_TORCH)
        elif time.monotonic() < deadline:
            path = flight_record_file(error_file)
            found = _with_record(found, path, error_file)
            found = found._replace(has_raised=(_age(error_file, path) or 0) > 0)
            if has_stacks and (stacks := _content(hang_file(error_file), MAX_TEXT)) is not None:
                found = found._replace(stacks=stacks[:MAX_TEXT].decode("utf-8", "replace"))
        if found.records is NoRecord.LATE:
            found = found._replace(records=_why_late(attempt, local_rank))
        facts.append(observe(found))
    return facts


def _facts_of_failure(attempt: Attempt) -> list[RankFacts]:
    """Read the flight records that the agent requested after the failure, or that NCCL's watchdog wrote."""
    oldest = time.time() - _MAX_AGE
    deadline = time.monotonic() + _TIME_LIMIT
    facts = []
    for local_rank, rank in attempt.global_ranks().items():
        found = RankEvidence(rank, os.uname().nodename, NoRecord.LATE)
        exited = attempt.exits.get(local_rank)
        error_file = attempt.paths.error_files.get(local_rank, "")
        if exited is not None and exited.exitcode == 0 and exited.sent_signal is None:
            found = found._replace(records=NoRecord.EXITED)
        elif exited is not None and exited.exitcode == -signal.SIGABRT and exited.sent_signal is None:
            stacks = _content(fault_file(error_file), MAX_TEXT) if error_file else None
            frames, is_own = abort((stacks or b"").decode("utf-8", "replace"))
            reason = NoRecord.EXITED if is_own else NoRecord.ABORTED
            found = found._replace(records=reason, frames=frames)
        elif local_rank in attempt.raised:
            found = found._replace(records=_why_late(attempt, local_rank))
        path = next(iter(attempt.flight_records(local_rank, oldest)), None)
        if path is not None and time.monotonic() < deadline:
            if path.startswith(flight_dumps(error_file)):
                found = found._replace(records=(_content(path, MAX_BYTES) or b"",), frames=())
            else:
                found = _with_record(found, path, error_file)
            age_ns = _age(error_file, path)
            has_raised = age_ns is not None and age_ns >= -_RAISING_NS
            has_raised |= local_rank in attempt.raised or any(map(_is_of_hook, found.frames))
            # Ignore a stack written after an exception: it shows how the program exits, not the collective.
            found = found._replace(has_raised=has_raised, frames=() if has_raised else found.frames)
        facts.append(observe(found))
    return facts


def _is_of_hook(frame: Frame) -> bool:
    return frame.file.endswith("/inside/hook/sitecustomize.py")


def _why_late(attempt: Attempt, local_rank: int) -> NoRecord:
    """Return why a worker has not written its flight record in time although it could write it."""
    raised = attempt.raised.get(local_rank)
    if raised is not None and raised.origin == "peer":
        return NoRecord.LOST_PEER
    hung = next((each.hung for each in attempt.expired.values() if each.hung is not None), None)
    beats = attempt.heartbeats if hung is None else [seen.heartbeat for seen in hung.ranks]
    has_returned = any(beat and beat.local_rank == local_rank and beat.has_returned for beat in beats)
    return NoRecord.RETURNED if has_returned else NoRecord.LATE


def _age(path: str, other: str) -> int | None:
    """Return how much older ``path`` is than ``other``, in nanoseconds; ``None`` if either is missing."""
    try:
        return os.stat(other).st_mtime_ns - os.stat(path).st_mtime_ns
    except OSError:
        return None  # Either the worker raised no exception, or it did not write a record.


def _with_record(found: RankEvidence, path: str, error_file: str) -> RankEvidence:
    """Read torch's log of collectives, process groups and stack, as the worker wrote them to ``path``."""
    document = _content(path, MAX_BYTES)
    if document is None:
        has_thread = os.path.lexists(flight_requests_file(error_file))
        return found._replace(records=NoRecord.LATE if has_thread else NoRecord.NO_TORCH, frames=())
    damaged = found._replace(records=NoRecord.DAMAGED, frames=())
    header, records = _header(document)
    if header is None:
        return damaged
    stack = header.get("stack", [])
    if type(stack) is not list or not all(map(_is_frame, stack)):
        return damaged
    found = found._replace(frames=tuple(Frame(*frame) for frame in stack[:_MAX_FRAMES]))
    if "no_record" in header:
        known = {reason.value: reason for reason in (NoRecord.NO_TORCH, NoRecord.OFF)}
        reason = header["no_record"]
        is_known = type(reason) is str and reason in known
        return found._replace(records=known[reason] if is_known else NoRecord.DAMAGED)
    groups = header.get("groups")
    if type(groups) is not dict or not all(map(_is_group, groups.items())):
        return damaged
    return found._replace(records=tuple(records), groups=groups)


def _header(document: bytes) -> tuple[dict[str, Any] | None, list[bytes]]:
    """Split a worker's answer into its header and torch's records. An invalid header becomes ``None``."""
    first, *records = document.split(b"\n", _MAX_RECORDS)
    try:
        header = json.loads(first) if len(document) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return None, []
    return (header if type(header) is dict else None), records


def _is_frame(frame: object) -> bool:
    return type(frame) is list and [type(part) for part in frame] == [str, int, str] and frame[1] >= 0


def _is_group(group: tuple[str, object]) -> bool:
    name, ranks = group
    return (
        len(name) <= MAX_NAME
        and type(ranks) is list
        and all(type(rank) is int and 0 <= rank < _MAX_RANK for rank in ranks)
    )


def _content(path: str, limit: int) -> bytes | None:
    """Read at most ``limit`` + 1 bytes; ``None`` if the file is missing or not a regular file. A worker may
    have replaced the file with something else, such as a link or a FIFO.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None  # The file is missing, or it is a symbolic link.
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1)
    except OSError:
        return None  # The file cannot be read, for example because of a disk error.
    finally:
        os.close(descriptor)


# --- messages to the user ---

MAX_FRAMES = 12
MAX_FRAMES_OF_OTHERS = 4
MAX_STACKS = 4
"""Maximum number of distinct stacks of candidates in a report."""
_CLEARLY, _CLEAR_PART = 1.0, 0.2
"""A worker has stopped clearly before others if its last heartbeat is older by so many seconds, or by this
part of its limit if that is less.
"""
_EARLIER = 0.01
"""Seconds by which a worker must have stopped before the others, so that the report mentions it."""
_STATES = {"T": "it is stopped by a signal", "t": "a debugger has stopped it", "D": "it waits for a device"}


def why_blamed(attempt: Attempt, event: Overdue, local_rank: int) -> str:
    """Describe why a worker is to blame for a hang, or for a failed collective."""
    exited = attempt.exits.get(local_rank)
    if event.hung is None:
        return kept_waiting(exited, event.seen_ns, attempt.diagnosis)
    blame, ranks = attempt.blame, attempt.global_ranks()
    if blame is not None and blame.basis == "exit" and not blame.is_decided:
        places = {rank: each for each, rank in ranks.items()}
        left = attempt.left_before(event.hung.seen_ns)
        at = _clock_time(max(attempt.exits[places[rank]].seen_ns for rank in left))
        who = "then the others" if ranks[local_rank] in left else f"then rank {ranks[local_rank]}"
        told = hung(event.hung, ranks, attempt.diagnosis, local_rank=local_rank)
        when = f" at {at}" if len(left) == 1 else f", the last at {at}"
        return f"{ranks_text(left)} exited with code 0{when}, {who} {told}"
    return hung(
        event.hung,
        ranks,
        attempt.diagnosis,
        was_found_here=attempt.first_failure is not None,
        local_rank=local_rank,
        exited=exited,
    )


def hung(
    event: WorkerHung,
    ranks: Mapping[int, int],
    diagnosis: Diagnosis | None = None,
    *,
    was_found_here: bool = True,
    local_rank: int | None = None,
    exited: WorkerExited | None = None,
) -> str:
    """Describe which worker hung, since when, and what the other workers did meanwhile. ``local_rank`` is the
    worker to describe, by default that of the event. ``ranks`` are global ranks, by local rank.
    ``was_found_here`` is false if only a worker of another node exceeded a time limit.
    """
    if local_rank is None:
        local_rank = event.local_rank
    summary = diagnosis.summary if diagnosis is not None else ""
    if exited is not None and exited.seen_ns < event.seen_ns:
        return f"{_left_early(exited)}; {summary}"
    own = next((seen for seen in event.ranks if seen.local_rank == local_rank), None)
    others = [seen for seen in event.ranks if seen.local_rank != local_rank]
    missed, stopped = _missed(event, own, was_found_here), _stopped_at(own, others)
    if diagnosis is not None and diagnosis.culprits:
        where = _STATES.get(own.state, "") if own is not None else ""
    else:
        where = _where(own, others, ranks)
    return "; ".join(filter(None, (missed, stopped, where, summary)))


def kept_waiting(exited: WorkerExited | None, at_ns: int, diagnosis: Diagnosis | None) -> str:
    """Describe a worker because of which a collective of the others failed at ``at_ns`` (monotonic)."""
    summary = "" if diagnosis is None else diagnosis.summary
    how = "made a collective of the others fail"
    if exited is not None and exited.seen_ns <= at_ns + (_EXIT_NS if exited.exitcode == 0 else 0):
        how = _left_early(exited) if (exited.exitcode or 0) >= 0 else how_it_ended(exited.exitcode)
    return "; ".join(filter(None, (how, summary)))


def _left_early(exited: WorkerExited) -> str:
    at = _clock_time(exited.seen_ns)
    return f"exited with code {exited.exitcode} at {at}, while others still waited for it"


def _clock_time(at_ns: int) -> str:
    age_ns = time.monotonic_ns() - at_ns
    return time.strftime("%H:%M:%S", time.localtime((time.time_ns() - age_ns) / 1e9))


def _missed(event: WorkerHung, own: RankSeen | None, was_found_here: bool) -> str:
    beat = own.heartbeat if own is not None else None
    section = printable(beat.section) if beat is not None and beat.section else ""
    what = {
        "startup": "no activity since its start",
        "step": "no heartbeat",
        "section": f"its section '{section}' has been open",
        "exit": "its program had returned, and it had not exited",
        "line": "no rank has written a line",
    }[event.missed]
    since_ns = event.since_ns
    if own is not None and beat is not None and beat.has_returned and event.missed != "exit":
        return (
            f"hung: its program returned {seconds((event.seen_ns - beat.at_ns) / 1e9)} before the others hung"
        )
    if own is not None and own.local_rank != event.local_rank:
        # Use this worker's own last heartbeat, because the event describes another worker's.
        what = f"in its section '{section}', no heartbeat" if section else "no heartbeat"
        since_ns = since_ns if beat is None else beat.at_ns
    silent = (event.seen_ns - since_ns) / 1e9
    others = ""
    if not was_found_here:
        others = "; a rank on another node has reached its limit"
    elif silent < event.limit:
        # The worker counts as hung before its own time limit has passed, because the limit of another rank,
        # which waits for it, has passed.
        others = "; another rank has reached its limit"
    return f"hung: {what} for {seconds(silent)} (limit {event.limit:g} s{others})"


def _stopped_at(own: RankSeen | None, others: Sequence[RankSeen]) -> str:
    if own is None or own.heartbeat is None:
        return ""
    step = own.heartbeat.step
    beats = [seen.heartbeat for seen in others if seen.heartbeat is not None]
    before = (min((beat.at_ns for beat in beats), default=0) - own.heartbeat.at_ns) / 1e9
    is_earlier = f"{seconds(before)} before the others" if before >= _EARLIER else ""
    if step is None:
        return f"its last heartbeat came {is_earlier}" if is_earlier else ""
    steps = [beat.step for beat in beats if beat.step is not None]
    behind = min(steps, default=step) - step
    is_behind = f"{behind:,} step{'s' if behind != 1 else ''} behind the others" if behind > 0 else ""
    at = step_text(step, is_automatic=own.heartbeat.is_automatic, word="at")
    return ", ".join(filter(None, (f"stopped {at}", is_earlier, is_behind)))


def step_text(step: int, *, is_automatic: bool, word: str = "in") -> str:
    """Return a phrase for the training step that a rank has reached, such as "at step 5". ``is_automatic``:
    ``step`` counts optimizer steps, instead of being the script's own number. ``word``: the word before the
    script's number ("at").
    """
    return f"after optimizer step {step:,} of this attempt" if is_automatic else f"{word} step {step:,}"


def _where(own: RankSeen | None, others: Sequence[RankSeen], ranks: Mapping[int, int]) -> str:
    texts = []
    if own is not None:
        state = _STATES.get(own.state, "")
        if own.frame:
            texts.append(f"{state or 'it is'} in {place(own.frame)}")
        elif state:
            texts.append(state)
        elif own.wait_channel:
            texts.append(f"it waits in the kernel's {own.wait_channel}")
    by_place: dict[str, list[int]] = {}
    for seen in others:
        if seen.frame:
            by_place.setdefault(place(seen.frame), []).append(ranks[seen.local_rank])
    for where, there in sorted(by_place.items(), key=lambda item: -len(item[1]))[:3]:
        texts.append(f"{ranks_text(sorted(there))} in {where}")
    return ", ".join(texts)


def place(frame: str) -> str:
    """Shorten a line of ``faulthandler``'s stack to a text like ``all_reduce (distributed_c10d.py:2501)``."""
    parsed = frame_of(frame)
    return printable(frame) if parsed is None else short(parsed)


def heartbeat_notes(
    beats: Iterable[Heartbeat], end_ns: int, ranks: Mapping[int, int], left: Collection[int] = ()
) -> list[str]:
    """Describe the last heartbeats before the failure at ``end_ns`` (monotonic), slowest ranks first.
    ``left`` are the ranks that had exited with code 0 before.
    """
    groups: dict[tuple[int | None, str | None, bool, bool], list[Heartbeat]] = {}
    for beat in beats:
        key = (beat.step, beat.section, beat.is_automatic, ranks[beat.local_rank] in left)
        groups.setdefault(key, []).append(beat)
    notes = []
    in_order = sorted(groups, key=lambda key: (key[0] or 0, min(beat.at_ns for beat in groups[key])))
    for key in in_order:
        (step, section, is_automatic, has_left), group = key, groups[key]
        ages = sorted(max(0.0, (end_ns - beat.at_ns) / 1e9) for beat in group)
        oldest, newest = seconds(ages[-1]), seconds(ages[0])
        span = oldest if oldest == newest else f"{newest} to {oldest}"
        where = "" if step is None else f" {step_text(step, is_automatic=is_automatic)}"
        where += f" in section '{printable(section)}'" if section else ""
        who = ranks_text(sorted(ranks[beat.local_rank] for beat in group))
        who += " (exited with code 0)" if has_left else ""
        notes.append(f"last heartbeat of {who}:{where}{',' if where else ''} {span} before the failure")
    if len(notes) > MAX_FRAMES:
        notes[MAX_FRAMES:] = [f"and {len(notes) - MAX_FRAMES} more such lines"]
    return notes


def stack(path: str, *, others: int = 0) -> str | None:
    """Return the innermost frames of the first thread in a worker's stack dump, if there are any. That thread
    handled the signal for the dump (``faulthandler``), or is the main thread (``py-spy``). Also include up to
    ``others`` further threads, because one of them may delay the worker's exit.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_TEXT)
    except OSError:
        return None  # Continue without a stack. The user was already told that the file is missing.
    found = (frames for frames in threads(text) if frames and not any(map(_is_own, frames)))
    frames = next(found, None)
    if frames is None:
        return None
    shown = ["where it was, the most recent call first:", *_first(frames, MAX_FRAMES)]
    for other in islice(found, others):
        shown += ["another thread:", *_first(other, MAX_FRAMES_OF_OTHERS)]
    return "\n".join(shown)


def stacks_of(diagnosis: Diagnosis, ranks: Sequence[int]) -> str | None:
    """Return the innermost frames of these ranks, grouped by stack; ``None`` if no stack is known."""
    shown: list[str] = []
    groups = [(sorted(set(ranks).intersection(stack.ranks)), stack.frames) for stack in diagnosis.stacks]
    groups = [(those, frames) for those, frames in groups if those]
    for those, frames in groups[:MAX_STACKS]:
        were = "was" if len(those) == 1 else "were"
        shown += [
            f"where {ranks_text(those)} {were}, the most recent call first:",
            *_first(frames, MAX_FRAMES),
        ]
    if len(groups) > MAX_STACKS:
        shown.append(f"and {len(groups) - MAX_STACKS} more stacks")
    return "\n".join(shown) or None


def _is_own(frame: Frame) -> bool:
    """Return true for elasticrs's own thread, which waits for flight record requests."""
    return frame.file.endswith(OWN_THREAD)


def _first(frames: Sequence[Frame], limit: int) -> list[str]:
    more = [f"  ({len(frames) - limit} more)"] if len(frames) > limit else []
    shown = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames[:limit]]
    return [*shown, *more]


def seconds(span: float) -> str:
    """Format seconds with at least three digits, as in ``9.99 s``, ``99.9 s`` and ``999 s``."""
    return f"{span:.2f} s" if span < 9.995 else f"{span:.1f} s" if span < 99.95 else f"{span:,.0f} s"
