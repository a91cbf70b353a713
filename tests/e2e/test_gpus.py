"""Tests with a CUDA device: the number of devices, a choice among them, and CPUs near them."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.procs import run_program

from elasticrs._engine.gpus.devices import CountError, has_slices, visible_gpus, worker_count

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(150)]

COUNT = "import torch; print(torch.cuda.device_count())"


def counted_by_torch(environ):
    command = [sys.executable, "-c", COUNT]
    return int(run_program(command, check=True, env=environ).stdout)


def counted_here(environ):
    try:
        return worker_count("gpu", environ).number
    except CountError:
        return 0


@pytest.fixture(scope="module")
def environ():
    """Return the environment without CUDA_VISIBLE_DEVICES."""
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}


@pytest.fixture(scope="module")
def count(environ):
    return counted_by_torch(environ)


def test_the_device_count_matches_torch(environ, count):
    uuid = visible_gpus(environ)[0].uuid
    choices = ["", "-1", "0", f"0,{count}", "0,0", f"{count - 1},{count},0", f"0,{count},0", uuid, uuid[:12]]
    for choice in choices:
        chosen = {**environ, "CUDA_VISIBLE_DEVICES": choice}
        assert counted_here(chosen) == counted_by_torch(chosen), choice
    assert counted_here(environ) == count
    if not has_slices(environ):
        assert worker_count("auto", environ).source == "the driver's files"


SHOW = """
    import json, os, torch
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    shown = {
        "local_rank": os.environ["LOCAL_RANK"],
        "seen": torch.cuda.device_count(),
        "address": address,
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    os.write(1, (json.dumps(shown) + "\\n").encode())
"""


def shown_by(launched):
    launched.exits(0, timeout=120)
    return [json.loads(line) for line in launched.stdout.splitlines()]


def test_cuda_visible_devices_limits_the_devices_of_workers(launch, worker_script, environ, count):
    last = str(count - 1)
    chosen = {"CUDA_VISIBLE_DEVICES": last}
    (only,) = shown_by(launch("--nproc-per-node=gpu", worker_script(SHOW), env=chosen))
    assert (only["seen"], only["address"]) == (1, visible_gpus({**environ, **chosen})[0].address)


def test_virtual_local_rank_gives_each_worker_only_its_own_device(launch, worker_script, count):
    shown = shown_by(launch("--virtual-local-rank", "--nproc-per-node=gpu", worker_script(SHOW)))
    assert [(each["local_rank"], each["seen"]) for each in shown] == [("0", 1)] * count
    assert len({each["address"] for each in shown}) == count


@pytest.mark.beyond_torchrun  # torchrun needs the program numactl
def test_workers_run_on_cpus_near_their_device(launch, worker_script):
    mine = os.sched_getaffinity(0)
    for each in shown_by(launch("--numa-binding=node", "--nproc-per-node=gpu", worker_script(SHOW))):
        node = Path("/sys/bus/pci/devices", each["address"], "numa_node").read_text().strip()
        near = Path("/sys/devices/system/node", f"node{max(0, int(node))}", "cpulist").read_text()
        assert set(each["cpus"]) == numbers(near) & mine


def numbers(text):
    found = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
