"""Evidence about a hang, from the files in which the workers and the core left their evidence.

Imported only after a worker hung.
"""

from __future__ import annotations

import json
import os
import stat
import time

from elasticrs._worker.flight import MAX_ENTRIES
from elasticrs.agent.record_requests import record_files, request_records
from elasticrs.diagnosis.diagnose import observe, telling
from elasticrs.diagnosis.flight_record import MAX_BYTES, MAX_NAME
from elasticrs.diagnosis.node_evidence import encode
from elasticrs.diagnosis.stacks import MAX_TEXT
from elasticrs.diagnosis.values import NoRecord, RankEvidence
from elasticrs.workers.logs import flight_record_file, flight_requests_file, hang_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.agent.attempt import Attempt
    from elasticrs.diagnosis.rank_record import RankFacts
    from elasticrs.diagnosis.values import Diagnosis

_MAX_RECORDS = 4
"""Maximum number of records of one worker, one for each recorder of torch."""

_MAX_RANK = 1 << 31
_MAX_AGE = 600.0
"""Maximum age of the record of a failed collective, in seconds. NCCL's watchdog writes it some time before
the process exits.
"""

_PAUSE = 0.01
_TIME_LIMIT = 1.0
"""Seconds after which no further record of a worker is read."""

_ALL_BYTES, _MOST_BYTES, _LEAST_BYTES = 16 << 20, 32 << 10, 1 << 10
"""Maximum number of bytes that all nodes of a job send together, and bounds of the share of one node."""

_ALL_STEPS = 1 << 15
"""Maximum number of collectives of each group that all ranks of a job send together. It limits the time that
the comparison takes.
"""


def examine(attempt: Attempt) -> tuple[Diagnosis | None, bool]:
    """Name the ranks that keep the others waiting, if all workers of the job run on this node. Also return
    true if a worker of this node uses NCCL.

    Call this before the exits of killed workers are recorded. The diagnosis is ``None`` if nothing can be
    said: no worker has a flight record, no collective was recorded, or the job has workers on other nodes,
    whose evidence arrives later.
    """
    facts = _facts(attempt)
    records = [found.record for found in facts if not isinstance(found.record, NoRecord)]
    uses_nccl = any(backend == "nccl" for record in records for backend, _ in record.groups)
    return _telling(attempt, facts), uses_nccl


def diagnose_running(attempt: Attempt, seconds: float) -> Diagnosis | None:
    """Name the ranks of a running job that keep the others waiting. The workers are not disturbed.

    No stacks are used, because the signal that requests them interrupts system calls of the program. Only
    workers whose heartbeats are watched answer. Blocks until all of them have answered, for at most
    ``seconds``, so the agent's main thread may not call this.

    Args:
        attempt: running attempt, whose workers are all on this node.
        seconds: time limit for the answers.

    Returns:
        The diagnosis; ``None`` if no rank waits, or if nothing can be said. Collectives take time, so ranks
        that wait now need not wait a moment later.
    """
    requested = request_records(attempt)
    deadline = time.monotonic() + seconds
    while not all(map(os.path.lexists, requested)) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return _telling(attempt, _facts(attempt, has_stacks=False))


def diagnosis_of_failure(attempt: Attempt) -> Diagnosis | None:
    """Name the ranks that made a collective fail, if all workers of the job have run on this node. Call this
    when the workers have exited. Return ``None`` if nothing can be said.
    """
    return _telling(attempt, _facts_of_failure(attempt))


def _telling(attempt: Attempt, facts: list[RankFacts]) -> Diagnosis | None:
    return telling(facts) if len(facts) == attempt.world_size else None


def node_evidence(attempt: Attempt, *, is_hang: bool) -> bytes | None:
    """Return the encoded facts about the ranks of this node, for the diagnosis of all nodes. Call this when
    the workers have exited. Return ``None`` if there are no facts, or if they are too large.

    Args:
        attempt: attempt that has ended.
        is_hang: true if a rank of the job hung, so that the core has gathered evidence about all ranks. False
            if a collective has failed.
    """
    stamps, nodes = attempt.stamps, attempt.plan.ranks[0].group_world_size
    if is_hang:
        facts = _facts(attempt, stamps.get("stopped", stamps.get("failure_seen")))
    else:
        facts = _facts_of_failure(attempt)
    return encode(facts, **limits(nodes, attempt.world_size))


def limits(nodes: int, world_size: int) -> dict[str, int]:
    """Return the limits of :func:`elasticrs.diagnosis.node_evidence.encode` for a job of this size."""
    return {
        "max_bytes": max(_LEAST_BYTES, min(_MOST_BYTES, _ALL_BYTES // nodes)),
        "max_steps": max(1, min(MAX_ENTRIES, _ALL_STEPS // world_size)),
    }


def _facts(attempt: Attempt, stopped_ns: int | None = None, *, has_stacks: bool = True) -> list[RankFacts]:
    """Return the facts about the ranks of this node.

    Args:
        attempt: attempt in which a rank hangs.
        stopped_ns: time at which the workers were stopped. Workers that have exited later were running when
            the evidence was gathered. ``None`` if the workers have not been stopped yet.
        has_stacks: false if no stacks were requested, so that stacks in files are outdated.
    """
    paths = attempt.paths
    if paths is None:
        return []
    deadline = time.monotonic() + _TIME_LIMIT
    facts = []
    for local_rank, rank in attempt.global_ranks().items():
        exited = attempt.exits.get(local_rank)
        has_exited = exited is not None and (stopped_ns is None or exited.seen_ns < stopped_ns)
        error_file = paths.error_files.get(local_rank, "")
        is_late = time.monotonic() >= deadline
        found = _evidence(rank, error_file, has_exited=has_exited, is_late=is_late)
        facts.append(observe(found if has_stacks else found._replace(stacks=None)))
    return facts


def _facts_of_failure(attempt: Attempt) -> list[RankFacts]:
    """Return the facts about the ranks of this node after a collective has failed: from the records that were
    requested then, and from the dumps of NCCL's watchdog.
    """
    oldest = time.time() - _MAX_AGE
    deadline = time.monotonic() + _TIME_LIMIT
    facts = []
    for local_rank, rank in attempt.global_ranks().items():
        found = RankEvidence(rank, os.uname().nodename, NoRecord.LATE)
        error_file = attempt.paths.error_files.get(local_rank, "") if attempt.paths is not None else ""
        path = next(iter(record_files(attempt, local_rank, oldest)), None)
        if path is not None and time.monotonic() < deadline:
            is_dump = path != flight_record_file(error_file)
            records, groups = ((_content(path, MAX_BYTES) or b"",), {}) if is_dump else _document(error_file)
            # The record is requested so soon after the exception that both files may have the same time.
            has_raised = _age(error_file, path) >= 0
            found = found._replace(records=records, groups=groups, has_raised=has_raised)
        facts.append(observe(found))
    return facts


def _evidence(rank: int, error_file: str, *, has_exited: bool, is_late: bool) -> RankEvidence:
    node = os.uname().nodename
    if not error_file or has_exited or is_late:
        reason = NoRecord.EXITED if has_exited else NoRecord.LATE if is_late else NoRecord.NO_TORCH
        return RankEvidence(rank, node, reason)
    stacks = _content(hang_file(error_file), MAX_TEXT)
    records, groups = _document(error_file)
    return RankEvidence(
        rank,
        node,
        records,
        None if stacks is None else stacks[:MAX_TEXT].decode("utf-8", "replace"),
        groups,
        _age(error_file, flight_record_file(error_file)) > 0,
    )


def _age(path: str, other: str) -> int:
    """Return the nanoseconds by which a file is older than the other one. Return -1 if a file is missing."""
    try:
        return os.stat(other).st_mtime_ns - os.stat(path).st_mtime_ns
    except OSError:
        return -1  # The worker has raised no exception, or has written no record.


def _document(error_file: str) -> tuple[tuple[bytes, ...] | NoRecord, dict[str, list[int]]]:
    """Return the flight records of a worker and the ranks of its groups; see
    :func:`elasticrs._worker.flight.flight_document`.
    """
    document = _content(flight_record_file(error_file), MAX_BYTES)
    if document is None:
        has_thread = os.path.lexists(flight_requests_file(error_file))
        return NoRecord.LATE if has_thread else NoRecord.NO_TORCH, {}
    first, *records = document.split(b"\n", _MAX_RECORDS)
    try:
        header = json.loads(first) if len(document) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        header = None
    if type(header) is not dict:
        return NoRecord.DAMAGED, {}
    if "no_record" in header:
        known = {reason.value: reason for reason in (NoRecord.NO_TORCH, NoRecord.OFF)}
        reason = header["no_record"]
        return known.get(reason, NoRecord.DAMAGED) if type(reason) is str else NoRecord.DAMAGED, {}
    groups = header.get("groups")
    if type(groups) is not dict or not all(map(_is_group, groups.items())):
        return NoRecord.DAMAGED, {}
    return tuple(records), groups


def _is_group(group: tuple[str, object]) -> bool:
    name, ranks = group
    return (
        len(name) <= MAX_NAME
        and type(ranks) is list
        and all(type(rank) is int and 0 <= rank < _MAX_RANK for rank in ranks)
    )


def _content(path: str, limit: int) -> bytes | None:
    """Read a file that a worker may have replaced by anything.

    Return ``None`` if it is missing or not a regular file. Return more than ``limit`` bytes if it is larger.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None  # The evidence is missing. The report says so.
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1)
    except OSError:
        return None  # The disk has failed.
    finally:
        os.close(descriptor)
