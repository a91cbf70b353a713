"""Collects the state of a training program at the end of a step.

The *large* part of the state, the tensors of modules and optimizers, is held by reference, and another thread
copies it later. The *small* part, such as random numbers, small buffers, and the states of other objects, is
copied at once.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from hashlib import blake2b
from itertools import chain
from operator import attrgetter, is_
from zlib import crc32

import torch
from torch.nn.parameter import is_lazy

from elasticrs._engine.inside.keep import layout, trees
from elasticrs._engine.inside.keep.file import round_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from elasticrs._engine.inside.keep.trees import Leaves, Path

SMALL = 1 << 16
"""Maximum bytes of a buffer that is copied at the end of each step. Larger ones are held by reference."""

_ALIGNMENT = 64
"""Bytes to which the data of each tensor in a copy is aligned."""

_RECHECKED = 256
"""Number of steps after which the program's tensors are looked up again, even if none seems replaced."""

_COMMON = ("torch.optim.lr_scheduler", "torch.amp.grad_scaler")
"""Python modules of torch that define classes (such as schedulers) whose state is the same on all ranks."""

_version = attrgetter("_version")

_NO_STATES = trees.encode({})


class Parts:
    """The large tensors of a training state: parameters, states of optimizers, and large buffers.

    ``tensors`` has each tensor once, ``offsets`` has the place of its data in a copy, and ``size`` is the
    bytes of the data of all. ``paths`` has the keys under which each tensor is in the state. ``facts`` is the
    encoded description of the tensors, with which a later process restores them from the copy.
    """

    def __init__(self, skeletons: dict[str, Any], large: Leaves, of_optimizers: Leaves) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self.offsets: list[int] = []
        entries, at, seen = [], 0, dict[int, int]()
        for path, leaf in large + of_optimizers:
            tensor = trees.plain(leaf, path)
            size = tensor.numel() * tensor.element_size()
            if id(tensor) not in seen:  # A tensor with several names is copied once.
                seen[id(tensor)] = at
                self.tensors.append(tensor)
                self.paths.append(path)
                self.offsets.append(at)
                at = round_up(at + size, _ALIGNMENT)
            facts = trees.dtype_name(tensor.dtype), tuple(tensor.shape)
            more = trees.strides_of(tensor), trees.place_of(leaf)
            entries.append((path, *facts, seen[id(tensor)], size, *more))
        self.is_sharded = any(trees.is_shard(leaf) for _, leaf in large)
        """True if this rank has only a part of a tensor, and other ranks have the other parts."""
        twins = {trees.twins_of(leaf) for _, leaf in large + of_optimizers if trees.is_shard(leaf)}
        self.twins = twins.pop() if len(twins) == 1 else None
        """The ranks with the same parts of tensors as this rank, as in :func:`.trees.twins_of`."""
        self.size = at
        self.facts = trees.dump((skeletons, entries))
        self.layout = int.from_bytes(blake2b(repr(entries).encode(), digest_size=8).digest(), "little")
        self._made_of, self._forms = (skeletons, large, of_optimizers), self._present_forms()
        self.is_outdated = False
        """True if :meth:`up_to_date` has made a new description, because this one is wrong."""
        self.is_on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors)
        # Do not watch the tensors in the states of optimizers for unexpected changes: only the optimizers
        # change them, and watching them would take longer than watching all others.
        own = {id(leaf) for _, leaf in of_optimizers}
        self._versioned = [each for each in self.tensors if id(each) not in own and not each.is_inference()]

    def versions(self) -> list[int]:
        """Return torch's version numbers of all tensors but the optimizers' own. Most changes raise them."""
        return list(map(_version, self._versioned))

    def up_to_date(self) -> Parts:
        """Return this description, or a new one if a tensor has got another type or size. That happens if the
        program assigns to the attribute `data` of the tensor.
        """
        self.is_outdated = self._present_forms() != self._forms
        return Parts(*self._made_of) if self.is_outdated else self

    def _present_forms(self) -> list[list[object]]:
        # Compare the number of elements and the strides instead of the shape, because reading all shapes
        # takes longer than reading these values.
        facts = torch.Tensor.is_conj, torch.Tensor.is_neg, torch.Tensor.numel, torch.Tensor.stride
        methods = attrgetter("dtype"), attrgetter("device"), *facts
        return [list(map(method, self.tensors)) for method in methods]

    def changed(self, versions: list[int]) -> Path | None:
        """Return the path of a tensor that has changed since ``versions`` were read; ``None`` without one."""
        for tensor, before in zip(self._versioned, versions, strict=True):
            if tensor._version != before:
                return self.path_of(tensor)
        return None

    def path_of(self, tensor: torch.Tensor) -> Path:
        """Return the path of a tensor in the state (the keys that lead to it). If it has several, return the
        first.
        """
        return next(path for path, each in zip(self.paths, self.tensors, strict=True) if each is tensor)


class Boundary:
    """The training state at the end of a step.

    Args:
        step: the number of the step.
        parts: the large tensors (parameters and the like), by reference.
        groups: settings of the optimizers, such as learning rates, by the names of the optimizers.
        small: the encoded small state of this rank (random numbers and the like).
        common: the encoded states of objects that are the same on all ranks, such as schedulers.
        before: number and small state of the step before, encoded; empty if there was none.
    """

    def __init__(
        self, step: int, parts: Parts, groups: dict[str, Any], small: bytes, common: bytes, before: bytes
    ) -> None:
        self.step, self.parts, self.groups = step, parts, groups
        self.small, self.common, self.before = small, common, before
        self.versions = parts.versions()

    def index(self) -> bytes:
        """Return what a copy of this state has beside the data of the large tensors: five parts, as bytes."""
        return join_index([self.parts.facts, trees.encode(self.groups), self.small, self.common, self.before])


class Collector:
    """Collects the training state of a program from its objects.

    Args:
        objects: the objects (modules, optimizers and others) that the program gave to ``Keep``, by names.
        values: ``Keep.values``: further plain values of the program.
    """

    def __init__(self, objects: Mapping[str, Any], values: dict[str, Any]) -> None:
        self.modules = {name: each for name, each in objects.items() if isinstance(each, torch.nn.Module)}
        self.optimizers = {
            name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)
        }
        self.others = {
            name: each
            for name, each in objects.items()
            if name not in self.modules and name not in self.optimizers
        }
        self.common = {name for name, each in self.others.items() if _is_common(each)}
        """Names of the objects, such as schedulers, whose state is the same on all ranks."""
        self._values = values
        self._before = b""
        self._skeletons: dict[str, Any] = {}
        self._large: Leaves = []
        self._of_optimizers: Leaves = []
        self._of_others: Leaves = []
        self._parts: Parts | None = None
        self._volatile: dict[Path, torch.Tensor] = {}
        self._watch: list[Callable[[], Iterable[Any]]] = []
        self._seen: list[Any] = []
        self._age = 0

    def boundary(self, step: int) -> Boundary:
        """Return the present state of the program as that at the end of ``step``.

        Raises:
            OffError: the state has a tensor or another value that cannot be copied.
        """
        is_same = self._refresh()
        states = self._states(self.others)
        leaves: Leaves = []
        trees.take_apart(states, (), leaves)
        of_others = [(path, leaf) for path, leaf in leaves if is_large(leaf)]
        is_same &= _are_same(of_others, self._of_others)
        if self._parts is None or self._parts.is_outdated or not is_same:
            self._of_others = of_others
            self._parts = Parts(self._skeletons, self._large + of_others, self._of_optimizers)
        groups = {name: _settings(optimizer) for name, optimizer in self.optimizers.items()}
        common = _NO_STATES
        if self.common:
            common = trees.encode({name: states.pop(name) for name in self.common}, is_large)
        before, small = self._before, self._small(states)
        self._before = layout.pack([step]) + small
        return Boundary(step, self._parts, groups, small, common, before)

    def begin_after(self, step: int) -> bytes:
        """Take the present state as that after ``step``. Return the encoded random numbers and the like."""
        self.layout()
        small = self.small()
        self._before = layout.pack([step]) + small
        return small

    def small(self) -> bytes:
        """Return the present small state of this rank (random numbers and the like), encoded."""
        return self._small(self._states(self.others.keys() - self.common))

    def layout(self) -> tuple[dict[str, Any], Leaves, dict[Path, torch.Tensor]]:
        """Return the present states of modules and optimizers, taken apart: their values without the tensors,
        the large tensors, and the small buffers.
        """
        self._watch = []
        self._refresh()
        return self._skeletons, self._large, self._volatile

    def versions(self) -> list[int]:
        """Return torch's version numbers of the modules' parameters. They grow when the parameters change."""
        return [each._version for each in self._parameters() if not each.is_inference()]

    def has_gradients(self) -> bool:
        """Return true if a parameter of the modules has a gradient."""
        return any(each.grad is not None for each in self._parameters())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [each for module in self.modules.values() for each in module.parameters() if not is_lazy(each)]

    def is_complete(self) -> bool:
        """Return false if a parameter has no shape yet, because a lazy module sets it in the first step."""
        return not any(is_lazy(each) for module in self.modules.values() for each in module.parameters())

    def _states(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.others[name].state_dict() for name in names}

    def _small(self, states: dict[str, Any]) -> bytes:
        state = {
            "random": random_state(),
            "volatile": self._volatile,
            "objects": states,
            "values": self._values,
        }
        return trees.encode(state, is_large)

    def _refresh(self) -> bool:
        """Look up the tensors of modules and optimizers. Return true if they are still the same objects, and
        the states of modules and optimizers are the same without them.
        """
        self._age += 1
        # Run no Python code for each tensor, and make no list of them, because a model may have thousands.
        if self._watch and self._age % _RECHECKED and all(map(is_, self._watched(), self._seen)):
            return True
        before = self._skeletons, self._large, self._of_optimizers
        self._watch, self._volatile, self._skeletons = [], {}, {}
        self._large, self._of_optimizers = [], []
        # Call this for each object, even after a false result, because each call adds to the lists.
        are_cacheable = [self._take_module(name, each) for name, each in self.modules.items()]
        are_cacheable += [self._take_optimizer(name, each) for name, each in self.optimizers.items()]
        if not all(are_cacheable):
            self._watch = []
        self._seen = list(self._watched())
        skeletons, large, of_optimizers = before
        is_same = _are_same(self._large, large) and _are_same(self._of_optimizers, of_optimizers)
        # Otherwise, a value that the program changes in place, such as a set, is the same object in both.
        return is_same and all(are_cacheable) and self._skeletons == skeletons

    def _watched(self) -> Iterator[Any]:
        """Iterate over the tensors of modules and optimizers, and over an object that marks the end."""
        return chain(*(watched() for watched in self._watch), (is_,))

    def _take_module(self, name: str, module: torch.nn.Module) -> bool:
        """Add the tensors of a module to the lists of tensors to copy. Return true if these lists stay valid
        as long as the module has the same tensors.
        """
        state = module.state_dict(keep_vars=True) if _is_plain(module) else module.state_dict()
        leaves: Leaves = []
        self._skeletons[name] = trees.take_apart(state, (name,), leaves)
        for path, leaf in leaves:
            # Parameters can be copied after the end of a step, because only the optimizer of the next step
            # changes them. The next forward pass may change buffers, so small buffers are copied at once.
            # A `DTensor` is copied later in any case, because only for such tensors is it stored where this
            # rank's part belongs in the whole.
            if isinstance(leaf, torch.nn.Parameter) or is_large(leaf) or hasattr(leaf, "placements"):
                self._large.append((path, leaf))
            else:
                self._volatile[path] = leaf
        tables: list[dict[str, Any]] = [
            table for each in module.modules() for table in (each._parameters, each._buffers) if table
        ]
        self._watch.append(lambda: chain.from_iterable(map(dict.values, tables)))
        return is_live(module, state) and all(isinstance(table, dict) for table in tables)

    def _take_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> bool:
        """Add the state of an optimizer to the lists of tensors. Return true if these lists stay right until
        the optimizer gets another tensor.
        """
        state = optimizer.state_dict()
        params = [group["params"] for group in state.pop("param_groups")]
        leaves: Leaves = []
        skeleton = trees.take_apart(state, (name,), leaves)
        kind = {"class": type(optimizer).__qualname__}
        self._skeletons[name] = {**skeleton, **kind, "params": params, "names": self._names(optimizer)}
        self._of_optimizers += leaves
        # Read these attributes of the optimizer each time, because it replaces them when it loads a state.
        self._watch += [
            lambda: chain.from_iterable(map(dict.values, optimizer.state.values())),
            lambda: [group["params"] for group in optimizer.param_groups],
        ]
        is_plain = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        is_plain &= all(isinstance(entry, dict) for entry in optimizer.state.values())
        # A state with values of other types, such as the lists of LBFGS, must be looked up in each step. The
        # optimizer appends to such a list, which stays the same object, so the change would not be seen.
        scalars = (torch.Tensor, int, float, type(None))
        return is_plain and all(
            isinstance(v, scalars) for entry in optimizer.state.values() for v in entry.values()
        )

    def _names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of an optimizer's parameters by group; empty names for those of no kept module."""
        found = {
            id(each): name for module in self.modules.values() for name, each in module.named_parameters()
        }
        return [[found.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]


def _are_same(leaves: Leaves, others: Leaves) -> bool:
    """Return true if the lists have the same tensors under the same paths."""
    pairs = zip(leaves, others, strict=False)
    return len(leaves) == len(others) and all(a is b and path == same for (path, a), (same, b) in pairs)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _is_plain(module: torch.nn.Module) -> bool:
    return type(module).state_dict is torch.nn.Module.state_dict


def is_live(module: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Return true if a module's state consists of nothing but its own parameters and buffers."""
    own = {
        id(each)
        for part in module.modules()
        for each in (*part._parameters.values(), *part._buffers.values())
    }
    return _is_plain(module) and all(id(each) in own for each in state.values())


def _is_common(each: Any) -> bool:
    is_of_torch = any(base.__module__ in _COMMON for base in type(each).__mro__)
    return is_of_torch or getattr(each, "keep_common", False)


def is_large(leaf: Any) -> bool:
    """Return true if a value is a tensor that is too large to be copied at the end of each step."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() > SMALL


def random_state() -> dict[str, Any]:
    """Return the states of the generators of random numbers that the program uses."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _bytes_of(torch.get_rng_state()),
        "random": (version, array("I", numbers).tobytes(), gauss),
    }
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state["numpy"] = numpy.get_state()
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        state["cuda"] = cuda.get_rng_state()
    return state


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators of random numbers to the states that :func:`random_state` has returned."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def renew_random_state(step: int) -> None:
    """Seed the generators of random numbers from torch's first seed and ``step``, as their states are lost.

    With the first seed alone, the program would draw the random numbers of its first steps again.
    """
    seed = (torch.initial_seed() + 1_000_003 * step) % (1 << 63)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def join_index(parts: list[bytes]) -> bytes:
    """Return the parts of a copy's index (what a copy has beside the data of the tensors) as one: a checksum,
    then the length and the content of each part.
    """
    joined = b"".join(piece for part in parts for piece in (layout.pack([len(part)]), part))
    return layout.pack([crc32(joined)]) + joined


def split_index(index: bytes) -> list[bytes]:
    """Return the parts that :func:`join_index` has joined.

    Raises:
        ValueError: the checksum of the parts is wrong.
    """
    if layout.unpack(index[: layout.WORD]) != (crc32(index[layout.WORD :]),):
        raise ValueError("its checksum is wrong")
    parts, at = [], layout.WORD
    while at < len(index):
        start = at + layout.WORD
        at = start + layout.unpack(index[at:start])[0]
        parts.append(index[start:at])
    return parts
