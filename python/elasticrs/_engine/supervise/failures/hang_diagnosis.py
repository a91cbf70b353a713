"""Diagnoses hangs and failed collectives from the workers' flight records and stacks.

Imported only after a worker hung or a collective failed.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from typing import NamedTuple

from elasticrs._engine.failures.files import (
    fault_file,
    flight_dumps,
    flight_record_file,
    flight_requests_file,
    hang_file,
)
from elasticrs._engine.hangs.culprits import decide, decide_failure, shows_waiting
from elasticrs._engine.hangs.diagnose import observe, telling
from elasticrs._engine.hangs.flight_record import MAX_BYTES, MAX_NAME
from elasticrs._engine.hangs.node_evidence import encode
from elasticrs._engine.hangs.stacks import MAX_TEXT, abort
from elasticrs._engine.hangs.values import Frame, NoRecord, RankEvidence
from elasticrs._engine.inside.flight import MAX_ENTRIES
from elasticrs._engine.supervise.failures.first_failure import aborted, record_files, request_records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs._core import WorkerHung
    from elasticrs._engine.hangs.culprits import Blame
    from elasticrs._engine.hangs.flight_record import RankFacts
    from elasticrs._engine.hangs.values import Diagnosis
    from elasticrs._engine.supervise.attempts.attempt import Attempt

_MAX_FRAMES = 200
_MAX_RECORDS = 4
"""Maximum number of records of one worker, one for each recorder of torch."""

_MAX_RANK = 1 << 31
_MAX_AGE = 600.0
"""Maximum age, in seconds, of a failed collective's flight record when it is read. NCCL's watchdog writes the
record some time before the process exits.
"""

_RAISING_NS = 1_000_000_000
"""Maximum time from a failed collective until its exception is in the error file, in nanoseconds. Torch marks
the collective as retired before Python raises the exception, and the record may be written in between.
"""

_PAUSE = 0.01
_TIME_LIMIT = 1.0
"""Maximum number of seconds to spend on reading flight records. The remaining records are skipped."""

_ALL_BYTES, _MOST_BYTES, _LEAST_BYTES = 16 << 20, 32 << 10, 1 << 10
"""Maximum bytes of evidence of a whole job, which is divided among its nodes; then the largest and the
smallest limit for a single node.
"""

_ALL_STEPS = 1 << 15
"""Maximum number of collectives that are compared for each of torch's process groups, all ranks together.
Limits the time that the comparison takes.
"""


def examine(attempt: Attempt) -> Diagnosis | None:
    """Find the ranks that keep the others waiting after a hang. Call this before the attempt records that
    workers were killed and have exited.

    Return ``None`` if the flight records show neither an incomplete collective nor a rank to blame, or if the
    job has workers on other nodes, because their evidence arrives later.
    """
    return _telling(attempt, _facts(attempt))


def examine_failure(attempt: Attempt) -> tuple[Diagnosis | None, Blame | None]:
    """Find the ranks that made a collective fail, if all workers of the job ran on this node. Call this after
    the worker that failed first has exited.

    The second result names the ranks to blame; ``None`` if no evidence speaks against blaming the rank that
    failed first.
    """
    facts, first = _facts_of_failure(attempt), aborted(attempt)
    first = attempt.first_failure if first is None else first
    if len(facts) != attempt.world_size or first is None:
        return None, None
    diagnosis = telling(facts)
    rank = attempt.global_ranks()[first]
    own = next(each for each in facts if each.rank == rank)
    may_be_innocent = own.record is NoRecord.ABORTED and _may_have_waited(attempt, first, own)
    ranks = [each.rank for each in facts]
    return diagnosis, decide_failure(diagnosis, rank, ranks, may_be_innocent=may_be_innocent)


def _may_have_waited(attempt: Attempt, local_rank: int, facts: RankFacts) -> bool:
    """Return true if a rank's stack shows that it waited, or if its stack is unknown and it uses torch."""
    if facts.frames:
        return bool(shows_waiting(facts.frames))
    return os.path.lexists(flight_requests_file(attempt.paths.error_files.get(local_rank, "")))


def accuse(attempt: Attempt, event: WorkerHung) -> None:
    """Decide which workers of this node are to blame for a hang. Call this after :func:`examine`.

    In a job of several nodes, the agent that leads the rendezvous makes the final decision, when it has the
    evidence of all nodes.
    """
    rank = attempt.global_ranks()[event.local_rank]
    attempt.accuse(decide(attempt.diagnosis, rank, event.ground), event.seen_ns, event)


def diagnose_running(attempt: Attempt, seconds: float) -> Diagnosis | None:
    """Find the ranks that other ranks of a running job wait for; ``None`` if unknown, or if no rank waits.

    Blocks until the workers whose heartbeats are watched have written their flight records, at most
    ``seconds``. Does not use stacks, because the signal that requests a stack would interrupt the program's
    system calls. A rank that is waiting is not necessarily stuck, because every collective takes some time.
    """
    requested = request_records(attempt)
    deadline = time.monotonic() + seconds
    while not all(map(os.path.lexists, requested)) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return _telling(attempt, _facts(attempt, has_stacks=False))


def _telling(attempt: Attempt, facts: list[RankFacts]) -> Diagnosis | None:
    return telling(facts) if len(facts) == attempt.world_size else None


def node_evidence(attempt: Attempt, *, is_hang: bool) -> bytes | None:
    """Encode this node's evidence for the diagnosis of the whole job; ``None`` if it would be too large.

    Call this after the workers have exited. If ``is_hang`` is true, a worker hung, and the core (the Rust
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
    """Read the evidence of the workers that had not exited before ``stopped_ns`` (monotonic time at which all
    were stopped; ``None`` if they were not stopped). If ``has_stacks`` is false, ignore the stack files,
    because they are outdated.
    """
    deadline = time.monotonic() + _TIME_LIMIT
    facts = []
    for local_rank, rank in attempt.global_ranks().items():
        exited = attempt.exits.get(local_rank)
        has_exited = exited is not None and (stopped_ns is None or exited.seen_ns < stopped_ns)
        error_file = attempt.paths.error_files.get(local_rank, "")
        is_late = time.monotonic() >= deadline
        found = _evidence(rank, error_file, has_exited=has_exited, is_late=is_late)
        if found.records is NoRecord.LATE:
            found = found._replace(records=_why_late(attempt, local_rank))
        facts.append(observe(found if has_stacks else found._replace(stacks=None)))
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
        path = next(iter(record_files(attempt, local_rank, oldest)), None)
        if path is not None and time.monotonic() < deadline:
            is_dump = path.startswith(flight_dumps(error_file))
            written = (
                _Written((_content(path, MAX_BYTES) or b"",)) if is_dump else _document(path, error_file)
            )
            age_ns = _age(error_file, path)
            has_raised = age_ns is not None and age_ns >= -_RAISING_NS
            has_raised |= local_rank in attempt.raised or any(map(_is_of_hook, written.frames))
            # Ignore a stack that was written after an exception: it shows the exit of the program instead of
            # the failed collective.
            frames = () if has_raised else written.frames
            found = found._replace(
                records=written.records, groups=written.groups, has_raised=has_raised, frames=frames
            )
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


def _evidence(rank: int, error_file: str, *, has_exited: bool, is_late: bool) -> RankEvidence:
    node = os.uname().nodename
    if not error_file or has_exited or is_late:
        reason = NoRecord.EXITED if has_exited else NoRecord.LATE if is_late else NoRecord.NO_TORCH
        return RankEvidence(rank, node, reason)
    stacks = _content(hang_file(error_file), MAX_TEXT)
    written = _document(flight_record_file(error_file), error_file)
    return RankEvidence(
        rank,
        node,
        written.records,
        None if stacks is None else stacks[:MAX_TEXT].decode("utf-8", "replace"),
        written.groups,
        (_age(error_file, flight_record_file(error_file)) or 0) > 0,
    )


def _age(path: str, other: str) -> int | None:
    """Return how much older ``path`` is than ``other``, in nanoseconds; ``None`` if either is missing."""
    try:
        return os.stat(other).st_mtime_ns - os.stat(path).st_mtime_ns
    except OSError:
        return None  # Either the worker raised no exception, or it did not write a record.


class _Written(NamedTuple):
    records: tuple[bytes, ...] | NoRecord
    groups: Mapping[str, list[int]] = {}
    frames: tuple[Frame, ...] = ()


def _document(path: str, error_file: str) -> _Written:
    document = _content(path, MAX_BYTES)
    if document is None:
        has_thread = os.path.lexists(flight_requests_file(error_file))
        return _Written(NoRecord.LATE if has_thread else NoRecord.NO_TORCH)
    first, *records = document.split(b"\n", _MAX_RECORDS)
    try:
        header = json.loads(first) if len(document) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        header = None
    if type(header) is not dict:
        return _Written(NoRecord.DAMAGED)
    if "no_record" in header:
        known = {reason.value: reason for reason in (NoRecord.NO_TORCH, NoRecord.OFF)}
        reason = header["no_record"]
        return _Written(known.get(reason, NoRecord.DAMAGED) if type(reason) is str else NoRecord.DAMAGED)
    groups = header.get("groups")
    if type(groups) is not dict or not all(map(_is_group, groups.items())):
        return _Written(NoRecord.DAMAGED)
    stack = header.get("stack", [])
    if type(stack) is not list or not all(map(_is_frame, stack)):
        return _Written(NoRecord.DAMAGED)
    return _Written(tuple(records), groups, tuple(Frame(*frame) for frame in stack[:_MAX_FRAMES]))


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
    """Read at most ``limit`` + 1 bytes; ``None`` if the file is missing or not a regular file.

    A worker may have replaced the file with something else, such as a link or a FIFO.
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
