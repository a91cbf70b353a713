"""Reads the copies of all ranks as one checkpoint of ``torch.distributed.checkpoint``.

Its planner cuts and joins the tensors for any number of ranks. No rank writes a file, and no collective is
needed but those of ``dcp.load``.
"""

from __future__ import annotations

import io
import os

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elasticrs._engine.inside.keep import trees
from elasticrs._engine.inside.keep.file import KeepFile, OffError
from elasticrs._engine.inside.keep.restore import DamagedError, Kept
from elasticrs._engine.inside.keep.saved import newest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from elasticrs._engine.inside.keep.trees import Path

__all__ = ["Reader"]


class Reader(StorageReader):
    """Reads the kept state of all ranks: ``dcp.load(state, storage_reader=reader)``.

    The names are those of ``{name: state}`` with the names of the objects of ``Keep``. The state of an
    optimizer has the names of the parameters, as in ``torch.distributed.checkpoint.state_dict``.

    Args:
        copies: the copies of a step, by the ranks that made them; a single one if the state is replicated.
        rank: this rank. It reads what belongs to single ranks from the copy of the rank with its number; rank
            0 serves if there is none.
    """

    def __init__(self, copies: Sequence[Kept], rank: int) -> None:
        self._copies = copies
        self._own = copies[rank] if rank < len(copies) else copies[0]
        self._small: dict[str, Any] = trees.decode(self._own.small)
        self._checked: list[Kept] = []
        self._where: dict[MetadataIndex, tuple[Kept, torch.Tensor]] = {}
        self._plain: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """The step that had ended when the state was copied."""
        return self._copies[0].step

    @property
    def values(self) -> dict[str, Any]:
        """What ``Keep.values`` was."""
        values: dict[str, Any] = self._small["values"]
        return values

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Return true: a name of the checkpoint is not used."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a name of the checkpoint is not used."""

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Return the names, shapes and shards of the tensors, and the names of other values."""
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for kept in self._copies:
            tensors = kept.tensors()
            places = {id(tensors[path]): place for path, *_, place in kept.entries}
            for name, value in flatten_state_dict(self._state(kept, tensors))[0].items():
                if not isinstance(value, torch.Tensor):
                    found.setdefault(name, BytesStorageMetadata())
                    self._plain.setdefault(name, value)
                    continue
                whole, offset = places.get(id(value)) or (value.shape, (0,) * value.dim())
                properties = TensorProperties(dtype=value.dtype)
                known = found.setdefault(name, TensorStorageMetadata(properties, torch.Size(whole), []))
                index = MetadataIndex(name, torch.Size(offset))
                if value.numel() and index not in self._where and isinstance(known, TensorStorageMetadata):
                    self._where[index] = kept, value
                    known.chunks.append(ChunkStorageMetadata(torch.Size(offset), value.shape))
        return Metadata(state_dict_metadata=found)

    def _state(self, kept: Kept, tensors: dict[Path, torch.Tensor]) -> dict[str, Any]:
        """Return the states of the objects of the rank that made a copy."""
        leaves = {**tensors, **self._small["volatile"]}
        parts = {**kept.skeletons, **kept.common, **(self._small["objects"] if kept is self._own else {})}
        state = {name: trees.put_together(each, leaves, (name,)) for name, each in parts.items()}
        for name, groups in kept.groups.items():
            optimizer = state[name]
            numbers, names = optimizer.pop("params"), optimizer.pop("names")
            name_of = {
                number: found or str(number)
                for pair in zip(numbers, names, strict=True)
                for number, found in zip(*pair, strict=True)
            }
            optimizer["state"] = {name_of[number]: each for number, each in optimizer["state"].items()}
            optimizer["param_groups"] = [
                {**group, "params": [name_of[number] for number in of_group]}
                for group, of_group in zip(groups, numbers, strict=True)
            ]
        return state

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        """Do nothing: the copies have been found already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs into its tensors.

        Raises:
            RuntimeError: a copy is damaged.
        """
        for item in plan.items:
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                value = io.BytesIO()
                torch.save(self._plain[index.fqn], value)
                value.seek(0)
                planner.load_bytes(item, value)
                continue
            kept, source = self._where[index]
            self._check(kept)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check(self, kept: Kept) -> None:
        if kept not in self._checked:
            try:
                kept.check()
            except DamagedError as error:
                raise RuntimeError(
                    f"elasticrs: keep: a copy of step {kept.step} is damaged: {error}"
                ) from error
            self._checked.append(kept)


def open_copies(readable: Mapping[str, Any], own: KeepFile | None = None) -> list[Kept]:
    """Open the copies that a plan names in ``reader``. ``own`` is a file that is open already.

    Raises:
        RuntimeError: a copy is damaged.
    """
    step: int = readable["step"]
    try:
        return [
            Kept(own if own is not None and own.place == place else KeepFile(place), slot, step, sequence)
            for place, slot, sequence in readable["copies"]
        ]
    except (DamagedError, OffError) as error:
        raise RuntimeError(f"elasticrs: keep: a copy of step {step} is damaged: {error}") from error


def export_saved(folder: str, out: str) -> int:
    """Make a checkpoint of the newest state that is saved in a folder. Return its step.

    Raises:
        FileNotFoundError: nothing is saved in the folder.
        FileExistsError: ``out`` exists.
        ValueError: the saved state is damaged, as with ``RuntimeError``.
        OSError: the checkpoint cannot be written.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    found = newest(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} has no saved state")
    if os.path.exists(out):
        raise FileExistsError(f"{out} exists")
    reader = Reader(open_copies(found.readable()), 0)
    state: dict[str, Any] = {}
    make_planner: Any = _EmptyStateDictLoadPlanner  # It has no annotations.
    _load_state_dict(state, reader, planner=make_planner(), no_dist=True)
    save(state, storage_writer=FileSystemWriter(out), no_dist=True)
    return found.step
