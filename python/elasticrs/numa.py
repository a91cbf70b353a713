"""Which CPUs are near the GPU of a worker: ``--numa-binding``, with torch's names (``torch.numa.binding``).

Everything is read from sysfs, without torch and without the ``numactl`` program; the affinity itself is set
in the worker before its program runs, for programs and functions alike.

1. Nothing here changes anything: the result is a set of CPUs for each local rank.
2. As in torch, the worker with local rank `n` has the GPU with index `n`, counted among those that
   ``CUDA_VISIBLE_DEVICES`` shows. NVIDIA's count in the order of their PCI addresses, which is CUDA's with
   ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and on machines whose GPUs are all of one kind; AMD's
   in ROCm's.
3. Only CPUs that the agent itself may use are given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from elasticrs import devices
from elasticrs.config import AFFINITY_MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["AffinityMode", "NumaOptions", "cpus_by_local_rank"]


class AffinityMode(str, Enum):
    """What a worker is bound to."""

    NODE = "node"
    """All CPUs of the GPU's NUMA node."""
    SOCKET = "socket"
    """All CPUs of the NUMA nodes in that node's socket."""
    EXCLUSIVE = "exclusive"
    """A share of the physical cores of the node, which no other GPU of the node gets."""
    CORE_COMPLEX = "core-complex"
    """Cores of the node that share their last cache; another complex for each GPU, if there are enough."""


if {mode.value for mode in AffinityMode} != set(AFFINITY_MODES):
    raise AssertionError("the command line has other modes")


@dataclass(frozen=True)
class NumaOptions:
    """How workers are bound.

    Args:
        affinity_mode: to what.
        should_fall_back_if_binding_fails: go on without binding when it cannot be found out, with a warning.
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
    """Return the CPUs of each worker of this node.

    Args:
        mode: what a worker is bound to.
        nproc: workers on this node.
        environ: for ``CUDA_VISIBLE_DEVICES`` or ``HIP_VISIBLE_DEVICES``.
        sysfs: where sysfs is mounted.
        driver: the folder in which the NVIDIA driver lists its devices.
        allowed: CPUs that may be used; the agent's own when ``None``.

    Raises:
        ValueError: the mode is none, or there is no GPU or no CPU for a worker.
        OSError: sysfs lacks what is needed.
    """
    gpus = devices.visible_gpus(environ, sysfs=sysfs, driver=driver)
    if len(gpus) < nproc:
        raise ValueError(f"{nproc} workers need one GPU each, and this machine has {len(gpus)}")
    may_use = os.sched_getaffinity(0) if allowed is None else set(allowed)
    machine = _Machine(sysfs, may_use, [gpu.address for gpu in gpus])
    choose = _CHOICES[AffinityMode(mode)]
    found = [sorted(choose(machine, index)) for index in range(nproc)]
    for index, cpus in enumerate(found):
        if not cpus:
            raise ValueError(f"no usable CPU is near GPU {index} ({gpus[index].address})")
    return found


class _Machine:
    """The machine as sysfs describes it; ``addresses``: PCI addresses of the visible GPUs in their order."""

    def __init__(self, sysfs: str, allowed: set[int], addresses: list[str]) -> None:
        self._sysfs = sysfs
        self._allowed = allowed
        self.node_of = [self._node_of_gpu(address) for address in addresses]

    def peers(self, gpu: int) -> list[int]:
        """The GPUs of the same node, this one included."""
        return [other for other, node in enumerate(self.node_of) if node == self.node_of[gpu]]

    def cpus_of_node(self, node: int) -> set[int]:
        """Return the CPUs of a node that may be used."""
        return _numbers(self._read("devices/system/node", f"node{node}", "cpulist")) & self._allowed

    def nodes_of_socket(self, node: int) -> list[int]:
        """All nodes in the socket of this one. A node without a CPU that may be used is in none."""
        socket = self._socket_of(node)
        if socket is None:
            return [node]
        nodes = _numbers(self._read("devices/system/node/online"))
        return [other for other in sorted(nodes) if self._socket_of(other) == socket]

    def core_of(self, cpu: int) -> int:
        """The physical core, named by its first CPU."""
        return min(_numbers(self._read(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")))

    def complex_of(self, cpu: int) -> int:
        """The CPUs that share its last data cache, named by the first of them."""
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
        # -1 on machines with one node.
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
    # The first GPUs get one core more each, when it does not divide.
    start = place * share + min(place, more)
    return set().union(*cores[start : start + share + (place < more)])


def _core_complex(machine: _Machine, gpu: int) -> set[int]:
    complexes = _grouped(_node(machine, gpu), machine.complex_of)
    # The largest first: some of the CPUs of the others may not be used.
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
    """The numbers of a list such as ``0-2,4``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
