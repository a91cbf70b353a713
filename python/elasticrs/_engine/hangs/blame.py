"""Decides which ranks are to blame for a hang or a failed collective. The launcher's lines, the report, the
events, the status page and the restart policy all show this decision.

- **BLAME-1** If the flight records are conclusive, they determine the ranks to blame.
- **BLAME-2** If the flight records are not conclusive, no rank is blamed, and the candidates are named. The
  exception is a rank that was stopped by a signal (SIGSTOP), because the state of its process is proof.
- **BLAME-3** Heartbeats decide only if there are no flight records, or if no rank waits according to the
  records.
- **BLAME-4** If native code has aborted a rank inside a collective, only conclusive records can blame that
  rank. Without them, the rank is a candidate, because gloo aborts the rank that expects less data, and that
  rank may be innocent.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from elasticrs._engine.hangs.values import NoRecord
from elasticrs._engine.job.phrases import ranks_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs._engine.hangs.values import Diagnosis

_STOPPED = "stopped"


class Basis(str, Enum):
    """Evidence on which a decision is based."""

    RECORDS = "records"
    """Flight records and stacks of the ranks."""
    EXIT = "exit"
    """Ranks that exited with code 0 while other ranks were still waiting for them."""
    HEARTBEATS = "heartbeats"
    """Times and steps of the last heartbeats."""


class Blame(NamedTuple):
    """Ranks to blame for a hang. If the evidence is not conclusive, the ranks that may be to blame
    (candidates).
    """

    ranks: tuple[int, ...]
    """Ranks in ascending order; at least one."""
    is_decided: bool
    """True if all of these ranks are to blame; false if the evidence does not show which of them are to
    blame.
    """
    basis: Basis

    @property
    def text(self) -> str:
        """Text that names the ranks, such as ``rank 2``, ``ranks 1, 2`` or ``undecided, candidates: ranks 0,
        1``.
        """
        ranks = ranks_text(self.ranks)
        return ranks if self.is_decided else f"undecided, candidates: {ranks}"


def decided(diagnosis: Diagnosis | None) -> Blame | None:
    """Return the ranks that the flight records blame. Return ``None`` if the records are not conclusive."""
    blamed = () if diagnosis is None else tuple(sorted(diagnosis.blamed()))
    return Blame(blamed, True, Basis.RECORDS) if blamed else None


def decide(diagnosis: Diagnosis | None, rank: int, ground: str) -> Blame:
    """Decide which ranks are to blame for a hang. Pure function.

    Args:
        diagnosis: result of comparing the flight records and stacks; ``None`` if there is not enough
            evidence.
        rank: rank that the heartbeats blame.
        ground: reason why the heartbeats blame this rank, as in ``WorkerHung.ground``.
    """
    blame = decided(diagnosis)
    if blame is not None:
        return blame
    candidates = () if diagnosis is None else diagnosis.candidates
    if ground == _STOPPED or not candidates or candidates == (rank,):
        return Blame((rank,), True, Basis.HEARTBEATS)
    return Blame(candidates, False, Basis.RECORDS)


def decide_failure(
    diagnosis: Diagnosis | None, rank: int, ranks: Sequence[int], *, may_be_innocent: bool = False
) -> Blame | None:
    """Decide which ranks are to blame for the failure of a collective. Pure function.

    Args:
        diagnosis: result of comparing the flight records; ``None`` if there is not enough evidence.
        rank: rank that failed first.
        ranks: all ranks of the job.
        may_be_innocent: true if native code has aborted this rank, and the rank may have been in a
            collective.

    Returns:
        The decision; ``None`` if no evidence speaks against blaming the rank that failed first.
    """
    blame = decided(diagnosis)
    if blame is not None:
        return blame
    suspects = () if diagnosis is None else diagnosis.candidates
    if suspects and diagnosis is not None and rank in diagnosis.no_record.get(NoRecord.ABORTED, ()):
        candidates = sorted({rank, *suspects})
    elif not suspects and may_be_innocent:
        candidates = sorted({rank, *ranks})
    else:
        return None
    return Blame(tuple(candidates), len(candidates) == 1, Basis.RECORDS)
