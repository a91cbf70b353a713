"""Chooses CPUs near each worker's GPU (``--numa-binding``) from sysfs, with torch's class names.

As in torch, local rank `n` has the GPU with index `n` in ``CUDA_VISIBLE_DEVICES``. NVIDIA GPUs are counted by
PCI address (CUDA's order with ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or equal GPUs), AMD GPUs in ROCm's order.
Workers get only CPUs that the agent may use. The worker sets the affinity before its program runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from elasticrs._engine.gpus import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["AffinityMode", "NumaOptions", "cpus_by_local_rank", "cpus_of_options"]


class AffinityMode(str, Enum):
    """Set of CPUs to which a worker is bound."""

    NODE = "node"
    """All CPUs of the GPU's NUMA node."""
    SOCKET = "socket"
    """All CPUs of all NUMA nodes in the socket of the GPU's NUMA node."""
    EXCLUSIVE = "exclusive"
    """An equal share of the physical cores of the GPU's NUMA node, disjoint from other GPUs' shares."""
    CORE_COMPLEX = "core-complex"
    """Cores of the GPU's NUMA node with a common last-level cache, different for each GPU if possible."""


@dataclass(frozen=True)
class NumaOptions:
    """Settings for binding workers to CPUs.

    Args:
        affinity_mode: set of CPUs to bind to.
        should_fall_back_if_binding_fails: true to start the workers without binding, after a warning, if the
            CPUs cannot be determined.
    """

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False


def cpus_by_local_rank(
    mode: AffinityMode | str,
    nproc: int,
    environ: Mapping[str, str],
    *,
    sysfs: str = "/sys",
    driver: str = devices.DRIVER,
    allowed: Iterable[int] | None = None,
) -> list[list[int]]:
    """Return the CPUs for each worker on this node, indexed by local rank.
    ``allowed`` are the CPUs that may be used; the agent's CPUs if ``None``. Raise ``ValueError`` if the mode
    is unknown or a worker has no GPU or CPU, and ``OSError`` if sysfs lacks information.
    """
    gpus = devices.visible_gpus(environ, sysfs=sysfs, driver=driver)
    if len(gpus) < nproc:
        raise ValueError(f"each worker needs a GPU of its own (workers: {nproc}, GPUs: {len(gpus)})")
    may_use = os.sched_getaffinity(0) if allowed is None else set(allowed)
    machine = _Machine(sysfs, may_use, [gpu.address for gpu in gpus])
    choose = _CHOICES[AffinityMode(mode)]
    found = [sorted(choose(machine, index)) for index in range(nproc)]
    for index, cpus in enumerate(found):
        if not cpus:
            raise ValueError(f"no usable CPU is near GPU {index} ({gpus[index].address})")
    return found


def cpus_of_options(options: NumaOptions | None, nproc: int) -> list[list[int]] | None:
    """Return the CPUs by local rank; ``None`` if workers are not bound.
    Raise ``ValueError`` or ``OSError`` if binding fails, unless the options allow unbound workers.
    """
    if options is None:
        return None
    try:
        # Torch's enum is a different class with the same values.
        return cpus_by_local_rank(options.affinity_mode.value, nproc, os.environ)
    except (ValueError, OSError) as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        import logging

        logging.getLogger("elasticrs.agent").warning("workers are not bound to CPUs: %s", error)
        return None


class _Machine:
    """Topology of the machine. ``addresses`` has the PCI addresses of the visible GPUs, by GPU index."""

    def __init__(self, sysfs: str, allowed: set[int], addresses: list[str]) -> None:
        self._sysfs = sysfs
        self._allowed = allowed
        self.node_of = [self._node_of_gpu(address) for address in addresses]

    def peers(self, gpu: int) -> list[int]:
        return [other for other, node in enumerate(self.node_of) if node == self.node_of[gpu]]

    def cpus_of_node(self, node: int) -> set[int]:
        return _numbers(self._read("devices/system/node", f"node{node}", "cpulist")) & self._allowed

    def nodes_of_socket(self, node: int) -> list[int]:
        """Return the NUMA nodes on the same socket. The socket of nodes without usable CPUs is unknown."""
        socket = self._socket_of(node)
        if socket is None:
            return [node]
        nodes = _numbers(self._read("devices/system/node/online"))
        return [other for other in sorted(nodes) if self._socket_of(other) == socket]

    def core_of(self, cpu: int) -> int:
        """Return a physical core, identified by its lowest CPU number."""
        return min(_numbers(self._read(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")))

    def complex_of(self, cpu: int) -> int:
        """Return the lowest of the CPUs that share their last-level data cache with ``cpu``."""
        folder = f"devices/system/cpu/cpu{cpu}/cache"
        last, shared = 0, {cpu}
        for entry in os.listdir(os.path.join(self._sysfs, folder)):
            if not (entry.startswith("index") and entry[5:].isdecimal()):
                continue
            if self._read(folder, entry, "type") not in ("Unified", "Data"):
                continue
            level = int(self._read(folder, entry, "level"))
            if level > last:
                last, shared = level, _numbers(self._read(folder, entry, "shared_cpu_list"))
        return min(shared)

    def _socket_of(self, node: int) -> int | None:
        cpus = self.cpus_of_node(node)
        if not cpus:
            return None
        return int(self._read(f"devices/system/cpu/cpu{min(cpus)}/topology/physical_package_id"))

    def _node_of_gpu(self, address: str) -> int:
        # On machines with a single NUMA node, sysfs reports -1.
        return max(0, int(self._read("bus/pci/devices", address, "numa_node")))

    def _read(self, *path: str) -> str:
        with open(os.path.join(self._sysfs, *path), encoding="ascii") as file:
            return file.read().strip()


def _node(machine: _Machine, gpu: int) -> set[int]:
    return machine.cpus_of_node(machine.node_of[gpu])


def _socket(machine: _Machine, gpu: int) -> set[int]:
    nodes = machine.nodes_of_socket(machine.node_of[gpu])
    return set().union(*(machine.cpus_of_node(node) for node in nodes))


def _exclusive(machine: _Machine, gpu: int) -> set[int]:
    peers = machine.peers(gpu)
    cores = [cpus for _, cpus in sorted(_grouped(_node(machine, gpu), machine.core_of).items())]
    if len(cores) < len(peers):
        node = machine.node_of[gpu]
        raise ValueError(f"NUMA node {node} has {len(cores)} usable cores for {len(peers)} GPUs")
    share, more = divmod(len(cores), len(peers))
    place = peers.index(gpu)
    start = place * share + min(place, more)
    return set().union(*cores[start : start + share + (place < more)])


def _core_complex(machine: _Machine, gpu: int) -> set[int]:
    complexes = _grouped(_node(machine, gpu), machine.complex_of)
    # Core complexes may have different sizes, because the agent may be restricted to some of the CPUs.
    order = sorted(complexes.items(), key=lambda item: (-len(item[1]), item[0]))
    return order[machine.peers(gpu).index(gpu) % len(order)][1] if order else set()


_CHOICES: dict[AffinityMode, Callable[[_Machine, int], set[int]]] = {
    AffinityMode.NODE: _node,
    AffinityMode.SOCKET: _socket,
    AffinityMode.EXCLUSIVE: _exclusive,
    AffinityMode.CORE_COMPLEX: _core_complex,
}


def _grouped(cpus: Iterable[int], key: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return groups


def _numbers(text: str) -> set[int]:
    """Parse a list of numbers and ranges, such as ``0-2,4``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
