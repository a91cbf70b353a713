"""Restores the copy of the training state that the agent has chosen for this attempt of the workers."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import torch

from elasticrs._engine.inside.keep import layout, state, trees
from elasticrs._engine.inside.keep.copier import digest_of
from elasticrs._engine.inside.keep.file import KeepFile, OffError
from elasticrs._engine.inside.keep.layout import Head, Slot
from elasticrs._engine.job import phrases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from elasticrs._engine.inside.keep.state import Collector
    from elasticrs._engine.inside.keep.trees import Path


class DamagedError(Exception):
    """The copy of the training state that the agent has chosen is damaged, or has been overwritten."""


class DifferentError(Exception):
    """The program's objects do not match the kept state. For example, a layer has another size now."""


class Kept:
    """A copy of a rank's training state, read from the file in which that rank made it.

    Args:
        file: the file.
        number: number of the slot (a region of the file) that has the copy.
        step: the training step that the copy must be of.
        sequence: the number that the copy must have among all copies ever written into the file.

    Raises:
        DamagedError: the copy is damaged, or the slot has another copy or none.
    """

    def __init__(self, file: KeepFile, number: int, step: int, sequence: int) -> None:
        self.step, self.file, self._slot = step, file, file.slots[number]
        if (self._slot.complete_step, self._slot.sequence) != (step, sequence):
            raise DamagedError("the copy has been overwritten")
        try:
            self._map, self._words, index = self._slot.read_only()
            self._parse(index)
        except (ValueError, pickle.UnpicklingError, LookupError) as error:
            raise DamagedError(f"its index is damaged ({error})") from error
        self.why_copied = self._words[Slot.WHY]

    def _parse(self, index: bytes) -> None:
        parts, groups, self.small, common, before = state.split_index(index)
        self.skeletons, self.entries = trees.load(parts)
        self.groups: dict[str, list[dict[str, Any]]] = trees.decode(groups)
        self.common: dict[str, Any] = trees.decode(common)
        """States of the objects, such as schedulers, that are the same on all ranks, by the names of the
        objects in ``Keep``.
        """
        self.step_before = layout.unpack(before[: layout.WORD])[0] if before else self.step - 1
        self.small_before = before[layout.WORD :]
        """Small state (random numbers and the like) of the rank that made the copy, at the end of the
        step before the copy's step; empty if it is not known.
        """

    def _data(self) -> torch.Tensor:
        at, length = self._words[Slot.DATA_AT], self._words[Slot.DATA_LENGTH]
        return torch.frombuffer(self._map, dtype=torch.uint8)[at : at + length]

    def check(self) -> None:
        """Check the data of the copy's tensors against the checksum that was stored with them.

        Raises:
            DamagedError: the data is not what was written.
        """
        if digest_of(self._data()) != self._words[Slot.DIGEST]:
            raise DamagedError("its checksum is wrong")

    def loaded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of :meth:`tensors` with its data."""
        return tensor

    def tensors(self) -> dict[Path, torch.Tensor]:
        """Return the copy's tensors by their paths (the keys that lead to each in the state). They use the
        memory of the file, but their changes do not reach the file.
        """
        data = self._data()
        return {
            path: trees.lay_out(data[offset : offset + size], dtype, shape, strides)
            if size
            else torch.empty(shape, dtype=getattr(torch, dtype))
            for path, dtype, shape, offset, size, strides, _ in self.entries
        }


def drop_damaged(places: Iterable[str]) -> list[int]:
    """Check all copies in some files at once, and delete those that are damaged, so that no attempt tries to
    restore one of them. Return the steps of the deleted copies. ``places`` are files as in
    :class:`.KeepFile`. Ignore files that cannot be opened.
    """

    def dropped(pair: tuple[str, int]) -> list[int]:
        place, number = pair
        try:
            file = KeepFile(place)
        except (OffError, OSError):
            return []
        slot = file.slots[number]
        step, sequence = slot.complete_step, slot.sequence
        if step is None:
            return []
        try:
            Kept(file, number, step, sequence).check()
        except DamagedError:
            if (slot.complete_step, slot.sequence) == (step, sequence):
                slot.drop()
                file.words[Head.DAMAGED] = max(file.words[Head.DAMAGED], step + 1)
                return [step]
        return []

    pairs = [(place, number) for place in set(places) for number in range(layout.SLOTS)]
    # Torch computes the checksums without the GIL.
    with ThreadPoolExecutor() as pool:
        return sorted(step for steps in pool.map(dropped, pairs) for step in steps)


def deleted_text(steps: Sequence[int]) -> str:
    """Tell the user that the copies of these steps were damaged and are deleted."""
    is_one, which = len(steps) == 1, sorted(set(steps))
    copies = f"{len(steps)} damaged cop{'y' if is_one else 'ies'} of step{'s' * (len(which) > 1)}"
    verb = "is" if is_one else "are"
    return f"{copies} {phrases.ranges_text(which, 4)} in the memory of this node {verb} deleted"


def small_state(
    file: KeepFile, kept: Kept, own: int | None, *, is_own: bool = False
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return two values: the small state of this rank (its random numbers and the like) at the training step
    of the copy ``kept``, or ``None`` if this rank has no record of it; and the names of those parts of the
    small state that are probably older than the end of the step.

    If this rank failed before the end of the step, it recorded its small state only in the middle of the
    step, before the optimizer ran, and so lacks later changes. Therefore, a part (such as the state of one
    object) is taken from the rank that made ``kept``, if both ranks had an equal part at the end of the step
    before.

    Args:
        file: the file into which this rank writes its copies and records.
        kept: the copy of parameters and optimizer states that this rank restores. Any rank may have made it.
        own: number of the slot (a region of ``file``) with this rank's own copy of the step; ``None`` if this
            rank has not copied the step.
        is_own: true if this rank has made ``kept``. This copy may be in ``file`` or in another file.

    Raises:
        DamagedError: this rank's own copy of the step is damaged.
    """
    step = kept.step
    of_holder = _decoded(kept.small)
    if is_own or (kept.file is file and own is not None):
        return of_holder, []
    records = file.ring.records()
    if (step, True) in records:
        return _decoded(records[step, True]), []
    if own is not None:
        try:
            _, _, index = file.slots[own].read_only()
            return _decoded(state.split_index(index)[2]), []
        except (ValueError, pickle.UnpicklingError, LookupError) as error:
            raise DamagedError(f"the index of its own copy is damaged ({error})") from error
    if (step, False) not in records:
        return None, []
    mine = _decoded(records[step, False])
    theirs_before = _encoded_parts(kept.small_before)
    before = _encoded_parts(records.get((kept.step_before, True), b""))
    middle = _encoded_parts(records.get((kept.step_before, False), b""))
    stale = []
    for section, parts in mine.items():
        for name in parts:
            part = section, name
            was = before.get(part)
            if was is not None and was == theirs_before.get(part) and name in of_holder[section]:
                parts[name] = of_holder[section][name]
            elif was is not None and was != middle.get(part, was):
                stale.append(trees.spell(name) if isinstance(name, tuple) else str(name))
    return mine, stale


def _encoded_parts(record: bytes) -> dict[tuple[str, Any], bytes]:
    """Return the parts of an encoded small state (random numbers and the like) by section and name. Each part
    is encoded, so that it can be compared with that of another rank.
    """
    if not record:
        return {}
    return {
        (section, name): trees.encode(part)
        for section, parts in _decoded(record).items()
        for name, part in parts.items()
    }


def _decoded(record: bytes) -> dict[str, Any]:
    small: dict[str, Any] = trees.decode(record)
    return small


def apply(collector: Collector, kept: Kept, small: dict[str, Any] | None, values: dict[str, Any]) -> None:
    """Load a copy of the training state into the objects of the program, and its further values into
    ``values``. If an object does not load its state, the objects loaded before it get their old states again.

    ``small`` is this rank's small state (random numbers and the like). Without it, use that of the rank that
    made the copy. Then do not use its random numbers, but seed the generators anew.

    Raises:
        DifferentError: the program's objects do not match the copy.
    """
    used = small or trees.decode(kept.small)
    states, tensors = {**used["objects"], **kept.common}, kept.tensors()
    live = _matched(collector, kept, used, tensors)
    loads = [(name, each, _of_other(name, states, tensors)) for name, each in collector.others.items()]
    loads += [
        (name, each, _of_optimizer(name, each, kept, tensors)) for name, each in collector.optimizers.items()
    ]
    for name, module in collector.modules.items():
        if not state.is_live(module, module.state_dict(keep_vars=True)):
            leaves = {**tensors, **used["volatile"]}
            loads.append((name, module, trees.put_together(kept.skeletons[name], leaves, (name,))))
    done: list[tuple[Any, Any]] = []
    try:
        for name, each, loaded in loads:  # noqa: B007 -- named in the error
            before = each.state_dict()
            each.load_state_dict(loaded)
            done.append((each, before))
    except Exception as error:
        for each, before in reversed(done):
            each.load_state_dict(before)
        raise DifferentError(f"{name} does not load its state: {error!r}") from error
    with torch.no_grad():
        for pair in (each for each in live if _is_view(each[0])):
            pair[0].copy_(pair[1])
        if plain := [each for each in live if not _is_view(each[0])]:
            torch._foreach_copy_([target for target, _ in plain], [source for _, source in plain])
    values.update(used["values"])
    if small is not None:
        state.set_random_state(small["random"])
    else:
        state.renew_random_state(kept.step)


def _matched(
    collector: Collector, kept: Kept, small: dict[str, Any], tensors: Mapping[Path, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of a tensor of the program's modules and the kept tensor that replaces its content. First
    check that the program's objects match the copy.

    Raises:
        DifferentError: objects, tensors or shapes differ from those of the copy.
    """
    skeletons, large, volatile = collector.layout()
    _compare("objects", {*kept.skeletons, *small["objects"], *kept.common}, {*skeletons, *collector.others})
    for name in collector.optimizers:
        kept_class, own_class = (each[name]["class"] for each in (kept.skeletons, skeletons))
        if kept_class != own_class:
            raise DifferentError(f"{name} is of the class {own_class}, and {kept_class} was kept")
        kept_params, params = (
            [len(group) for group in each[name]["params"]] for each in (kept.skeletons, skeletons)
        )
        if kept_params != params:
            raise DifferentError(f"{name} has {params} parameters in its groups, and {kept_params} were kept")
    sources: dict[Path, torch.Tensor] = {**tensors, **small["volatile"]}
    now = {path: each for path, each in (*large, *volatile.items()) if path[0] in collector.modules}
    _compare("tensors", {path for path in sources if path[0] in collector.modules}, set(now))
    places = {path: place for path, *_, place in kept.entries}
    pairs = []
    for path, leaf in now.items():
        if isinstance(leaf, torch.Tensor):
            target, source = trees.plain(leaf, path), sources[path]
            placed = trees.place_of(leaf), places.get(path)
            if (target.shape, target.dtype, placed[0]) != (source.shape, source.dtype, placed[1]):
                shown = [
                    f"{tuple(each.shape)} of {each.dtype}{_shown(place)}"
                    for each, place in zip((target, source), placed, strict=True)
                ]
                raise DifferentError(f"{trees.spell(path)} is {shown[0]}, and {shown[1]} was kept")
            pairs.append(_without_repetition(path, target, source))
    return pairs


def _is_view(tensor: torch.Tensor) -> bool:
    """Return true if a tensor shows its memory with another sign, so that only ``copy_`` writes into it."""
    return tensor.is_conj() or tensor.is_neg()


def _without_repetition(
    path: Path, target: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors without the repetitions that ``Tensor.expand`` has made in ``target``. Keep only
    the first index of an expanded dimension (stride 0). All of its indices share the same memory, so torch
    refuses to write to it.

    Raises:
        DifferentError: ``source`` has different numbers where ``target`` repeats the same memory.
    """
    for dimension, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dimension] > 1:
            target, first = target.detach().narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
            # Compare bytes instead of numbers, because NaN is not equal to itself.
            pair = first.expand_as(source), source
            if not torch.equal(*(each.contiguous().view(torch.uint8) for each in pair)):
                raise DifferentError(f"{trees.spell(path)} repeats its numbers, and the kept one does not")
            source = first
    return target, source


def _shown(place: tuple[tuple[int, ...], tuple[int, ...]] | None) -> str:
    return "" if place is None else f" at {place[1]} in {place[0]}"


def _compare(what: str, kept: set[Any], now: set[Any]) -> None:
    for title, found in (("only the kept state has", kept - now), ("the kept state lacks", now - kept)):
        if found:
            names = sorted(trees.spell(each) if isinstance(each, tuple) else each for each in found)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise DifferentError(f"{title} the {what} {', '.join(names[:3])}{more}")


def _of_other(name: str, states: dict[str, Any], tensors: Mapping[Path, torch.Tensor]) -> Any:
    """Return the kept state of an object that is neither a module nor an optimizer, as it is to be loaded."""
    own = {path[1:]: each.clone() for path, each in tensors.items() if path[0] == name}
    return trees.put_together(states[name], own)


def _of_optimizer(
    name: str, optimizer: torch.optim.Optimizer, kept: Kept, tensors: Mapping[Path, torch.Tensor]
) -> dict[str, Any]:
    # Clone the kept tensors, because the optimizer will use and change the tensors that it loads.
    own = {path: each.clone() for path, each in tensors.items() if path[0] == name}
    params = [each for group in optimizer.param_groups for each in group["params"]]
    for path, *_, place in kept.entries:
        if path[0] == name and place is not None:
            own[path] = _distributed(own[path], params[path[2]])
    skeleton = {key: each for key, each in kept.skeletons[name].items() if key not in ("names", "class")}
    numbers = skeleton.pop("params")
    loaded: dict[str, Any] = trees.put_together(skeleton, own, (name,))
    loaded["param_groups"] = [
        {**group, "params": each} for group, each in zip(kept.groups[name], numbers, strict=True)
    ]
    return loaded


def _distributed(local: torch.Tensor, like: Any) -> Any:
    """Return a ``DTensor`` (a tensor that is spread over several ranks) that is spread in the same way as the
    parameter ``like``. ``local`` is this rank's part of it.
    """
    return type(like.data).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
