"""The step at which all workers of a round leave it together, when nobody has failed: a worker comes or goes.

Each worker counts the boundaries between steps that it has passed. One that is told of the change sets itself
a cap, two boundaries ahead, and publishes it; the largest cap of all is where they leave. A worker that comes
to its own cap before that is known waits there.

- **LEAVE-1** nobody passes its own cap before the leave step is known, so the leave step is never behind
  anybody, whatever the threads and the network do.
- **LEAVE-2** whether they save a checkpoint at that step is said with it, in one word of one worker: so all
  do, or none.
- **LEAVE-3** caps are published by the threads that are told, never by the training: so all caps come though
  workers wait at theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrs.job.value import Record

if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    Verdict: TypeAlias = Literal["go", "wait", "leave"]

AHEAD = 2
"""Boundaries from where a worker is to its cap. One would be as safe; with two, the step that runs and the
next one give the threads the time to agree, and nobody waits.
"""

AT_ONCE = 0
"""The leave step of a round that is broken."""


class LeaveStep(Record):
    """Where one worker stands in a round; a pure machine, changed under its owner's lock.

    Args:
        done: boundaries passed.
        cap: the boundary that is not passed before the leave step is known.
        at: the leave step.
        saves: all save a checkpoint there before they leave.
    """

    done: int = 0
    cap: int | None = None
    at: int | None = None
    saves: bool = False

    def verdict(self) -> Verdict:
        """Say what to do at the boundary that was counted last."""
        if self.at is not None:
            return "leave" if self.done >= self.at else "go"
        return "wait" if self.cap is not None and self.done >= self.cap else "go"

    def set_cap(self) -> int:
        """Return the cap, set once: when this worker is told."""
        if self.cap is None:
            self.cap = self.done + AHEAD
        return self.cap


def agreed(caps: list[int]) -> int:
    """Return the leave step, from the caps of all workers."""
    return max(caps)


def said(at: int, *, saves: bool) -> str:
    """Return what one worker publishes for all: the leave step, and whether they save there. Being one value,
    it is the same for all.
    """
    return f"{at} saving" if saves else str(at)


def heard(text: str) -> tuple[int, bool]:
    """Return what :func:`said` was given."""
    at, _, saving = text.partition(" ")
    return int(at), bool(saving)
