"""Chooses the training step that all ranks restore in the next attempt. Contains only pure functions.

During an attempt, each rank writes into a file in its agent's memory (:mod:`.layout`): copies of its
parameters and its optimizer's state (the *large* state; each copy is in a region of the file, a *slot*), and
records of its random numbers, its data loader and the script's own values (the *small* state). After the
attempt, the agent reads which steps each file contains (a rank's *holding*).

- **CHOOSE-1** For the chosen step, each rank can get its large state: from its own copy, from that of any
  rank if the state is replicated (equal on all ranks), or from that of a rank with the same part of it.
- **CHOOSE-2** Among the steps that fulfil CHOOSE-1, the newest one for which each rank also has its small
  state is chosen. If there is no such step, the newest of them is chosen, and ``behind`` names the ranks that
  lack their small state.
- **CHOOSE-3** A copy is never chosen if a later attempt has gone on from an older step; see :func:`_current`.
- **LOOP-2** If a rank cannot load its copy of the chosen step, the attempt fails. The next attempt restores
  an older step, or tries the same one again if there is no older one. If a rank cannot load the state in this
  attempt either, no step is chosen any more.
- **LOOP-1** If two attempts in a row restore a step and fail within a few steps for the same cause, the
  restored step and all later ones are not chosen again, until an attempt has got :data:`NEAR` steps past it.
"""

from __future__ import annotations

from elasticrs._engine.inside.keep.layout import Answer, Mode, Why
from elasticrs._engine.job import phrases
from elasticrs._engine.job.value import Value, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from dataclasses import KW_ONLY
    from typing import Any

NEAR = 20
"""Number of steps. If an attempt fails within so many steps, the state that it restored may be why."""

_MAX_WHY = 1000

_ANSWERS = {
    Answer.CHANGING: "the optimizer was changing the state",
    Answer.NOTHING: "the state could not be copied at that time",
    Answer.NO_MEMORY: "memory was short",
    Answer.TENSOR_CHANGED: "a tensor changed during the copy",
    Answer.FAILED: "the copy failed",
    Answer.KILLED: "the process that made the copy was killed",
    Answer.APART: "not all ranks had restored their state",
}


class KeptSlot(Value):
    """Complete copy of a rank's parameters and optimizer state, in the slot with the number ``index``."""

    index: int
    step: int
    attempt: int = 0
    layout: int = 0
    digest: int = 0
    sequence: int = 0
    why_copied: int = Why.PERIODIC
    """Reason for the copy: a code of :class:`.Why`."""


class Holding(Value):
    """What the file of a rank contained when an attempt had ended: which training steps the rank had copied
    into it, and what else the rank had noted there.

    Args:
        slots: the complete copies of the rank's parameters and optimizer state.
        small: steps for which the file has a complete record of the rank's random numbers and the like.
        has_joined: true if the rank's program used ``Keep`` in this attempt. If false, only ``slots``,
            ``small`` and ``twins`` are set.
        attempt: number of this attempt, as the rank has stored it.
        ended: last training step that the rank completed.
        mode: a code of :class:`.Mode`: whether the program says that all ranks have the same state.
        check: step and checksum of a copy. If all ranks have the same ones, their states are taken as equal.
        restored: step that the rank restored at the start of this attempt.
        answer: a code of :class:`.Answer`: the rank's answer when the agent ordered it to copy its state.
        off: why the rank stopped copying its state, or could not load the step ``refused``; otherwise empty.
        changes: number of times that an optimizer changed the state before the rank completed its first step.
        refused: step that the rank could not load at the start of this attempt; ``None`` if it could.
        damaged: newest step of which the file had a damaged copy, which a rank has deleted; ``None`` without.
        twins: which ranks have the same part of a sharded state as this rank, such as the replicas of HSDP:
            the first of them, the distance from each to the next, and their number. ``None`` if no other rank
            has the same part.
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
    off: str = ""
    changes: int = 0
    refused: int | None = None
    damaged: int | None = None
    twins: tuple[int, int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        slots = [slot.values() for slot in self.slots]
        return {**self.fields(), "slots": slots, "small": sorted(self.small)}

    @staticmethod
    def of_json(record: Any) -> Holding:
        """Return the object of which another agent has written :meth:`to_json`. Raises ``ValueError`` or
        ``TypeError``.
        """
        fields: dict[str, Any] = dict(record)
        slots = []
        for index, step, attempt, layout, digest, sequence, why in fields["slots"]:
            slots.append(KeptSlot(*map(_whole, (index, step, attempt, layout, digest, sequence, why))))
        check, small = fields["check"], frozenset(map(_whole, fields["small"]))
        fields["off"] = str(fields["off"])
        for name in ("attempt", "ended", "mode", "restored", "answer", "changes", "refused", "damaged"):
            fields[name] = None if fields[name] is None else _whole(fields[name])
        if fields["twins"] is not None:
            first, stride, count = map(_whole, fields["twins"])
            fields["twins"] = first, stride, count
        pair = None if check is None else (_whole(check[0]), _whole(check[1]))
        return Holding(**{**fields, "slots": tuple(slots), "small": small, "check": pair})

    def slot_of(self, step: int) -> KeptSlot | None:
        """Return the rank's latest copy of a step; ``None`` if it has none."""
        found = [slot for slot in self.slots if slot.step == step]
        return max(found, key=lambda slot: slot.sequence, default=None)

    def has_same_part(self, rank: int) -> bool:
        """Return true if ``rank`` has the same part of a sharded state as the rank that wrote this file."""
        first, stride, count = self.twins or (0, 0, 0)
        return stride > 0 and 0 <= rank - first < stride * count and (rank - first) % stride == 0

    def has_small(self, step: int) -> bool:
        """Return true if the file has the rank's random numbers and data loader position at this step."""
        return step in self.small or self.slot_of(step) is not None


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r:.40} is no word of a file")
    return value


class Choice(Value):
    """The training step that all ranks restore in the next attempt.

    Args:
        step: number of the step; ``None`` if no step can be restored.
        sources: for each rank, where the copy is that it restores: the rank that made the copy, the number of
            the slot (region) in that rank's file, and the sequence number of the copy.
        behind: ranks that have not recorded their random numbers and the like at the end of this step.
        kept_by: ranks that have a copy of this step.
        ranks: number of ranks of the attempt that has ended.
        lost: number of completed steps after ``step``, which have to be trained again. 0 if ``step`` is
            ``None``, because their number is then unknown.
        why_copied: why the ranks copied this step, such as a failure or a stop: a code of :class:`.Why`.
        is_replicated: true if all ranks have the same state, so that any rank's copy serves all of them.
        why: why no step, or no newer one, can be restored. Empty if no step is lost or no rank uses ``Keep``.
        fallback: newest step before ``step`` of which each rank has made a copy; ``None`` if there is none.
            It is for the case that the state of ``step`` makes the training fail (LOOP-1).
        readable: step that ``Keep.reader`` can load, if ``step`` is ``None``; ``None`` if there is none.
        folder: folder on a disk in which this step is saved; empty if it is in memory only.
        has_folder: true if the job has the option ``--keep-save``, also if nothing could be saved there.
    """

    step: int | None = None
    sources: Mapping[int, tuple[int, int, int]] = fresh(factory=dict)
    behind: tuple[int, ...] = ()
    kept_by: tuple[int, ...] = ()
    _: KW_ONLY
    ranks: int = 0
    lost: int = 0
    why_copied: int = Why.PERIODIC
    is_replicated: bool = False
    why: str = ""
    fallback: int | None = None
    readable: int | None = None
    folder: str = ""
    has_folder: bool = False

    def copies(self, places: Mapping[int, str]) -> list[tuple[str, int, int]]:
        """Return the locations of the copies that together contain the whole training state: the copies of
        all ranks, or of one rank if all ranks have the same state. A location is a file, slot and sequence
        number. ``places`` maps ranks to files.
        """
        holders = [self.sources[rank] for rank in sorted(self.sources)]
        return [
            (places[rank], slot, sequence)
            for rank, slot, sequence in holders[: 1 if self.is_replicated else None]
        ]

    def plan_of(self, rank: int, places: Mapping[int, str]) -> dict[str, Any]:
        """Return the file and the slot of the copy that ``rank`` restores. The worker finds them in its plan.
        ``places`` has the file of each rank.
        """
        holder, slot, sequence = self.sources.get(rank) or self.sources[min(self.sources)]
        return {"file": places[holder], "slot": slot, "rank": holder, "sequence": sequence}

    def facts(self) -> dict[str, Any]:
        """Return those fields of this choice that the agent writes into the plan for its workers."""
        return {
            "step": self.step,
            "exact": self.is_exact,
            "behind": list(self.behind),
            "why": self.why,
            "kept_by": list(self.kept_by),
            "ranks": self.ranks,
            "at_death": self.why_copied,
            "lost": self.lost,
            "fallback": self.fallback,
            "readable": self.readable,
        }

    @staticmethod
    def of_facts(facts: Mapping[str, Any]) -> Choice:
        """Convert what a worker has written as the result of :meth:`facts` to a choice without ``sources``.
        Raises ``ValueError``, ``TypeError`` or ``KeyError`` if the worker has written something else.
        """
        numbers = facts["step"], facts["fallback"], facts["readable"]
        step, fallback, readable = (None if each is None else _whole(each) for each in numbers)
        return Choice(
            step,
            fallback=fallback,
            readable=readable,
            behind=tuple(map(_whole, facts["behind"])),
            kept_by=tuple(map(_whole, facts["kept_by"])),
            ranks=_whole(facts["ranks"]),
            lost=_whole(facts["lost"]),
            why_copied=_whole(facts["at_death"]),
            why=phrases.printable(str(facts["why"]), _MAX_WHY),
        )

    @property
    def is_exact(self) -> bool:
        return not self.behind

    def shown(self) -> dict[str, object]:
        """Return what the status page and events show about this choice."""
        return {
            "step": self.step,
            "lost": None if self.step is None else self.lost,
            "exact": self.is_exact,
            "kept_by": [*self.kept_by],
            "ranks": self.ranks,
            "at_death": bool(self.why_copied),
            "why": self.why or None,
        }

    def line(self) -> str:
        """Return a line about this choice. A worker may still refuse to restore it."""
        if self.step is None and self.readable is not None:
            return f"keep: the job can load step {self.readable} with keep.reader(){self._reason}"
        if self.step is None:
            return f"keep: the job continues without kept state{self._reason}"
        return f"keep: the job can continue at {self.described(self.folder)}"

    def at_end(self) -> str:
        """Describe this choice in the report of a job that has failed."""
        if self.step is None:
            return f"no state is kept{self._reason}"
        gone = phrases.gone_with_the_job(has_folder=self.has_folder)
        where = f"is saved in {self.folder}" if self.folder else gone
        return f"the kept state ({self.described()}) {where}"

    @property
    def _reason(self) -> str:
        return f" ({self.why})" if self.why else ""

    def described(self, folder: str = "") -> str:
        """Describe the chosen step for the user. If ``folder`` is not empty, say that the step is saved
        there.
        """
        when = {Why.AT_DEATH: " at the failure", Why.AT_STOP: " at the stop"}.get(self.why_copied, "")
        saved = f" and saved in {folder}" if folder else ""
        text = f"step {self.step}, copied{when} by {len(self.kept_by)} of {self.ranks} ranks{saved}"
        text += f", {phrases.counted(self.lost, 'step')} lost"
        if self.behind:
            verb = "draws" if len(self.behind) == 1 else "draw"
            text += f", {phrases.ranks_text(self.behind, 4)} {verb} new random numbers"
        return f"{text} ({self.why})" if self.why else text


def choose(
    holdings: Mapping[int, Holding],
    world: int,
    *,
    barred_from: int | None = None,
    refused: int | None = None,
    was_replicated: bool = False,
    before: tuple[int, int] | None = None,
    ranks: int = 0,
) -> Choice:
    """Choose the training step that all ranks restore in the next attempt.

    Args:
        holdings: what the file of each rank contains after the attempt that has ended, by global rank.
        world: number of ranks of the next attempt.
        barred_from: this step and all later ones must not be chosen, because attempts that restored it have
            failed (LOOP-1, LOOP-2). ``None`` to allow all steps.
        refused: step that a rank could not load. It is chosen only if there is no older one (LOOP-2).
        was_replicated: true if all ranks had the same state in an earlier attempt of this job.
        before: the result of :func:`last_step` after the earlier attempts. The steps that this choice loses
            are counted from there if no rank got to a step in the attempt that has ended.
        ranks: number of ranks of the attempt that has ended, which may be more than are in ``holdings``.
    """
    if refused is not None:
        bar = min(refused, refused if barred_from is None else barred_from)
        older = choose(
            holdings, world, barred_from=bar, was_replicated=was_replicated, before=before, ranks=ranks
        )
        if older.step is not None:
            return older.replaced(why=_why_refused(holdings) or f"a rank could not load step {refused}")
    ranks, found = max(ranks, len(holdings)), _current(holdings)
    are_equal = is_replicated(holdings, was_replicated)
    is_used = any(holding.has_joined or holding.slots for holding in holdings.values())
    ended = max((each.ended for each in holdings.values() if each.ended is not None), default=None)
    last = last_step(holdings.values(), before)
    steps = sorted({slot.step for holding in found.values() for slot in holding.slots}, reverse=True)
    allowed = [step for step in steps if barred_from is None or step < barred_from]
    is_common = {
        step: all(rank in found and found[rank].slot_of(step) is not None for rank in range(world))
        for step in allowed
    }
    best: Choice | None = None
    why_not = ""
    for step in allowed:
        sources, why = _sources(found, world, ranks, step, is_replicated=are_equal)
        if sources is None:
            why_not = why_not or why
            continue
        behind = tuple(rank for rank in range(world) if rank not in found or not found[rank].has_small(step))
        if best is not None and behind:
            continue
        if best is not None:
            why_not = (
                why_not or f"{phrases.ranks_text(best.behind, 4)} had no random numbers of step {best.step}"
            )
        kept = {rank: slot for rank in found if (slot := found[rank].slot_of(step)) is not None}
        best = Choice(
            step,
            sources,
            behind,
            tuple(sorted(kept)),
            ranks=ranks,
            lost=max(0, (step if last is None else last[1]) - step),
            why_copied=max(slot.why_copied for slot in kept.values()),
            is_replicated=are_equal,
            fallback=next((each for each in allowed if each < step and is_common[each]), None),
        )
        if not behind:
            break
    if best is None:
        why = _why_damaged(holdings) or why_not or (_why_nothing(holdings, ended) if is_used else "")
        best = Choice(ranks=ranks, is_replicated=are_equal)
    else:
        why = (_why_damaged(holdings, best.step) if best.lost else "") or why_not
        why = why or (_why_not_newer(holdings, last[1]) if best.lost and last is not None else "")
    if len(allowed) < len(steps):
        why = f"steps from {barred_from} on are set aside: two attempts that went on from there failed alike"
        if not barred_from:
            why = "the kept state could not be loaded in two attempts"
    return best.replaced(why=why)


def _current(holdings: Mapping[int, Holding]) -> dict[int, Holding]:
    """Return ``holdings`` without the copies from abandoned attempts. Suppose that an attempt copied step 30,
    and that the next attempt restored step 20 and trained on. Then the copy of step 30 is from an abandoned
    attempt: the new step 30 has other contents.
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


def is_replicated(holdings: Mapping[int, Holding], was_replicated: bool) -> bool:
    """Return true if all ranks are known to have the same state, from this attempt or an earlier one."""
    joined = [each for each in holdings.values() if each.has_joined]
    checks = [each.check for each in joined if each.check is not None]
    if any(each.mode == Mode.SHARDED for each in joined):
        return False
    if joined and len(joined) == len(holdings) and all(each.mode == Mode.REPLICATED for each in joined):
        return True
    if len(set(checks)) > len({step for step, _ in checks}):
        return False  # The checksums of copies of the same step differ.
    digests: dict[tuple[int, int], set[int]] = {}
    for slot in (slot for each in holdings.values() for slot in each.slots):
        digests.setdefault((slot.attempt, slot.step), set()).add(slot.digest)
    if any(len(each) > 1 for each in digests.values()):
        return False  # The states of the ranks are equal at some steps, but not at all steps.
    is_checked = len(checks) == len(holdings) and len(set(checks)) == 1
    return is_checked or was_replicated


def _sources(
    found: Mapping[int, Holding], world: int, ranks: int, step: int, *, is_replicated: bool
) -> tuple[dict[int, tuple[int, int, int]] | None, str]:
    """Return :attr:`Choice.sources` for this step; ``None`` and the reason if it cannot be restored."""
    kept = {rank: slot for rank in found if (slot := found[rank].slot_of(step)) is not None}
    if is_replicated and len({slot.layout for slot in kept.values()}) > 1:
        return None, f"the copies of step {step} have different tensors"
    modes = {each.mode for each in found.values() if each.has_joined}
    is_declared = modes == {Mode.REPLICATED}
    if is_replicated and (is_declared or len({slot.digest for slot in kept.values()}) == 1):
        holders = sorted(kept)
        takes = {rank: rank if rank in kept else holders[rank % len(holders)] for rank in range(world)}
        return {rank: _place(holder, kept[holder]) for rank, holder in takes.items()}, ""
    takes = {rank: rank for rank in kept}
    for rank in range(world):
        holders = [each for each in kept if rank not in kept and found[each].has_same_part(rank)]
        # Ranks with the same part must have equal copies. If the copies differ, do not use them here.
        if len({(kept[each].attempt, kept[each].layout, kept[each].digest) for each in holders}) == 1:
            takes[rank] = holders[0]
    # If the number of ranks has changed, each rank has another part of the state than before, so do not
    # restore the old parts. If several ranks had each part, as with HSDP, a rank may still have the same
    # part: when it restores, it compares the position of its part in the whole state.
    is_same_part = world == ranks or all(found[each].twins is not None for each in takes.values())
    if takes.keys() == set(range(world)) >= found.keys() and is_same_part:
        return {rank: _place(takes[rank], kept[takes[rank]]) for rank in range(world)}, ""
    if world != ranks:
        part = "each rank may have kept only a part of the state"
        return None, f"{ranks} ranks kept step {step}, now there are {world}, and {part}"
    lacking = [rank for rank in range(world) if rank not in takes]
    return None, f"{phrases.ranks_text(lacking, 4)} had no copy of step {step}"


def _place(holder: int, slot: KeptSlot) -> tuple[int, int, int]:
    return holder, slot.index, slot.sequence


def _why_damaged(holdings: Mapping[int, Holding], step: int | None = None) -> str:
    """Return which ranks had damaged copies of steps after ``step``; an empty text if none had."""
    ranks = [
        rank
        for rank, each in sorted(holdings.items())
        if each.damaged is not None and (step is None or each.damaged > step)
    ]
    newer = "" if step is None else "newer "
    return f"{newer}copies of {phrases.ranks_text(ranks, 4)} were damaged" if ranks else ""


def _why_not_newer(holdings: Mapping[int, Holding], ended: int) -> str:
    """Return the reason why no rank has a copy of ``ended``, the last step that a rank got to."""
    reasons = _by_reason({rank: each.off or _ANSWERS.get(each.answer, "") for rank, each in holdings.items()})
    return f"step {ended} was not copied{': ' * bool(reasons)}{reasons}"


def _why_nothing(holdings: Mapping[int, Holding], ended: int | None) -> str:
    """Return the reason why no copy of any step can be restored, although a rank uses ``Keep``."""
    if why := _why_refused(holdings):
        return why
    if ended is not None:
        return _why_not_newer(holdings, ended)
    if reasons := _by_reason({rank: each.off for rank, each in holdings.items()}):
        return f"Keep was off: {reasons}"
    if max(each.changes for each in holdings.values()) > 1:
        return "the script had not called keep.step, although its optimizer had run more than once"
    return "the failure came before the end of the first step"


def _why_refused(holdings: Mapping[int, Holding]) -> str:
    reasons = _by_reason({rank: each.off for rank, each in holdings.items() if each.refused is not None})
    return reasons and f"the kept state could not be loaded: {reasons}"


def _by_reason(reasons: Mapping[int, str]) -> str:
    said: dict[str, list[int]] = {}
    for rank, reason in sorted(reasons.items()):
        if reason:
            said.setdefault(reason, []).append(rank)
    return "; ".join(f"{reason} ({phrases.ranks_text(ranks, 4)})" for reason, ranks in said.items())


class Loop(Value):
    """What is known of earlier attempts that failed soon after they had restored a state (LOOP-1), or in
    which a rank could not load it (LOOP-2).

    Args:
        barred_from: this step and all later ones must not be restored; ``None`` if all steps are allowed.
        began: step that the last attempt restored, if it failed soon afterwards; otherwise ``None``.
        cause: kind and place of the failure of that attempt.
        refused: step that a rank could not load at the start of the last attempt; ``None`` without one.
    """

    barred_from: int | None = None
    began: int | None = None
    cause: tuple[str, str] | None = None
    refused: int | None = None

    def after(
        self,
        began: int | None,
        reached: int | None,
        cause: tuple[str, str] | None,
        refused: int | None = None,
    ) -> Loop:
        """Return a new object that also takes into account an attempt that has just failed.

        Args:
            began: step that this attempt restored; ``None`` if it restored none.
            reached: last step that this attempt completed; ``None`` if it completed none.
            cause: kind and place of this attempt's failure; ``None`` if it cannot be compared with other
                failures.
            refused: step that a rank could not load, which made this attempt fail; ``None`` without one.
        """
        barred = self.barred_from
        if refused is not None:
            return Loop(barred, refused=refused) if self.refused is None else Loop(barred_from=0)
        if barred is not None and reached is not None and reached >= barred + NEAR:
            barred = None
        if began is None or cause is None or (reached is not None and reached >= began + NEAR):
            return Loop(barred)
        if self.began is None or self.cause != cause:
            return Loop(barred, began, cause)
        first = min(self.began, began)
        return Loop(first if barred is None else min(first, barred))


def why_other(step: int | None, other: int | None) -> str:
    """Return why the state of ``step`` is not restored from memory, if the program itself has a state of a
    newer step ``other``, for example in a checkpoint on a disk. If ``other`` is not newer, return an empty
    text, because the state in memory is restored.
    """
    if step is None or other is None or other <= step:
        return ""
    return f"step {step} is not restored from memory, because the script has the newer step {other}"


def refused_of(holdings: Sequence[Holding]) -> int | None:
    """Return the step that a rank could not load, which made the attempt fail; ``None`` if there is none."""
    return next((each.refused for each in holdings if each.refused is not None and each.ended is None), None)


def last_step(holdings: Iterable[Holding], before: tuple[int, int] | None = None) -> tuple[int, int] | None:
    """Return the latest attempt in which a rank restored or completed a step, and the newest such step. If
    there is none in ``holdings``, return ``before``, the result after the earlier attempts.
    """
    found = [
        (each.attempt, step)
        for each in holdings
        if each.has_joined
        for step in (each.ended, each.restored)
        if step is not None
    ]
    return max([*found, *filter(None, [before])], default=None)


def failed_soon(holdings: Sequence[Holding], step: int | None) -> tuple[int | None, int | None]:
    """Return the step that the attempt restored, and the last step that it completed; ``None`` for none."""
    began = step if any(each.has_joined and each.restored == step for each in holdings) else None
    return began, max((each.ended for each in holdings if each.ended is not None), default=None)
