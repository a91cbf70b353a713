"""Determines the step after which all workers leave a round together, if no worker has failed but a worker
joins or leaves the job.

Each worker counts the step boundaries that it has passed. A worker that is notified of the change sets a cap,
which is two boundaries ahead, and publishes it. All workers leave at the largest cap. A worker that reaches
its own cap before the largest cap is known waits there.

- **LEAVE-1** no worker passes its own cap before the leave step is known. So no worker is ever past the leave
  step, whatever the timing of threads and network.
- **LEAVE-2** a single worker publishes the leave step, and in the same value whether the workers save a
  checkpoint there. So either all workers save, or none.
- **LEAVE-3** caps are published by the watching threads, not by the training loop. So all caps are published
  even while workers wait at their caps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrs.job.value import Record

if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    Verdict: TypeAlias = Literal["go", "wait", "leave"]

AHEAD = 2
"""Number of boundaries from a worker's position to its cap. One would be equally safe. With two, the threads
can agree during the current step and the next one, so that no worker has to wait.
"""

AT_ONCE = 0
"""Leave step of a broken round, which workers leave immediately."""


class LeaveStep(Record):
    """Position of one worker in a round. A pure state machine that is protected by its owner's lock.

    Args:
        done: number of boundaries that the worker has passed.
        cap: boundary that the worker does not pass before the leave step is known; ``None`` if no change is
            due.
        at: the leave step; ``None`` if it is not known.
        saves: true if all workers save a checkpoint at the leave step.
    """

    done: int = 0
    cap: int | None = None
    at: int | None = None
    saves: bool = False

    def verdict(self) -> Verdict:
        """Return what the worker does at its latest boundary: continue, wait or leave."""
        if self.at is not None:
            return "leave" if self.done >= self.at else "go"
        return "wait" if self.cap is not None and self.done >= self.cap else "go"

    def set_cap(self) -> int:
        """Return the cap. The first call sets it, when this worker is notified of the change."""
        if self.cap is None:
            self.cap = self.done + AHEAD
        return self.cap


def agreed(caps: list[int]) -> int:
    """Return the leave step, from the caps of all workers."""
    return max(caps)


def said(at: int, *, saves: bool) -> str:
    """Encode the leave step, and whether the workers save a checkpoint there. One worker publishes the
    result, as a single value, so that all workers get the same.
    """
    return f"{at} saving" if saves else str(at)


def heard(text: str) -> tuple[int, bool]:
    """Decode a result of :func:`said`."""
    at, _, saving = text.partition(" ")
    return int(at), bool(saving)
