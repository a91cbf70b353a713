"""Counts the workers that a node can run, and finds its visible GPUs, without importing torch.

The first source is the driver's files, or NVML on Windows Subsystem for Linux, which lacks these files. The
second source is torch. NVML runs in a child process, because it leaves threads and file descriptors behind.
Torch also runs in a child process, unless it is already imported.
"""

from __future__ import annotations

import os
from itertools import takewhile

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

DRIVER = "/proc/driver/nvidia/gpus"
CAPABILITIES = "/proc/driver/nvidia/capabilities"
WSL_DEVICE = "/dev/dxg"
"""Path that exists on Windows Subsystem for Linux if the machine has a GPU."""
CHILD_TIMEOUT = 120.0
"""Time limit in seconds for a child process to import torch, which is slow on a network file system."""
SLOW = 5.0

_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


class Gpu(Value):
    """CUDA or ROCm GPU with its PCI address, as in ``0000:3b:00.0``, and its UUID (empty if unknown)."""

    address: str
    uuid: str = ""


class Count(Value):
    """Number of devices, its source, and their kind: ``cuda``, ``xpu``, …, or ``cpu`` if there are none."""

    number: int
    kind: str
    source: str


class CountError(ValueError):
    """Raised if the devices could not be counted, or if there are none."""


class UnknownDeviceError(CountError):
    """Raised if no kind of device has this name."""


def cpu_count() -> int:
    """Count the CPUs in the affinity mask of this process, as torchrun does."""
    return len(os.sched_getaffinity(0))


def worker_count(word: str, environ: Mapping[str, str]) -> Count:
    """Return the number of workers for ``--nproc-per-node WORD``, by torchrun's rules.

    ``word`` is ``cpu``, ``gpu`` (CUDA), ``auto`` (any accelerator, else CPUs), ``xpu``, or a device of an
    extension of torch. Raise :class:`CountError` if there is no such device, or torch is needed but missing.
    """
    if word == "cpu":
        return Count(cpu_count(), "cpu", "the operating system")
    sliced = word in ("gpu", "auto") and has_slices(environ)
    if word in ("gpu", "auto") and not sliced:
        count = cuda_device_count(environ)
        if count:
            return Count(count, "cuda", "the driver's files")
        count = _nvml_count(environ)
        if count:
            return Count(count, "cuda", "NVML")
    found = _ask_torch(word, environ)
    if found is None and sliced:
        return Count(1, "cuda", "the rule that CUDA shows a process one MIG slice")
    if found is None and word == "auto":
        return Count(cpu_count(), "cpu", "the operating system")
    if found is None and word not in ("gpu", "xpu"):
        raise UnknownDeviceError(word)
    if found is None or found.number == 0:
        why = "torch, which could count others, is not installed" if found is None else "torch sees none"
        name = "CUDA" if word == "gpu" else word
        raise CountError(f"this machine has no {name} device ({why})")
    return found


def has_slices(environ: Mapping[str, str], capabilities: str = CAPABILITIES) -> bool:
    """Return true if GPUs are divided into MIG slices, unless ``CUDA_VISIBLE_DEVICES`` starts with a GPU.
    CUDA shows a process only one slice, even if the variable lists several, so slices are not counted.
    """
    first = environ.get(_CUDA, "").split(",")[0].strip()
    if first:
        return first.startswith("MIG-")
    folders = [os.path.join(capabilities, gpu, "mig") for gpu in _names(capabilities)]
    return any(name.startswith("gi") for folder in folders for name in _names(folder))


def cuda_device_count(environ: Mapping[str, str], driver: str = DRIVER, dev: str = "/dev") -> int:
    """Return the number of CUDA devices that a worker would see, according to the driver's files.
    As in CUDA, the first entry of ``CUDA_VISIBLE_DEVICES`` that is not a device hides itself and all later
    entries. If ``driver`` is missing, as in containers, the device nodes in ``dev`` are counted.
    """
    uuids = [gpu.uuid for gpu in _driver_gpus(driver)] or [""] * _device_nodes(dev)
    return len(visible_indices(environ, uuids))


def visible_gpus(environ: Mapping[str, str], *, sysfs: str = "/sys", driver: str = DRIVER) -> list[Gpu]:
    """Return the CUDA or ROCm devices that a worker would see, in index order.
    With ROCm, ``HIP_VISIBLE_DEVICES`` takes precedence over ``CUDA_VISIBLE_DEVICES``.
    """
    gpus, name = _driver_gpus(driver), _CUDA
    if not gpus:
        gpus = _kfd_gpus(sysfs)
        if gpus:
            name = _HIP if environ.get(_HIP) else _CUDA
        else:
            gpus = _pci_gpus(sysfs)
    return [gpus[index] for index in visible_indices(environ, [gpu.uuid for gpu in gpus], name)]


def visible_indices(environ: Mapping[str, str], uuids: Sequence[str], name: str = _CUDA) -> list[int]:
    text = environ.get(name)
    if text is None:
        return list(range(len(uuids)))
    # Like torch, stop at the first entry of a different kind, such as a UUID after an index. A repeated entry
    # hides all devices, even after a missing device, at which the lookup stops.
    entries = [entry.strip() for entry in text.split(",")]
    listed = list(takewhile(lambda entry: _kind(entry) == _kind(entries[0]), entries))
    names = {int(entry) if _is_ordinal(entry) else entry for entry in listed}
    if len(names) < len(listed):
        return []
    found: list[int] = []
    for entry in listed:
        index = _index(entry, uuids, found)
        if index is None:
            break
        if index in found:
            # Two different entries are prefixes of the same UUID, which hides all devices.
            return []
        found.append(index)
    return found


def _kind(entry: str) -> str:
    return "ordinal" if _is_ordinal(entry) else entry[:4]


def _is_ordinal(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _index(name: str, uuids: Sequence[str], taken: Sequence[int]) -> int | None:
    if _is_ordinal(name):
        return int(name) if int(name) < len(uuids) else None
    if not name.startswith(("GPU-", "MIG-")):
        return None
    # CUDA accepts a prefix of a UUID if it matches only one device.
    matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(name)]
    if matches:
        return matches[0] if len(matches) == 1 else None
    if name.startswith("GPU-") and any(uuids):
        return None
    # The entry names a MIG slice, or the driver reports no UUIDs. Assume the first device not selected yet.
    return next((index for index in range(len(uuids)) if index not in taken), None)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read(*path: str) -> str:
    try:
        with open(os.path.join(*path), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _driver_gpus(driver: str) -> list[Gpu]:
    return [Gpu(address, _uuid(_read(driver, address, "information"))) for address in _names(driver)]


def _uuid(text: str) -> str:
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "GPU UUID"), "")


def _kfd_gpus(sysfs: str) -> list[Gpu]:
    """Return AMD GPUs in the order of the compute driver's nodes, which is also ROCm's order."""
    folder = os.path.join(sysfs, "class/kfd/kfd/topology/nodes")
    nodes = sorted(filter(str.isdecimal, _names(folder)), key=int)
    found = (_kfd_properties(_read(folder, node, "properties")) for node in nodes)
    # Skip the nodes without SIMD units, which are CPUs.
    return [Gpu(_kfd_address(each)) for each in found if each.get("simd_count")]


def _kfd_properties(text: str) -> dict[str, int]:
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}


def _kfd_address(properties: Mapping[str, int]) -> str:
    # The lowest 16 bits contain bus, device and function. The function number counts partitions, and is
    # not part of the PCI address.
    location = properties.get("location_id", 0)
    return f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"


def _pci_gpus(sysfs: str) -> list[Gpu]:
    folder = os.path.join(sysfs, "bus/pci/devices")
    return [Gpu(address) for address in _names(folder) if _is_nvidia_gpu(os.path.join(folder, address))]


def _is_nvidia_gpu(folder: str) -> bool:
    return _read(folder, "vendor").strip() == _NVIDIA and _read(folder, "class").startswith(_DISPLAY_CLASSES)


def _device_nodes(dev: str) -> int:
    return sum(name.startswith("nvidia") and name[6:].isdecimal() for name in _names(dev))


def _nvml_count(environ: Mapping[str, str]) -> int:
    if not os.path.exists(WSL_DEVICE):
        return 0
    import subprocess

    from elasticrs._engine.process.other_processes import command

    try:
        done = subprocess.run(
            command("elasticrs._engine.gpus.nvml"),
            capture_output=True,
            text=True,
            check=False,
            timeout=CHILD_TIMEOUT,
        )
    except (subprocess.TimeoutExpired, OSError):
        # The driver hangs, or the child process could not be started. Torch may still find devices.
        return 0
    return len(visible_indices(environ, done.stdout.split()))


def _ask_torch(word: str, environ: Mapping[str, str]) -> Count | None:
    """Return the number of devices that torch finds; ``None`` if torch is not installed."""
    import subprocess
    import sys
    from importlib.util import find_spec

    from elasticrs._engine.gpus import torch_devices

    if (torch := sys.modules.get("torch")) is not None:
        return _counted(word, *torch_devices.count(torch, word), "torch, in this process")
    if find_spec("torch") is None:
        return None
    python = environ.get("PYTHON_EXEC") or sys.executable
    if word not in ("gpu", "xpu", "auto") and python == sys.executable and not _has_extensions():
        # Do not import torch to check a mistyped name.
        raise UnknownDeviceError(word)
    command = [python, torch_devices.__file__, word]
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(command, env=dict(environ), stdout=pipe, stderr=pipe, text=True) as child:
            try:
                stdout, stderr = _outputs(child, word)
            except BaseException:
                child.kill()
                raise
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CountError(f"torch could not count the devices: {error}") from None
    if child.returncode != 0:
        last = (stderr.strip().splitlines() or ["no message"])[-1]
        raise CountError(f"torch could not count the devices: {last}")
    _, kind, number = stdout.splitlines()[-1].split()
    return _counted(word, kind, int(number), "torch, in a short-lived process")


def _has_extensions() -> bool:
    """Find out if extensions of torch are installed. They may define further types of devices."""
    from importlib.metadata import entry_points

    return bool(entry_points(group="torch.backends"))


def _outputs(child: subprocess.Popen[str], word: str) -> tuple[str, str]:
    import subprocess
    import sys

    from elasticrs._engine.process.console import Console

    try:
        return child.communicate(timeout=SLOW)
    except subprocess.TimeoutExpired:
        line = (
            f"--nproc-per-node {word}: torch, which counts the devices, is still being imported after "
            f"{SLOW:g} s (at most {CHILD_TIMEOUT:g} s); a number in place of {word} avoids the import"
        )
        print(Console().prefixed(line), file=sys.stderr, flush=True)
    return child.communicate(timeout=CHILD_TIMEOUT - SLOW)


def _counted(word: str, kind: str, number: int, source: str) -> Count:
    if kind == "unknown":
        raise UnknownDeviceError(word)
    if kind == "cpu":
        return Count(cpu_count(), "cpu", "torch, which sees no accelerator")
    return Count(number, kind, source)
