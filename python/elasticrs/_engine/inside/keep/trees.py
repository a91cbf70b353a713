"""Takes states (what ``state_dict()`` returns) apart into plain values and tensors, and puts them together.

A *path* is the tuple of keys that lead to a value. A *leaf* is a tensor, a numpy array or number, or bytes.
In the *skeleton*, the rest of the state, ``None`` stands in place of each leaf.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from collections import Counter, OrderedDict

import torch

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.file import OffError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    Path: TypeAlias = tuple[Any, ...]
    Leaves: TypeAlias = list[tuple[Path, Any]]

_DICTS: tuple[type[dict[Any, Any]], ...] = (OrderedDict, Counter)
"""Subclasses of ``dict`` that a restored state has again, because programs use their methods. Others become a
plain ``dict``.
"""

_PROTOCOL = 2
"""The only protocol of pickle that torch's unpickler for untrusted data reads."""


_PLAIN = frozenset((int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.Size))
"""Types of values that torch is known to load safely, so that :func:`_check` does not try it."""


def take_apart(value: Any, path: Path, leaves: Leaves) -> Any:
    """Return the skeleton of a state: the state with ``None`` in place of each tensor, numpy array and bytes.
    Append these to ``leaves``, each with its path (the keys that lead to it).

    Raises:
        OffError: the state has a value of a type that torch does not load safely.
    """
    kind = type(value)
    if kind in (int, float, str, bool, type(None)):
        return value
    if isinstance(value, (torch.Tensor, bytes)) or _is_of_numpy(value):
        leaves.append((path, value))
        return None
    if isinstance(value, dict):
        made = {}
        for key, each in value.items():
            if type(key) is not str:
                _check(key, path)
            made[key] = take_apart(each, (*path, key), leaves)
        kept = None if kind is dict else next((each for each in _DICTS if isinstance(value, each)), None)
        return made if kept is None else kept(made)
    if kind in (list, tuple):
        return kind([take_apart(each, (*path, at), leaves) for at, each in enumerate(value)])
    _check(value, path)
    return value


def _check(value: Any, path: Path) -> None:
    """Check that torch can load a value of a state safely, without running code that comes with it.

    Raises:
        OffError: the value is of a type that torch does not load safely.
    """
    if type(value) in _PLAIN:
        return
    try:
        load(dump(value))
    # Pickle calls methods of the value, which may raise any exception.
    except Exception as error:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise OffError(f"{spell(path)} has a {name}, which torch does not load safely") from error


def put_together(skeleton: Any, leaves: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return the state that :func:`take_apart` has split into ``skeleton`` and ``leaves``. The paths of these
    leaves begin with ``path``.
    """
    if skeleton is None:
        return leaves.get(path)
    if isinstance(skeleton, dict):
        made = {key: put_together(each, leaves, (*path, key)) for key, each in skeleton.items()}
        return type(skeleton)(made)
    if type(skeleton) in (list, tuple):
        parts = [put_together(each, leaves, (*path, at)) for at, each in enumerate(skeleton)]
        return type(skeleton)(parts)
    return skeleton


def _is_of_numpy(value: object) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def spell(path: Path) -> str:
    """Return a path (the keys that lead to a value of a state) as text for the user, with dots between."""
    # For a small buffer of a module, the last key is itself a path, the full path of the buffer.
    named = path[-1] if path and isinstance(path[-1], tuple) else path
    return ".".join(map(str, named))


def encode(state: Any, is_separate: Callable[[Any], bool] = lambda _leaf: False) -> bytes:
    """Return a state as bytes, without the tensors and other leaves for which ``is_separate`` is true."""
    leaves: Leaves = []
    skeleton = take_apart(state, (), leaves)
    entries, parts, at = [], [], 0
    for path, leaf in leaves:
        if not is_separate(leaf):
            entry, data = _leaf_bytes(path, leaf)
            entries.append((path, *entry, at, len(data)))
            parts.append(data)
            at += len(data)
    head = dump((skeleton, entries))
    return b"".join((layout.pack([len(head)]), head, *parts))


def decode(data: bytes, separate: Mapping[Path, Any] | None = None) -> Any:
    """Return the state that :func:`encode` has turned into ``data``. ``separate`` has the leaves left out."""
    length = layout.unpack(data[: layout.WORD])[0]
    base = layout.WORD + length
    skeleton, entries = load(data[layout.WORD : base])
    leaves = dict(separate or {})
    for path, kind, dtype, shape, at, size in entries:
        leaves[path] = _leaf(kind, dtype, shape, data[base + at : base + at + size])
    return put_together(skeleton, leaves)


def lay_out(data: torch.Tensor, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of bytes as one of another type and shape. Empty ``strides`` mean a contiguous one."""
    found = data.view(getattr(torch, dtype))
    return found.as_strided(shape, strides) if strides else found.view(shape)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor whose numbers fill its memory without gaps, but not in the usual order,
    such as ``channels_last``. Return an empty tuple for any other tensor.
    """
    if tensor.is_contiguous():
        return ()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return ()
        expected *= size
    return tuple(tensor.stride())


def is_in_one_piece(tensor: torch.Tensor) -> bool:
    """Return true if a copy of the tensor's memory is a copy of the tensor, in the layout that
    :func:`strides_of` returns.
    """
    is_plain = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and (tensor.is_contiguous() or bool(strides_of(tensor)))


def _leaf_bytes(path: Path, leaf: Any) -> tuple[tuple[str, str, tuple[int, ...]], bytes]:
    if isinstance(leaf, bytes):
        return ("bytes", "", ()), leaf
    if isinstance(leaf, torch.Tensor):
        tensor = plain(leaf, path).detach().cpu().resolve_conj().resolve_neg().contiguous()
        size = tensor.numel() * tensor.element_size()
        data = ctypes.string_at(tensor.data_ptr(), size) if size else b""
        return ("tensor", dtype_name(tensor.dtype), tuple(tensor.shape)), data
    if leaf.dtype.hasobject:
        raise OffError(f"{spell(path)} is a numpy array of Python objects")
    return (type(leaf).__name__, leaf.dtype.str, tuple(leaf.shape)), leaf.tobytes()


def _leaf(kind: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    if kind == "bytes":
        return data
    if kind == "tensor":
        content = torch.tensor(bytearray(data), dtype=torch.uint8)
        return content.view(getattr(torch, dtype)).view(shape)
    import numpy as np

    array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return array if kind == "ndarray" else array[()]


def plain(leaf: Any, path: Path) -> torch.Tensor:
    """Return the plain tensor with the data of a tensor ``leaf``. Of a ``DTensor``, it is this rank's part.

    Raises:
        OffError: the tensor is of a kind whose data cannot be copied.
    """
    leaf = getattr(leaf, "_local_tensor", leaf)  # Only a `DTensor` has this attribute.
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        raise OffError(f"{spell(path)} is a {type(leaf).__qualname__}, which cannot be copied")
    tensor: torch.Tensor = leaf
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise OffError(f"{spell(path)} is a tensor ({kind}) whose data cannot be copied")
    return tensor


def place_of(leaf: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where this rank's part of a ``DTensor`` belongs: the shape of the whole tensor, and the offset
    of the part in it. Return ``None`` for any other tensor.
    """
    if not hasattr(leaf, "placements"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = tuple(leaf.shape)
    _, offset = compute_local_shape_and_global_offset(whole, leaf.device_mesh, leaf.placements)
    return whole, tuple(offset)


def is_shard(leaf: Any) -> bool:
    """Return true if a value is a ``DTensor`` of which this rank has only a part."""
    placements = getattr(leaf, "placements", ())
    return any(
        not each.is_replicate() and leaf.device_mesh.size(dimension) > 1
        for dimension, each in enumerate(placements)
    )


def twins_of(leaf: Any) -> tuple[int, int, int] | None:
    """Return which ranks have the same part of a ``DTensor`` as this rank: the first one, the distance from
    one to the next, and their number. Return ``None`` if no other rank has it.
    """
    coordinate: list[int] | None = leaf.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    pairs = zip(leaf.placements, coordinate, strict=True)
    place = tuple(slice(None) if each.is_replicate() else at for each, at in pairs)
    ranks: list[int] = sorted(leaf.device_mesh.mesh[place].flatten().tolist())
    if len(ranks) < 2:
        return None
    stride = ranks[1] - ranks[0]
    is_regular = ranks == list(range(ranks[0], ranks[-1] + 1, stride))
    return (ranks[0], stride, len(ranks)) if is_regular else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a ``dtype`` without that of its module, such as ``float32``."""
    return str(dtype).rpartition(".")[2]


def dump(value: Any) -> bytes:
    """Return plain values (numbers, text, and lists and dictionaries of them) as bytes, for :func:`load`."""
    return pickle.dumps(value, protocol=_PROTOCOL)


def load(data: bytes) -> Any:
    """Return the plain values that :func:`dump` has turned into bytes. Read them by the rules of
    ``torch.load(weights_only=True)``, which run no code from the data.

    Raises:
        pickle.UnpicklingError: the data has an object of a type that these rules forbid.
    """
    from torch._weights_only_unpickler import load as load_safely

    return load_safely(io.BytesIO(data), encoding="utf-8")
