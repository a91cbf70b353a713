"""Tests for the reserved port and for counting devices without torch."""

import io
import itertools
import json
import os
import socket
import sys
import types
from pathlib import Path

import pytest
from helpers.fake_nvml import gpus

from elasticrs._engine.gpus import devices
from elasticrs._engine.gpus.devices import (
    Count,
    CountError,
    UnknownDeviceError,
    cuda_device_count,
    worker_count,
)
from elasticrs._engine.workers.plan import StorePort

__all__ = ["gpus"]


@pytest.fixture
def port():
    reserved = StorePort(is_served=False)
    yield reserved.number
    reserved.close()


def test_a_reserved_port_does_not_listen_and_cannot_be_bound_by_other_sockets(port):
    with socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.1", port))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_store_with_so_reuseaddr_can_listen_on_a_reserved_port(port, family):
    with socket.socket(family) as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            store.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        store.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        store.listen()
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_closing_releases_the_reserved_port():
    reserved = StorePort(is_served=False)
    reserved.close()
    reserved.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", reserved.number))


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1,0"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,7,0"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1234,GPU-5678"}, 2),
    ],
)
def test_the_gpu_count_follows_cuda_visible_devices(tmp_path, environ, count):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert cuda_device_count(environ, driver=str(tmp_path / "no"), dev=str(tmp_path)) == count


def test_the_gpu_list_of_the_driver_takes_precedence_over_device_files(tmp_path):
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert cuda_device_count({}, driver=str(tmp_path / "gpus"), dev=str(tmp_path)) == 1
    assert (
        cuda_device_count({"CUDA_VISIBLE_DEVICES": "0"}, driver=str(tmp_path / "no"), dev=str(tmp_path)) == 0
    )


TORCH = """
import os
class accelerator:
    is_available = staticmethod(lambda: bool(os.environ.get("ACCELERATOR")))
    current_accelerator = staticmethod(lambda: type("device", (), {"type": os.environ["ACCELERATOR"]}))
    device_count = staticmethod(lambda: 4)
class cuda:
    device_count = staticmethod(lambda: int(os.environ.get("CUDA", "0")))
class xpu:
    device_count = staticmethod(lambda: 2)
class npu:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 8)
class _C:
    _get_privateuse1_backend_name = staticmethod(lambda: "npu")
print("a greeting of the site")
"""


@pytest.fixture(autouse=True)
def torch_is_not_here(monkeypatch):
    """Remove torch from the imported modules, because another test in this process may have imported it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Return a function that counts devices with a fake torch module, on a machine without a GPU driver."""
    monkeypatch.setattr(devices, "cuda_device_count", lambda _environ: 0)
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    return lambda word, **more: worker_count(word, {**environ, **more})


def test_torch_counts_devices_in_a_child_process_if_no_other_source_can(ask, tmp_path):
    extension = tmp_path / "npu-1.dist-info"
    extension.mkdir()
    (extension / "METADATA").write_text("Name: npu\nVersion: 1\n")
    (extension / "entry_points.txt").write_text("[torch.backends]\nnpu = npu:load\n")
    source = ask("xpu").source
    assert "short-lived" in source
    assert ask("xpu") == Count(2, "xpu", source)
    assert ask("npu") == Count(8, "npu", source)
    assert ask("gpu", CUDA="3") == Count(3, "cuda", source)
    assert ask("auto", ACCELERATOR="xpu") == Count(4, "xpu", source)
    assert ask("auto").kind == "cpu"
    assert ask("auto").number == ask("cpu").number == devices.cpu_count()


def test_a_slow_import_of_torch_is_reported_while_it_runs(ask, tmp_path, monkeypatch):
    fifo = tmp_path / "continue"
    os.mkfifo(fifo)
    opened = []

    class Reader(io.StringIO):
        """Replacement for stderr. The first message written to it lets the import of torch continue."""

        def write(self, text):
            opened.append(os.open(fifo, os.O_RDWR)) if not opened else None
            return super().write(text)

    (tmp_path / "torch.py").write_text(f"{TORCH}\nos.close(os.open({str(fifo)!r}, os.O_RDONLY))\n")
    monkeypatch.setattr(devices, "SLOW", 0.01)
    monkeypatch.setattr(sys, "stderr", reader := Reader())
    try:
        assert ask("xpu").number == 2
        assert "--nproc-per-node xpu: torch" in reader.getvalue()
        assert reader.getvalue().count("\n") == 1
    finally:
        os.close(opened[0])


def test_an_already_imported_torch_counts_devices_in_this_process(ask, monkeypatch):
    torch = types.ModuleType("torch")
    exec(TORCH, vars(torch))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    count = ask("gpu")
    assert (count.number, count.kind) == (5, "cuda")
    assert "this process" in count.source
    with pytest.raises(UnknownDeviceError):
        ask("gpuu")


@pytest.fixture
def slices(tmp_path):
    """Create the GPU driver's capabilities folder for a machine with one whole GPU and one divided into MIG
    slices.
    """
    for folder in ("gpu0", "gpu1/mig/gi1", "mig"):
        (tmp_path / "capabilities" / folder).mkdir(parents=True)
    return str(tmp_path / "capabilities")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, True), ("", True), ("MIG-1,MIG-2", True), (" MIG-1", True), ("GPU-1,MIG-2", False), ("0", False)],
)
def test_mig_slices_are_detected_by_the_variable_or_the_driver(slices, visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.has_slices(environ, slices) == expected
    assert devices.has_slices(environ, slices + "/no") == (expected and bool(visible))


def test_mig_slices_are_counted_by_torch(ask, monkeypatch):
    # The driver's files report 8 GPUs. If MIG slices are visible, torch's count must be used instead.
    monkeypatch.setattr(devices, "cuda_device_count", lambda _environ: 8)
    visible = {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}
    assert ask("gpu", CUDA="1", **visible).number == 1
    assert ask("gpu").number == 8
    monkeypatch.setattr(devices, "_ask_torch", lambda _word, _environ: None)
    assert ask("gpu", **visible).number == 1
    count = ask("auto", **visible)
    assert (count.number, count.kind) == (1, "cuda")
    assert "MIG slice" in count.source


def test_a_torch_folder_in_the_working_directory_is_not_imported(ask, tmp_path, monkeypatch):
    (tmp_path / "here" / "torch").mkdir(parents=True)
    (tmp_path / "here" / "torch" / "__init__.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path / "here")
    assert ask("xpu").number == 2


def test_an_unknown_device_is_rejected_without_importing_torch(ask):
    # Importing torch would fail here, because the variable CUDA is not a number of devices.
    with pytest.raises(UnknownDeviceError):
        ask("four", CUDA="x")


def test_missing_devices_are_reported(ask):
    with pytest.raises(CountError, match=r"CUDA .*torch"):
        ask("gpu")
    with pytest.raises(UnknownDeviceError):
        ask("gpuu")
    with pytest.raises(CountError, match=r"torch .*: ValueError: invalid literal"):
        ask("gpu", CUDA="x")


def test_without_torch_and_gpus_only_cpus_can_be_counted(monkeypatch):
    monkeypatch.setattr(devices, "cuda_device_count", lambda _environ: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert worker_count("auto", {}).number == devices.cpu_count()
    with pytest.raises(CountError, match="torch"):
        worker_count("xpu", {})
    with pytest.raises(UnknownDeviceError):
        worker_count("npu", {})


def test_nvml_counts_gpus_in_a_child_process_on_wsl(ask, gpus, tmp_path, monkeypatch):
    gpus.set("count", 3)
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "WSL_DEVICE", str(tmp_path))
    assert ask("gpu") == Count(3, "cuda", "NVML")
    second = "GPU-00000001-0000-0000-0000-000000000000"
    assert ask("auto", CUDA_VISIBLE_DEVICES=f"{second},GPU-00000000") == Count(2, "cuda", "NVML")
    assert "libnvidia-ml" not in Path("/proc/self/maps").read_text()
    gpus.set("fails", "nvmlInit_v2 9")
    assert ask("gpu", CUDA="1").source.startswith("torch")


def test_nvml_does_not_count_gpus_outside_wsl(ask, gpus, monkeypatch):
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    assert ask("gpu", CUDA="1").source.startswith("torch")


ENTRIES = ("-1", "0", "1", "2", "00", "GPU-a", "GPU-b", "GPU-0", "MIG-a", "x", "")
TORCHS_SELECTION = """
import itertools, json, os, sys
from torch.cuda import _parse_visible_devices, _transform_uuid_to_ordinals
counts = []
for text, count in json.load(sys.stdin):
    os.environ["CUDA_VISIBLE_DEVICES"] = text
    listed = _parse_visible_devices()
    if listed and isinstance(listed[0], str):
        # Torch lets CUDA resolve slices.
        uuids = ["GPU-a", "GPU-b"][:count]
        counts.append(None if text.startswith("MIG-") else len(_transform_uuid_to_ordinals(listed, uuids)))
    else:
        counts.append(len(list(itertools.takewhile(lambda index: index < count, listed))))
print(json.dumps(counts))
"""


@pytest.mark.torch
def test_visible_gpus_are_selected_as_in_torch(torch_programs):
    lists = [entries for size in (1, 2, 3) for entries in itertools.product(ENTRIES, repeat=size)]
    cases = [(",".join(entries), count) for entries in lists for count in range(3)]
    output = torch_programs.checked(TORCHS_SELECTION, text=json.dumps(cases))
    for (text, count), expected in zip(cases, json.loads(output), strict=True):
        uuids = ["GPU-a", "GPU-b"][:count]
        selected = devices.visible_indices({"CUDA_VISIBLE_DEVICES": text}, uuids)
        assert expected in (None, len(selected)), (text, count)
