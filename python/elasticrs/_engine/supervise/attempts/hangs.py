"""Describes workers that missed their heartbeat deadline, in messages to the user.

Imported only after a worker hung, or at the end of a job whose workers sent heartbeats.
"""

from __future__ import annotations

import time
from itertools import islice

from elasticrs._engine.failures.files import OWN_THREAD
from elasticrs._engine.hangs.stacks import MAX_TEXT, frame_of, short, threads
from elasticrs._engine.job.phrases import how_it_ended, printable, ranks_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticrs._core import Heartbeat, RankSeen, WorkerExited, WorkerHung
    from elasticrs._engine.hangs.values import Diagnosis, Frame

MAX_FRAMES = 12
MAX_FRAMES_OF_OTHERS = 4
MAX_STACKS = 4
"""Maximum number of distinct stacks of candidates in a report."""
_EARLIER = 0.01
"""Seconds by which a worker must have stopped before the others, so that the report mentions it."""
_STATES = {"T": "it is stopped by a signal", "t": "a debugger has stopped it", "D": "it waits for a device"}


def hung(
    event: WorkerHung,
    ranks: Mapping[int, int],
    diagnosis: Diagnosis | None = None,
    *,
    was_found_here: bool = True,
    local_rank: int | None = None,
    exited: WorkerExited | None = None,
) -> str:
    """Describe which worker hung, since when, and what the other workers did meanwhile.

    ``local_rank`` is the worker to describe, by default that of the event. ``ranks`` are global ranks, by
    local rank. ``was_found_here`` is false if only a worker of another node exceeded a time limit.
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
    """Describe a worker that made a collective of other workers fail. The collective failed at ``at_ns``
    (monotonic).
    """
    summary = "" if diagnosis is None else diagnosis.summary
    how = "made a collective of the others fail"
    if exited is not None and exited.seen_ns <= at_ns:
        how = _left_early(exited) if (exited.exitcode or 0) >= 0 else how_it_ended(exited.exitcode)
    return "; ".join(filter(None, (how, summary)))


def _left_early(exited: WorkerExited) -> str:
    age_ns = time.monotonic_ns() - exited.seen_ns
    at = time.strftime("%H:%M:%S", time.localtime((time.time_ns() - age_ns) / 1e9))
    return f"exited with code {exited.exitcode} at {at}, while others still waited for it"


def _missed(event: WorkerHung, own: RankSeen | None, was_found_here: bool) -> str:
    beat = own.heartbeat if own is not None else None
    section = printable(beat.section) if beat is not None and beat.section else ""
    what = {
        "startup": "no activity since its start",
        "step": "no heartbeat",
        "section": f"its section '{section}' has been open",
        "exit": "its program had returned, but it had not exited",
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
        others = ", but a rank on another node is waiting"
    elif silent < event.limit:
        # This worker counts as hung although its own time limit has not passed, because other ranks wait for
        # it.
        others = ", but the limit of another rank has passed"
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
    at = step_text(step, is_automatic=own.heartbeat.is_automatic)
    return ", ".join(filter(None, (f"stopped at {at}", is_earlier, is_behind)))


def step_text(step: int, *, is_automatic: bool) -> str:
    """Format the number of a training step. With ``is_automatic``, this library counted optimizer steps, so
    the count has restarted at 0 in this attempt.
    """
    return f"optimizer step {step:,} of this attempt" if is_automatic else f"step {step:,}"


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
    """Shorten a line of a stack written by ``faulthandler``, for example to ``all_reduce
    (distributed_c10d.py:2501)``.
    """
    parsed = frame_of(frame)
    return printable(frame) if parsed is None else short(parsed)


def heartbeat_notes(beats: Iterable[Heartbeat], end_ns: int, ranks: Mapping[int, int]) -> list[str]:
    """Describe the last heartbeats before the failure at ``end_ns`` (monotonic), slowest ranks first."""
    groups: dict[tuple[int | None, str | None, bool], list[Heartbeat]] = {}
    for beat in beats:
        groups.setdefault((beat.step, beat.section, beat.is_automatic), []).append(beat)
    notes = []
    in_order = sorted(groups, key=lambda key: (key[0] or 0, min(beat.at_ns for beat in groups[key])))
    for key in in_order:
        (step, section, is_automatic), group = key, groups[key]
        ages = sorted(max(0.0, (end_ns - beat.at_ns) / 1e9) for beat in group)
        oldest, newest = seconds(ages[-1]), seconds(ages[0])
        span = oldest if oldest == newest else f"{newest} to {oldest}"
        where = "" if step is None else f" in {step_text(step, is_automatic=is_automatic)}"
        where += f" in section '{printable(section)}'" if section else ""
        who = ranks_text(sorted(ranks[beat.local_rank] for beat in group))
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
