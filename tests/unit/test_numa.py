"""Tests for the choice of CPUs near each GPU, on a simulated machine made of sysfs files."""

import pytest

from elasticrs._engine.gpus.devices import Gpu, visible_gpus
from elasticrs._engine.gpus.numa import AffinityMode, cpus_by_local_rank
from elasticrs._engine.job.config import AFFINITY_MODES

NONE = "/no/such/folder"


def cpu_list(cpus):
    return ",".join(map(str, sorted(cpus))) + "\n"


class Machine:
    """A machine with two sockets of two NUMA nodes each. Each NUMA node has four cores with two threads, and
    each pair of cores shares a cache.

    CPU n and n + 16 are the threads of core n. GPUs by their nodes.
    """

    def __init__(self, root, gpu_nodes):
        self.root = root
        for gpu, node in enumerate(gpu_nodes):
            self.write(f"bus/pci/devices/0000:{gpu + 16:02x}:00.0/numa_node", f"{node}\n")
            self.write(f"bus/pci/devices/0000:{gpu + 16:02x}:00.0/vendor", "0x10de\n")
            self.write(f"bus/pci/devices/0000:{gpu + 16:02x}:00.0/class", "0x030200\n")
        self.write("bus/pci/devices/0000:01:00.0/vendor", "0x8086\n")
        self.write("bus/pci/devices/0000:01:00.0/class", "0x030000\n")
        self.write("devices/system/node/online", "0-3\n")
        for node in range(4):
            cores = range(4 * node, 4 * node + 4)
            self.write(
                f"devices/system/node/node{node}/cpulist",
                f"{cores[0]}-{cores[3]},{16 + cores[0]}-{16 + cores[3]}\n",
            )
            for core in cores:
                pair = {core & ~1, core | 1}
                for cpu in (core, core + 16):
                    at = f"devices/system/cpu/cpu{cpu}"
                    self.write(f"{at}/topology/physical_package_id", f"{node // 2}\n")
                    self.write(f"{at}/topology/thread_siblings_list", cpu_list({core, core + 16}))
                    caches = [
                        ("Data", 1, {core, core + 16}),
                        ("Instruction", 4, {core}),
                        ("Unified", 3, pair | {c + 16 for c in pair}),
                    ]
                    for index, (kind, level, shared) in enumerate(caches):
                        self.write(f"{at}/cache/index{index}/type", kind + "\n")
                        self.write(f"{at}/cache/index{index}/level", f"{level}\n")
                        self.write(f"{at}/cache/index{index}/shared_cpu_list", cpu_list(shared))
                    self.write(f"{at}/cache/uevent", "")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cpus(self, mode, nproc, allowed=range(32), environ=None):
        environ = environ or {}
        return cpus_by_local_rank(mode, nproc, environ, sysfs=str(self.root), driver=NONE, allowed=allowed)


def node(number):
    first = 4 * number
    return [*range(first, first + 4), *range(first + 16, first + 20)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    # Three GPUs on NUMA node 1, one on node 3, and one whose node is unknown.
    return Machine(tmp_path_factory.mktemp("sys"), [1, 1, 1, 3, -1])


def test_the_command_line_has_all_modes():
    assert {mode.value for mode in AffinityMode} == set(AFFINITY_MODES)


def test_socket_mode_omits_numa_nodes_without_allowed_cpus(machine):
    assert machine.cpus("socket", 1, allowed=node(1)) == [node(1)]


def test_exclusive_mode_requires_one_core_per_gpu(machine):
    with pytest.raises(ValueError, match=r"NUMA node 1\b.*\b2\b.*\b3 GPUs"):
        machine.cpus("exclusive", 1, allowed=[4, 5, 20])


def test_gpu_indices_follow_cuda_visible_devices(machine):
    assert machine.cpus("node", 2, environ={"CUDA_VISIBLE_DEVICES": "3,0"}) == [node(3), node(1)]


def test_more_workers_than_gpus_raises_an_error(machine):
    with pytest.raises(ValueError, match=r"\b6, GPUs: 5\b"):
        machine.cpus("node", 6)


def test_a_gpu_without_allowed_cpus_raises_an_error(machine):
    for mode in ("node", "socket", "core-complex"):
        with pytest.raises(ValueError, match=r"GPU 0 \(0000:10:00.0\)"):
            machine.cpus(mode, 1, allowed=[31])


def driver(folder, uuids):
    for index, uuid in enumerate(uuids):
        at = folder / f"0000:{index + 16:02x}:00.0"
        at.mkdir(parents=True)
        (at / "information").write_text(
            f"Model: \t\t NVIDIA X\nGPU UUID: \t {uuid}\nDevice Minor: \t {index}\n"
        )
    return str(folder)


def test_gpus_are_selected_by_the_uuids_that_the_driver_lists(tmp_path):
    at = driver(tmp_path / "gpus", ["GPU-aa11", "GPU-aa22", "GPU-bb33"])

    def shown(visible):
        return [gpu.uuid for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": visible}, sysfs=NONE, driver=at)]

    assert visible_gpus({}, sysfs=NONE, driver=at)[2] == Gpu("0000:12:00.0", "GPU-bb33")
    assert shown("GPU-bb,GPU-aa1") == ["GPU-bb33", "GPU-aa11"]
    assert shown("GPU-bb,0") == ["GPU-bb33"]
    # `GPU-aa` is ignored because it is a prefix of two UUIDs. Everything after an invalid entry is ignored.
    assert shown("2,GPU-aa,1") == ["GPU-bb33"]
    assert shown("GPU-cc") == []
    assert shown("1,MIG-xyz") == ["GPU-aa22"]


def test_amd_gpus_are_found_through_the_kfd_driver(tmp_path):
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    described = [
        "cpu_cores_count 64\nsimd_count 0\nlocation_id 0\ndomain 0\n",
        "simd_count 304\nlocation_id 29952\ndomain 0\nunique_id 0x1\n",
        "simd_count 304\nlocation_id 1288\ndomain 1\n",
    ]
    for number, text in zip((0, 2, 10), described, strict=True):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(text)
    (nodes / "11").mkdir()  # a node whose properties cannot be read

    def shown(**environ):
        return [gpu.address for gpu in visible_gpus(environ, sysfs=str(tmp_path), driver=NONE)]

    assert shown() == ["0000:75:00.0", "0001:05:01.0"]
    assert shown(HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="0") == ["0001:05:01.0"]
    assert shown(HIP_VISIBLE_DEVICES="", CUDA_VISIBLE_DEVICES="0") == ["0000:75:00.0"]


AGAINST_TORCH = """
import builtins, os, random, sys
import torch.numa.binding as theirs
from elasticrs._engine.gpus.numa import AffinityMode, cpus_by_local_rank

root, nodes = sys.argv[1], list(map(int, sys.argv[2].split(",")))

def there(path):
    assert path.startswith("/sys/"), path
    return root + path[len("/sys"):]

class Os:
    path = os.path
    listdir = staticmethod(lambda path: os.listdir(there(path)))

theirs.open = lambda path: builtins.open(there(path))
theirs.os = Os
theirs._get_device_count = lambda: len(nodes)
theirs._get_numa_node_index_for_device_index = lambda *, device_index: max(nodes[device_index], 0)
theirs._get_systemwide_numa_node_indices = lambda: {0, 1, 2, 3}

def torchs(mode, gpu):
    options = theirs.NumaOptions(theirs.AffinityMode(mode.value))
    try:
        found = theirs._get_logical_cpus_to_bind_to(device_index=gpu, numa_options=options)
    except (RuntimeError, ValueError, ZeroDivisionError):
        return None
    return sorted(found) or None

compared = 0
random.seed(0)
for _ in range(100):
    allowed = set(random.sample(range(32), random.randint(1, 32)))
    theirs._get_allowed_cpu_indices_for_current_thread = lambda: allowed
    for mode in AffinityMode:
        expected = [torchs(mode, gpu) for gpu in range(len(nodes))]
        try:
            ours = cpus_by_local_rank(mode, len(nodes), {}, sysfs=root, driver="/no", allowed=allowed)
        except ValueError:
            assert None in expected, (mode, allowed)
            continue
        for mine, his in zip(ours, expected, strict=True):
            # Torch gives up when any node of the machine has no CPU that may be used.
            assert mine == his or (mode is AffinityMode.SOCKET and his is None), (mode, allowed, mine, his)
            compared += his is not None
print(compared)
"""


@pytest.mark.torch
def test_torch_chooses_the_same_cpus(machine, torch_programs):
    output = torch_programs.checked(AGAINST_TORCH, str(machine.root), "1,1,1,3,-1")
    assert int(output.split()[-1]) > 400
