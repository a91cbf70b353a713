"""Determine the step after which all workers leave a round together. This is used when a worker joins or
leaves the job and no worker has failed.

Each worker counts the step boundaries that it has passed. A worker that is notified of the change sets a cap,
which is two boundaries ahead, and publishes it. All workers leave at the largest cap. A worker that reaches
its own cap before the largest cap is known waits there.

- **LEAVE-1** no worker passes its own cap before the leave step is known. So no worker is ever past the leave
  step, however slow threads and network are.
- **LEAVE-2** a single worker publishes the leave step together with the decision about saving a checkpoint
  there, as one value. So either all workers save, or none.
- **LEAVE-3** caps are published by the watching threads, not by the training loop. So all caps are published
  even while workers wait at their caps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrs._engine.job.value import Record

if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    Verdict: TypeAlias = Literal["go", "wait", "leave"]

AHEAD = 2
"""Number of step boundaries from a worker's current boundary to its cap. A distance of one would be equally
safe. With two, the watching threads have the rest of the current step and the whole next step to agree, so
that usually no worker has to wait.
"""

AT_ONCE = 0
"""Leave step of a broken round: workers leave such a round immediately."""


class LeaveStep(Record):
    """Progress of one worker within a round, and the step after which it leaves. The owner protects this
    object with a lock.

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
        """Return the action of this worker at the current step boundary: ``go`` (continue), ``wait`` or
        ``leave``.
        """
        if self.at is not None:
            return "leave" if self.done >= self.at else "go"
        return "wait" if self.cap is not None and self.done >= self.cap else "go"

    def set_cap(self) -> int:
        """Return the step at which this worker waits until all workers have agreed when to leave the round.
        The first call chooses this step.
        """
        if self.cap is None:
            self.cap = self.done + AHEAD
        return self.cap


def agreed(caps: list[int]) -> int:
    """Return the step after which all workers leave the round: the maximum of ``caps``, the steps at which
    the workers wait for the decision. No worker has passed the maximum.
    """
    return max(caps)


def said(at: int, *, saves: bool) -> str:
    """Encode the step after which all workers leave the round, and whether they save a checkpoint at that
    step. The result is one string, because both values must be published together.
    """
    return f"{at} saving" if saves else str(at)


def heard(text: str) -> tuple[int, bool]:
    """Decode the step and the checkpoint flag from a string that :func:`said` returned."""
    at, _, saving = text.partition(" ")
    return int(at), bool(saving)
