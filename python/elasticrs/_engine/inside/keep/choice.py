"""Chooses the kept step from which the next attempt goes on. Pure.

After an attempt, the agent reads what each rank has kept in its file (:mod:`.layout`): copies of the large
state in *slots*, and records of the small state (random numbers, loaders, the script's own values).

- **CHOOSE-1** The chosen step has a copy of the large state for each rank that needs one: the own copy of
  every rank, or any rank's copy if the state is replicated (equal on all ranks).
- **CHOOSE-2** Among these steps, the newest one for which each rank also has its small state is chosen. If
  there is none, the newest one is chosen, and ``behind`` names the ranks without their small state.
- **CHOOSE-3** A copy of an abandoned attempt never counts; see :func:`_current`.
- **LOOP-1** A step from which two attempts in a row went on, and failed soon with the same cause, is set
  aside, with all later steps, until an attempt has got well past it.
"""

from __future__ import annotations

from elasticrs._engine.inside.keep.layout import Answer, Mode
from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import KW_ONLY
    from typing import Any

NEAR = 20
"""Number of steps. An attempt that fails within so many steps of its start makes the kept state suspect."""

_ANSWERS = {
    Answer.CHANGING: "the optimizer was changing it",
    Answer.NOTHING: "it cannot be copied at that time",
    Answer.NO_MEMORY: "memory was short",
    Answer.TENSOR_CHANGED: "a tensor changed during the copy",
    Answer.FAILED: "the copy failed",
}


class KeptSlot(Value):
    """Complete copy of a rank's large state: number of its slot, step, attempt, and what describes it."""

    index: int
    step: int
    attempt: int = 0
    layout: int = 0
    digest: int = 0
    sequence: int = 0
    is_at_death: bool = False


class Holding(Value):
    """What a rank has kept.

    Args:
        has_joined: true if the rank has used ``Keep`` in the attempt that ended. Without, only ``slots`` and
            ``small`` are set.
        attempt: number of that attempt, as the rank has stored it.
        small: steps of which the rank's ring has a whole record of the small state.
        ended: last step that ended.
        mode: a code of :class:`.Mode`.
        check: step and digest of the first periodic copy.
        restored: step from which the rank went on.
        answer: a code of :class:`.Answer`, the answer to the last order to copy.
    """

    slots: tuple[KeptSlot, ...] = ()
    small: frozenset[int] = frozenset()
    _: KW_ONLY
    has_joined: bool = True
    attempt: int = 0
    ended: int | None = None
    mode: int = Mode.AUTO
    check: tuple[int, int] | None = None
    restored: int | None = None
    answer: int = Answer.NONE

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        slots = [slot.values() for slot in self.slots]
        return {**self.fields(), "slots": slots, "small": sorted(self.small)}

    @staticmethod
    def of_json(record: Any) -> Holding:
        """Return the holding that another agent has written. Raises ``ValueError`` or ``TypeError``."""
        fields: dict[str, Any] = dict(record)
        slots = []
        for *numbers, is_at_death in fields["slots"]:
            index, step, attempt, layout, digest, sequence = map(_whole, numbers)
            slots.append(KeptSlot(index, step, attempt, layout, digest, sequence, bool(is_at_death)))
        check, small = fields["check"], frozenset(map(_whole, fields["small"]))
        for name in ("attempt", "ended", "mode", "restored", "answer"):
            fields[name] = None if fields[name] is None else _whole(fields[name])
        pair = None if check is None else (_whole(check[0]), _whole(check[1]))
        return Holding(**{**fields, "slots": tuple(slots), "small": small, "check": pair})

    def slot_of(self, step: int) -> KeptSlot | None:
        """Return the latest copy of a step."""
        found = [slot for slot in self.slots if slot.step == step]
        return max(found, key=lambda slot: slot.sequence, default=None)

    def has_small(self, step: int) -> bool:
        """Return true if the small state of a step is in the ring or, with the large one, in a slot."""
        return step in self.small or self.slot_of(step) is not None


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r:.40} is no word of a file")
    return value


class Choice(Value):
    """Step from which the next attempt goes on.

    Args:
        step: ``None`` if nothing is kept.
        sources: rank and slot from which each rank takes its large state, by rank.
        behind: ranks without the small state of that step.
        kept_by: ranks that have a copy of that step.
        ranks: number of ranks of the attempt that ended.
        lost: steps that had ended after ``step``. If nothing is kept, their number is unknown, and this is 0.
        is_replicated: true if any rank's copy serves all ranks.
        why: why nothing or nothing newer is kept; empty if nothing is missing, or if no rank uses ``Keep``.
    """

    step: int | None = None
    sources: Mapping[int, tuple[int, int]] = fresh(factory=dict)
    behind: tuple[int, ...] = ()
    kept_by: tuple[int, ...] = ()
    _: KW_ONLY
    ranks: int = 0
    lost: int = 0
    is_at_death: bool = False
    is_replicated: bool = False
    why: str = ""

    @property
    def is_exact(self) -> bool:
        return not self.behind

    def shown(self) -> dict[str, object]:
        """Return the facts for the status page and for events."""
        return {
            "step": self.step,
            "lost": self.lost,
            "exact": self.is_exact,
            "kept_by": [*self.kept_by],
            "ranks": self.ranks,
            "at_death": self.is_at_death,
            "why": self.why or None,
        }

    def line(self) -> str:
        """Describe this choice after ``attempt 1 is running,``."""
        if self.step is None:
            return f"continues from no kept step{self._reason}"
        return f"continues at step {self.step}, kept{' at death' * self.is_at_death} {self._by_whom}"

    def at_end(self) -> str:
        """Describe this choice in the report of a job that has failed."""
        if self.step is None:
            return f"kept: no step{self._reason}"
        return f"kept: step {self.step}, {self._by_whom}; it has ended with the job"

    @property
    def _reason(self) -> str:
        return f" ({self.why})" if self.why else ""

    @property
    def _by_whom(self) -> str:
        lost = f"{self.lost} step{'s' if self.lost != 1 else ''} lost"
        whose = "its" if len(self.behind) == 1 else "their"
        lacks = f", {phrases.ranks_text(self.behind, 4)} without {whose} small state" if self.behind else ""
        return f"by {len(self.kept_by)} of {self.ranks} ranks, {lost}{lacks}{self._reason}"


def choose(
    holdings: Mapping[int, Holding],
    world: int,
    *,
    barred_from: int | None = None,
    was_replicated: bool = False,
) -> Choice:
    """Choose the step from which the next attempt goes on.

    Args:
        holdings: what the ranks of the attempt that ended have kept, by global rank.
        world: number of ranks of the next attempt.
        barred_from: first step that must not be chosen, because of LOOP-1.
        was_replicated: true if the state was replicated in an earlier attempt of this job.
    """
    ranks, found = len(holdings), _current(holdings)
    is_replicated = _is_replicated(holdings, was_replicated)
    is_used = any(holding.has_joined or holding.slots for holding in holdings.values())
    ended = max((each.ended for each in holdings.values() if each.ended is not None), default=None)
    steps = sorted({slot.step for holding in found.values() for slot in holding.slots}, reverse=True)
    allowed = [step for step in steps if barred_from is None or step < barred_from]
    best: Choice | None = None
    refused = ""
    for step in allowed:
        sources, why = _sources(found, world, step, is_replicated=is_replicated)
        if sources is None:
            refused = refused or why
            continue
        behind = tuple(rank for rank in range(world) if rank not in found or not found[rank].has_small(step))
        if best is not None and behind:
            continue
        if best is not None:
            refused = (
                refused or f"{phrases.ranks_text(best.behind, 4)} had no small state of step {best.step}"
            )
        kept = {rank: slot for rank in found if (slot := found[rank].slot_of(step)) is not None}
        best = Choice(
            step,
            sources,
            behind,
            tuple(sorted(kept)),
            ranks=ranks,
            lost=max(0, (step if ended is None else ended) - step),
            is_at_death=any(slot.is_at_death for slot in kept.values()),
            is_replicated=is_replicated,
        )
        if not behind:
            break
    if best is None:
        why = refused or ("no rank had kept its state yet" if is_used else "")
        best = Choice(ranks=ranks, is_replicated=is_replicated)
    else:
        why = refused or (_why_not_newer(holdings, ended) if best.lost and ended is not None else "")
    if len(allowed) < len(steps):
        why = f"steps from {barred_from} on are set aside: two attempts that went on from there failed alike"
    return best.replaced(why=why)


def _current(holdings: Mapping[int, Holding]) -> dict[int, Holding]:
    """Leave out copies of an abandoned attempt: those of an earlier attempt, if a later one ended a step
    without having gone on from that copy's step or a later one.
    """
    last = [each for each in holdings.values() if each.has_joined and each.ended is not None]
    if not last:
        return dict(sorted(holdings.items()))
    attempt = max(each.attempt for each in last)
    base = min(-1 if each.restored is None else each.restored for each in last)
    return {
        rank: holding.replaced(
            slots=tuple(slot for slot in holding.slots if slot.attempt >= attempt or slot.step <= base)
        )
        for rank, holding in sorted(holdings.items())
    }


def _is_replicated(holdings: Mapping[int, Holding], was_replicated: bool) -> bool:
    joined = [each for each in holdings.values() if each.has_joined]
    checks = [each.check for each in joined if each.check is not None]
    if any(each.mode == Mode.SHARDED for each in joined):
        return False
    if len(joined) == len(holdings) and all(each.mode == Mode.REPLICATED for each in joined):
        return True
    if len(set(checks)) > len({step for step, _ in checks}):
        return False  # The digests of the same step differ.
    digests: dict[tuple[int, int], set[int]] = {}
    for slot in (slot for each in holdings.values() for slot in each.slots):
        digests.setdefault((slot.attempt, slot.step), set()).add(slot.digest)
    if any(len(each) > 1 for each in digests.values()):
        return False  # The ranks exchange their states, but not in each step.
    is_checked = len(checks) == len(holdings) and len(set(checks)) == 1
    return is_checked or was_replicated


def _sources(
    found: Mapping[int, Holding], world: int, step: int, *, is_replicated: bool
) -> tuple[dict[int, tuple[int, int]] | None, str]:
    """Return the rank and slot from which each rank takes a step's large state; ``None`` and why, if one
    lacks it.
    """
    kept = {rank: slot for rank in found if (slot := found[rank].slot_of(step)) is not None}
    if is_replicated and len({slot.layout for slot in kept.values()}) > 1:
        return None, f"the copies of step {step} have different tensors"
    modes = {each.mode for each in found.values() if each.has_joined}
    is_declared = modes == {Mode.REPLICATED}
    if is_replicated and (is_declared or len({slot.digest for slot in kept.values()}) == 1):
        holders = sorted(kept)
        takes = {rank: rank if rank in kept else holders[rank % len(holders)] for rank in range(world)}
        return {rank: (holder, kept[holder].index) for rank, holder in takes.items()}, ""
    if world != len(found):
        of = "belongs to single ranks, or is not known to be equal on all of them"
        return None, f"{len(found)} ranks kept step {step}, now there are {world}, and the state {of}"
    if lacking := [rank for rank in range(world) if rank not in kept]:
        return None, f"{phrases.ranks_text(lacking, 4)} had no copy of step {step}"
    return {rank: (rank, slot.index) for rank, slot in kept.items()}, ""


def _why_not_newer(holdings: Mapping[int, Holding], ended: int) -> str:
    """Return why no rank has a copy of the last step that ended."""
    said: dict[str, list[int]] = {}
    for rank, holding in sorted(holdings.items()):
        if holding.answer in _ANSWERS:
            said.setdefault(_ANSWERS[holding.answer], []).append(rank)
    if not said:
        return f"no rank had copied step {ended}"
    reasons = (f"{phrases.ranks_text(ranks, 4)}: {reason}" for reason, ranks in said.items())
    return f"step {ended} was not copied; {'; '.join(reasons)}"


class Loop(Value):
    """Whether restored states fail again and again (LOOP-1).

    Args:
        barred_from: first step that is set aside; ``None`` if none is.
        began: step from which the last attempt went on, if that attempt failed soon.
        cause: kind and place of that failure.
    """

    barred_from: int | None = None
    began: int | None = None
    cause: tuple[str, str] | None = None

    def after(self, began: int | None, reached: int | None, cause: tuple[str, str] | None) -> Loop:
        """Return the state after an attempt that has failed. It went on from the kept step ``began``, and
        ``reached`` is the last step that it ended; ``None`` for none. ``cause`` is ``None`` if it cannot be
        compared with others.
        """
        barred = self.barred_from
        if barred is not None and reached is not None and reached >= barred + NEAR:
            barred = None
        if began is None or cause is None or (reached is not None and reached >= began + NEAR):
            return Loop(barred)
        if self.began is None or self.cause != cause:
            return Loop(barred, began, cause)
        first = min(self.began, began)
        return Loop(first if barred is None else min(first, barred))


def failed_soon(holdings: Sequence[Holding], step: int | None) -> tuple[int | None, int | None]:
    """Return the step from which the attempt went on, and the last step that ended; ``None`` for none."""
    began = step if any(each.has_joined and each.restored == step for each in holdings) else None
    return began, max((each.ended for each in holdings if each.ended is not None), default=None)
