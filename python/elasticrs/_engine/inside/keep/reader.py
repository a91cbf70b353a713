"""Presents the copies of all ranks' training states as one checkpoint of ``torch.distributed.checkpoint``
(``dcp``).

When ``dcp.load`` reads it, torch's planner cuts and joins the tensors for any number of ranks. The checkpoint
is never written to a file, and only ``dcp.load`` itself calls collectives.
"""

from __future__ import annotations

import io
import os
import pickle

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

from elasticrs._engine.inside.handover import Offer, take
from elasticrs._engine.inside.keep import layout, trees
from elasticrs._engine.inside.keep.file import DamagedCopyError, KeepFile, OffError
from elasticrs._engine.inside.keep.layout import Slot
from elasticrs._engine.inside.keep.nodes import offer_of
from elasticrs._engine.inside.keep.restore import DamagedError, Kept, drop_damaged
from elasticrs._engine.inside.keep.saved import newest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from elasticrs._engine.inside.keep.nodes import Store
    from elasticrs._engine.inside.keep.trees import Path

__all__ = ["Reader"]


class _Remote(Kept):
    """A copy on another node. Only the bytes of the tensors that are needed are downloaded, and none are
    stored. The other node has checked the copy before.

    Raises:
        OSError: the other node does not send the copy.
        DamagedError: it has another copy there.
    """

    def __init__(self, offer: Offer, number: int, step: int, sequence: int) -> None:
        self.step, self._offer, self._number = step, offer, number
        head = bytearray(layout.WORD * Slot.COUNT)
        take(offer, f"checked {number}", memoryview(head))
        self._words = layout.unpack(bytes(head))
        if (self._words[Slot.STEP], self._words[Slot.SEQUENCE]) != (step, sequence):
            raise DamagedError("the copy has been overwritten")
        index = bytearray(self._words[Slot.INDEX_LENGTH])
        take(offer, f"index {number}", memoryview(index))
        try:
            self._parse(bytes(index))
        except (ValueError, pickle.UnpicklingError, LookupError) as error:
            raise DamagedError(f"its index is damaged ({error})") from error
        self._tensors = {
            path: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for path, dtype, shape, *_ in self.entries
        }
        self._entry_of = {id(self._tensors[entry[0]]): entry for entry in self.entries}

    def tensors(self) -> dict[Path, torch.Tensor]:
        """Return tensors with the types and shapes of those in the copy, by their paths. They have no memory:
        the data is still on the other node.
        """
        return self._tensors

    def check(self) -> None:
        """Do nothing, because the other node has checked the copy."""

    def loaded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Download the data of one of the copy's tensors."""
        _, dtype, shape, offset, size, strides, _ = self._entry_of[id(tensor)]
        if not size:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        data = bytearray(size)
        at = self._words[Slot.DATA_AT] + offset
        take(self._offer, f"bytes {self._number} {at} {size}", memoryview(data), is_checked=True)
        return trees.lay_out(torch.frombuffer(data, dtype=torch.uint8), dtype, shape, strides)


class Reader(StorageReader):
    """Reads the kept training state of all ranks: ``dcp.load(state, storage_reader=reader)``.

    The checkpoint is a dictionary with the state of each object under the name that the object has in
    ``Keep``. In the state of an optimizer, parameters have names instead of numbers, as in
    ``torch.distributed.checkpoint.state_dict``.

    Args:
        copies: the copies of one step, in the order of the ranks that made them; a single copy if all ranks
            have the same state.
        rank: number of this rank. It reads the states that are different on each rank, such as ``values``,
            from the copy of the rank with this number, or from that of rank 0 if there is none.
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
        """The content of ``Keep.values`` when the state was copied."""
        values: dict[str, Any] = self._small["values"]
        return values

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Return true for any name of a checkpoint, because the name is not used."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because the name of the checkpoint is not used."""

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Return the names and shapes of the tensors in the copies, the parts of each tensor that single
        ranks have copied, and the names of other values.
        """
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
        """Return the states of the objects, by name, from the copy of one rank. In those of optimizers, give
        the parameters names instead of numbers.
        """
        leaves = {**tensors, **self._small["volatile"]}
        parts = {**kept.skeletons, **kept.common, **(self._small["objects"] if kept is self._own else {})}
        state = {name: trees.put_together(each, leaves, (name,)) for name, each in parts.items()}
        for name, groups in kept.groups.items():
            optimizer = state[name]
            numbers, names = optimizer.pop("params"), optimizer.pop("names")
            del optimizer["class"]
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
        """Do nothing, because the copies have been found already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, by which torch loads the checkpoint on this rank, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, by which torch loads the checkpoint on all ranks, as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs, by torch's plan, from the copies of all ranks into its tensors.

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
            source = kept.loaded(source)
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
                drop_damaged(each.file.place for each in self._copies if not isinstance(each, _Remote))
                raise DamagedCopyError(
                    f"elasticrs: keep: a copy of step {kept.step} is damaged: {error}"
                ) from error
            self._checked.append(kept)


def open_copies(
    readable: Mapping[str, Any], own: KeepFile | None = None, store: Store | None = None
) -> list[Kept]:
    """Open the copies that the agent's plan (what a worker is to restore) names under ``reader``. ``own`` is
    this worker's file, which is open already. ``store`` has the addresses of the workers of other nodes.

    Raises:
        RuntimeError: a copy is damaged.
    """
    step: int = readable["step"]
    copies: Sequence[tuple[str, int, int]]
    if "folder" in readable:
        found = newest(readable["folder"])
        copies = found.saved.copies(found.places) if found is not None and found.step == step else []
    else:
        copies = readable["copies"]
    if not copies:
        raise RuntimeError(f"elasticrs: keep: step {step} is gone from {readable['folder']}")

    def opened(place: str, slot: int, sequence: int) -> Kept:
        if ":" not in place:
            assert store is not None
            return _Remote(offer_of(store.get(f"offer/{place}")), slot, step, sequence)
        file = own if own is not None and own.place == place else KeepFile(place)
        return Kept(file, slot, step, sequence)

    try:
        return [opened(*each) for each in copies]
    except OSError as error:
        raise RuntimeError(f"elasticrs: keep: a copy of step {step} cannot be read: {error}") from error
    except (DamagedError, OffError) as error:
        drop_damaged(place for place, *_ in copies if ":" in place)
        raise DamagedCopyError(f"elasticrs: keep: a copy of step {step} is damaged: {error}") from error


def export_saved(folders: Sequence[str], out: str) -> int:
    """Convert the newest training state that a job has saved (``--keep-save``) to a checkpoint of
    ``torch.distributed.checkpoint`` in the new folder ``out``. Return the training step of that state. If
    each node has saved its part on its own disk, ``folders`` are the folders of all nodes.

    Raises:
        FileNotFoundError: nothing is saved in the folders.
        FileExistsError: ``out`` exists.
        ValueError: a record of the saved state is damaged, or a node's part of the state is missing.
        RuntimeError: a saved copy is damaged.
        OSError: the checkpoint cannot be written.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    found = newest(*folders)
    if found is None:
        raise FileNotFoundError(f"{', '.join(folders)}: there is no saved state")
    if os.path.exists(out):
        raise FileExistsError(f"{out} exists")
    reader = Reader(open_copies({"step": found.step, "copies": found.saved.copies(found.places)}), 0)
    state: dict[str, Any] = {}
    make_planner: Any = _EmptyStateDictLoadPlanner  # The class has no annotations.
    _load_state_dict(state, reader, planner=make_planner(), no_dist=True)
    save(state, storage_writer=FileSystemWriter(out), no_dist=True)
    return found.step
