"""Choose CPUs near each worker's GPU (``--numa-binding``). The class names match those in
``torch.numa.binding``.

All data comes from sysfs, without torch and without the ``numactl`` program. The affinity itself is set in
the worker, before its program or function runs.

1. This module does not change any settings. Its result is a set of CPUs for each local rank.
2. As in torch, the worker with local rank `n` has the GPU with index `n` among the GPUs that
``CUDA_VISIBLE_DEVICES`` shows. NVIDIA GPUs are counted in the order of their PCI addresses. This is CUDA's
order with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and on machines with a single kind of GPU. AMD GPUs are counted
in ROCm's order.
3. Workers get only CPUs that the agent itself may use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from elasticrs._engine.gpus import devices
from elasticrs._engine.job.config import AFFINITY_MODES

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
    """A share of the physical cores of the GPU's NUMA node. Each GPU of the node gets an equal share, and no
    core belongs to two shares.
    """
    CORE_COMPLEX = "core-complex"
    """A group of cores of the GPU's NUMA node with a common last-level cache. If there are enough groups,
    each GPU gets a different group.
    """


if {mode.value for mode in AffinityMode} != set(AFFINITY_MODES):
    raise AssertionError("the command line has other modes")


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

    Args:
        mode: set of CPUs to which a worker is bound.
        nproc: number of workers on this node.
        environ: environment variables, for ``CUDA_VISIBLE_DEVICES`` or ``HIP_VISIBLE_DEVICES``.
        sysfs: mount point of sysfs.
        driver: folder in which the NVIDIA driver lists its devices.
        allowed: CPUs that may be used; the agent's CPUs if ``None``.

    Raises:
        ValueError: the mode is unknown, or there is no GPU or no CPU for a worker.
        OSError: sysfs does not contain the required information.
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
    """Return the CPUs for each worker, indexed by local rank. Return ``None`` if workers are not bound to
    CPUs.

    Raises:
        ValueError, OSError: the workers cannot be bound, and the options require that they are.
    """
    if options is None:
        return None
    try:
        # Pass the value instead of the enum member, because torch's enum is a different class with the same
        # values.
        return cpus_by_local_rank(options.affinity_mode.value, nproc, os.environ)
    except (ValueError, OSError) as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        import logging

        logging.getLogger("elasticrs.agent").warning("workers are not bound to CPUs: %s", error)
        return None


class _Machine:
    """Topology of the machine according to sysfs. ``addresses`` lists the PCI addresses of the visible GPUs,
    in index order.
    """

    def __init__(self, sysfs: str, allowed: set[int], addresses: list[str]) -> None:
        self._sysfs = sysfs
        self._allowed = allowed
        self.node_of = [self._node_of_gpu(address) for address in addresses]

    def peers(self, gpu: int) -> list[int]:
        """Return the indexes of all GPUs on the same NUMA node as ``gpu``, including ``gpu`` itself."""
        return [other for other, node in enumerate(self.node_of) if node == self.node_of[gpu]]

    def cpus_of_node(self, node: int) -> set[int]:
        """Return the agent's allowed CPUs on a NUMA node."""
        return _numbers(self._read("devices/system/node", f"node{node}", "cpulist")) & self._allowed

    def nodes_of_socket(self, node: int) -> list[int]:
        """Return the NUMA nodes on the same socket as ``node``, including ``node`` itself. Other nodes
        without usable CPUs are left out, because their socket is unknown.
        """
        socket = self._socket_of(node)
        if socket is None:
            return [node]
        nodes = _numbers(self._read("devices/system/node/online"))
        return [other for other in sorted(nodes) if self._socket_of(other) == socket]

    def core_of(self, cpu: int) -> int:
        """Return the physical core of a CPU, identified by the lowest CPU number on that core."""
        return min(_numbers(self._read(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")))

    def complex_of(self, cpu: int) -> int:
        """Return the group of CPUs that share their last-level data cache with ``cpu``. The lowest CPU number
        in the group identifies it.
        """
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
        # Use node 0 if sysfs reports -1, as it does on machines with a single NUMA node.
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
    # If the cores do not divide evenly, the first GPUs get one extra core each.
    start = place * share + min(place, more)
    return set().union(*cores[start : start + share + (place < more)])


def _core_complex(machine: _Machine, gpu: int) -> set[int]:
    complexes = _grouped(_node(machine, gpu), machine.complex_of)
    # Assign the largest core complexes (cores that share a cache) first. Complexes may have different sizes,
    # because the agent may be restricted to some of the CPUs.
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
