"""What the state of a training program is at the end of a step.

The tensors of modules and optimizers are *large*: they are held by reference, and copied later. The rest is
*small*: random numbers, small buffers, the states of other objects. It is held by value.
"""

from __future__ import annotations

import random
import sys
from array import array
from hashlib import blake2b
from operator import attrgetter, is_
from zlib import crc32

import torch
from torch.nn.parameter import is_lazy

from elasticrs._engine.inside.keep import layout, trees
from elasticrs._engine.inside.keep.file import round_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from elasticrs._engine.inside.keep.trees import Leaves, Path

SMALL = 1 << 16
"""Maximum bytes of a buffer that is held by value."""

_ALIGNMENT = 64
"""Bytes to which the data of each tensor is aligned."""

_RECHECKED = 256
"""Number of steps after which the tensors of the state are looked up again in any case."""

_COMMON = ("torch.optim.lr_scheduler", "torch.amp.grad_scaler")
"""Modules of torch with objects whose state is the same on all ranks."""

_version = attrgetter("_version")


class Parts:
    """The large tensors of a state.

    ``tensors`` has each tensor once, ``offsets`` where its data is, and ``size`` the bytes of all.
    ``paths`` names the tensors, and ``facts`` describes them to the one who restores them.
    """

    def __init__(self, skeletons: dict[str, Any], large: Leaves, of_optimizers: Leaves) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self.offsets: list[int] = []
        entries, at, seen = [], 0, dict[int, int]()
        for path, leaf in large + of_optimizers:
            tensor = trees.plain(leaf, path)
            size = tensor.numel() * tensor.element_size()
            if id(tensor) not in seen:  # Tied tensors are copied once.
                seen[id(tensor)] = at
                self.tensors.append(tensor)
                self.paths.append(path)
                self.offsets.append(at)
                at = round_up(at + size, _ALIGNMENT)
            facts = trees.dtype_name(tensor.dtype), tuple(tensor.shape)
            more = trees.strides_of(tensor), trees.place_of(leaf)
            entries.append((path, *facts, seen[id(tensor)], size, *more))
        self.is_sharded = any(trees.is_shard(leaf) for _, leaf in large)
        """True if a tensor is a part of one that several ranks hold together."""
        self.size = at
        self.facts = trees.dump((skeletons, entries))
        self.layout = int.from_bytes(blake2b(repr(entries).encode(), digest_size=8).digest(), "little")
        self.is_on_cpu = all(tensor.device.type == "cpu" for tensor in self.tensors)
        # Nothing but the optimizer changes its own tensors. To look at them would take longer than the rest.
        own = {id(leaf) for _, leaf in of_optimizers}
        self._versioned = [each for each in self.tensors if id(each) not in own and not each.is_inference()]

    def versions(self) -> list[int]:
        """Return torch's version of each tensor. It grows with most changes of the content."""
        return list(map(_version, self._versioned))

    def changed(self, versions: list[int]) -> Path | None:
        """Return the name of a tensor whose version is not that in ``versions``."""
        for tensor, before in zip(self._versioned, versions, strict=True):
            if tensor._version != before:
                return next(
                    path for path, each in zip(self.paths, self.tensors, strict=True) if each is tensor
                )
        return None


class Boundary:
    """The state at the end of a step. ``groups`` are the settings of the optimizers, such as learning rates,
    ``small`` is the encoded small state, and ``common`` that of the objects that are the same on all ranks.
    ``before`` has the step and the small state of the boundary before; it is empty if there is none.
    """

    def __init__(
        self, step: int, parts: Parts, groups: dict[str, Any], small: bytes, common: bytes, before: bytes
    ) -> None:
        self.step, self.parts, self.groups = step, parts, groups
        self.small, self.common, self.before = small, common, before
        self.versions = parts.versions()

    def index(self) -> bytes:
        """Return what a slot holds beside the data of the tensors: five parts."""
        return join_index([self.parts.facts, trees.encode(self.groups), self.small, self.common, self.before])


class Collector:
    """Collects the state of a program.

    Args:
        objects: the objects of the program, by their names.
        values: plain values of the program.

    Raises:
        TypeError: an object has no state.
    """

    def __init__(self, objects: Mapping[str, Any], values: dict[str, Any]) -> None:
        for name, each in objects.items():
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise TypeError(
                    f"{name} must have state_dict() and load_state_dict(), got {type(each).__qualname__}"
                )
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
        """Names of the objects whose state is the same on all ranks."""
        self._values = values
        self._before = b""
        self._skeletons: dict[str, Any] = {}
        self._large: Leaves = []
        self._of_optimizers: Leaves = []
        self._of_others: Leaves = []
        self._parts: Parts | None = None
        self._volatile: dict[Path, torch.Tensor] = {}
        self._watch: list[Callable[[], list[Any]]] = []
        self._seen: list[Any] = []
        self._age = 0

    def boundary(self, step: int) -> Boundary:
        """Return the state at the end of a step.

        Raises:
            OffError: there is a tensor that cannot be copied.
        """
        is_same = self._refresh()
        states = self._states(self.others)
        leaves: Leaves = []
        trees.take_apart(states, (), leaves)
        of_others = [(path, leaf) for path, leaf in leaves if is_large(leaf)]
        is_same &= [path for path, _ in of_others] == [path for path, _ in self._of_others]
        is_same &= all(
            now is before for (_, now), (_, before) in zip(of_others, self._of_others, strict=False)
        )
        if self._parts is None or not is_same:
            self._of_others = of_others
            self._parts = Parts(self._skeletons, self._large + of_others, self._of_optimizers)
        groups = {name: _settings(optimizer) for name, optimizer in self.optimizers.items()}
        common = {name: states.pop(name) for name in self.common}
        before, small = self._before, self._small(states)
        self._before = layout.pack([step]) + small
        return Boundary(step, self._parts, groups, small, trees.encode(common, is_large), before)

    def begin_after(self, step: int) -> bytes:
        """Take what is there now for the state at the end of a step. Return the encoded small state."""
        self.layout()
        small = self.small()
        self._before = layout.pack([step]) + small
        return small

    def small(self) -> bytes:
        """Return the encoded small state of now."""
        return self._small(self._states(self.others.keys() - self.common))

    def layout(self) -> tuple[dict[str, Any], Leaves, dict[Path, torch.Tensor]]:
        """Return the skeletons, large tensors and small buffers of the modules and optimizers as of now."""
        self._watch = []
        self._refresh()
        return self._skeletons, self._large, self._volatile

    def versions(self) -> list[int]:
        """Return torch's version of each parameter of the modules."""
        return [each._version for each in self._parameters() if not each.is_inference()]

    def has_gradients(self) -> bool:
        """Return true if a parameter of the modules has a gradient."""
        return any(each.grad is not None for each in self._parameters())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [each for module in self.modules.values() for each in module.parameters() if not is_lazy(each)]

    def is_complete(self) -> bool:
        """Return false if the shape of a parameter is not known before the first step."""
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
        """Look up the tensors of modules and optimizers. Return true if they are the same as before."""
        self._age += 1
        if self._watch and self._age % _RECHECKED:
            now = [each for watched in self._watch for each in watched()]
            if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
                return True
        self._watch, self._volatile, self._skeletons = [], {}, {}
        self._large, self._of_optimizers = [], []
        # Ask all, because each fills these tables.
        are_cacheable = [self._take_module(name, each) for name, each in self.modules.items()]
        are_cacheable += [self._take_optimizer(name, each) for name, each in self.optimizers.items()]
        if not all(are_cacheable):
            self._watch = []
        self._seen = [each for watched in self._watch for each in watched()]
        return False

    def _take_module(self, name: str, module: torch.nn.Module) -> bool:
        """Take the state of a module. Return true if it stays the same while its tensors are the same."""
        state = module.state_dict(keep_vars=True) if _is_plain(module) else module.state_dict()
        leaves: Leaves = []
        self._skeletons[name] = trees.take_apart(state, (name,), leaves)
        for path, leaf in leaves:
            # The optimizer changes parameters, and only before the end of the step. Forward changes buffers.
            # A `DTensor` is large in any case, because only the large part says where a shard belongs.
            if isinstance(leaf, torch.nn.Parameter) or is_large(leaf) or hasattr(leaf, "placements"):
                self._large.append((path, leaf))
            else:
                self._volatile[path] = leaf
        tables = [table for each in module.modules() for table in (each._parameters, each._buffers) if table]
        self._watch.append(lambda: [each for table in tables for each in table.values()])
        return is_live(module, state)

    def _take_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> bool:
        """Take the state of an optimizer. Return as :meth:`_take_module`."""
        state = optimizer.state_dict()
        params = [group["params"] for group in state.pop("param_groups")]
        leaves: Leaves = []
        skeleton = trees.take_apart(state, (name,), leaves)
        self._skeletons[name] = {**skeleton, "params": params, "names": self._names(optimizer)}
        self._of_optimizers += leaves
        # Ask the optimizer for its tables each time, because it makes new ones when it loads a state.
        self._watch += [
            lambda: [each for entry in optimizer.state.values() for each in entry.values()],
            lambda: [group["params"] for group in optimizer.param_groups],
        ]
        is_plain = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        # LBFGS appends to lists, which stay the same object.
        scalars = (torch.Tensor, int, float, type(None))
        return is_plain and all(
            isinstance(v, scalars) for entry in optimizer.state.values() for v in entry.values()
        )

    def _names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of an optimizer's parameters, by group; empty names for those of other modules."""
        found = {
            id(each): name for module in self.modules.values() for name, each in module.named_parameters()
        }
        return [[found.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]


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
    """Return true if a leaf is held by reference."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() > SMALL


def random_state() -> dict[str, Any]:
    """Return the states of the generators of random numbers that the program uses."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": (version, array("I", numbers).tobytes(), gauss),
    }
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state["numpy"] = numpy.get_state()
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        state["cuda"] = cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators of random numbers."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def renew_random_state(step: int) -> None:
    """Seed the generators of random numbers by their first seed and a step, because their state is lost.

    If they began anew, the program would draw the numbers of its first steps again.
    """
    seed = (torch.initial_seed() + 1_000_003 * step) % (1 << 63)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def join_index(parts: list[bytes]) -> bytes:
    """Return the parts of a slot's index as one, each after its length, and behind their checksum."""
    joined = b"".join(piece for part in parts for piece in (layout.pack([len(part)]), part))
    return layout.pack([crc32(joined)]) + joined


def split_index(index: bytes) -> list[bytes]:
    """Reverse :func:`join_index`.

    Raises:
        ValueError: the checksum is wrong.
    """
    if layout.unpack(index[: layout.WORD]) != (crc32(index[layout.WORD :]),):
        raise ValueError("its checksum is wrong")
    parts, at = [], layout.WORD
    while at < len(index):
        start = at + layout.WORD
        at = start + layout.unpack(index[at:start])[0]
        parts.append(index[start:at])
    return parts
