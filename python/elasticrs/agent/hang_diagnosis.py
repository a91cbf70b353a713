"""Diagnosis of a hang, from the files in which the workers and the core left their evidence.

Imported only after a worker hung.
"""

from __future__ import annotations

import json
import os
import stat

from elasticrs.diagnosis.diagnose import diagnose
from elasticrs.diagnosis.flight_record import MAX_BYTES, MAX_NAME
from elasticrs.diagnosis.stacks import MAX_TEXT
from elasticrs.diagnosis.values import Confidence, NoRecord, RankEvidence
from elasticrs.report.phrases import ranks_text
from elasticrs.workers.logs import flight_record_file, flight_requests_file, hang_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.agent.attempt import Attempt
    from elasticrs.diagnosis.values import Diagnosis

_MAX_RECORDS = 4
"""Maximum number of records of one worker, one for each recorder of torch."""

_MAX_RANK = 1 << 31


def diagnosis_of(attempt: Attempt) -> Diagnosis | None:
    """Name the ranks that keep the others waiting. Call this before the exits of killed workers are recorded.

    Return ``None`` if nothing can be said: no worker has a flight record, no collective was recorded, or the
    job has workers on other nodes, whose evidence is unknown.
    """
    ranks = attempt.global_ranks()
    paths = attempt.paths
    if paths is None or sorted(ranks.values()) != list(range(attempt.world_size)):
        return None
    found = [
        _evidence(rank, paths.error_files.get(local_rank, ""), has_exited=local_rank in attempt.exits)
        for local_rank, rank in ranks.items()
    ]
    if not any(isinstance(each.records, tuple) for each in found):
        return None
    diagnosis = diagnose(found)
    return diagnosis if diagnosis.culprits or diagnosis.collectives else None


def blames_others(diagnosis: Diagnosis, rank: int) -> str | None:
    """Return a line for the report if the flight records blame other ranks than the one that the heartbeats
    blame; ``None`` otherwise.
    """
    blamed = sorted(
        {
            other
            for culprit in diagnosis.culprits
            if culprit.confidence is not Confidence.POSSIBLE
            for other in culprit.ranks
        }
    )
    if not blamed or rank in blamed:
        return None
    return f"the heartbeats blame rank {rank}, but the flight records blame {ranks_text(blamed)}"


def _evidence(rank: int, error_file: str, *, has_exited: bool) -> RankEvidence:
    node = os.uname().nodename
    if not error_file or has_exited:
        return RankEvidence(rank, node, NoRecord.EXITED if has_exited else NoRecord.NO_TORCH)
    stacks = _content(hang_file(error_file), MAX_TEXT)
    records, groups = _document(error_file)
    return RankEvidence(
        rank,
        node,
        records,
        None if stacks is None else stacks[:MAX_TEXT].decode("utf-8", "replace"),
        groups,
        os.path.exists(error_file),
    )


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
