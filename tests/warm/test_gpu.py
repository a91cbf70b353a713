"""Tests for GPU workers, started cold or forked from a process that has imported torch."""

import json
import sys

import pytest
from helpers.procs import run_program

pytestmark = [
    pytest.mark.beyond_torchrun,
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

DDP = """
    import sys
    is_warm = "torch" in sys.modules
    import json, os, signal
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    free, _ = torch.cuda.mem_get_info()
    held = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    dist.init_process_group("nccl")
    model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
    model(torch.ones(16, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    shown = {"restarts": restarts, "is_warm": is_warm, "free": free}
    os.write(1, (json.dumps(shown) + "\\n").encode())
    dist.barrier()
    if restarts < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def count():
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(run_program(command, check=True).stdout)


@pytest.mark.parametrize("warm", ["off", "auto"])
def test_ddp_over_nccl_runs_after_two_restarts_and_the_dead_hold_no_memory(
    launch, worker_script, count, warm
):
    job = launch(f"--nproc-per-node={count}", "--max-restarts=2", f"--warm={warm}", worker_script(DDP)).exits(
        0, timeout=240
    )
    shown = [json.loads(line) for line in job.stdout.splitlines()]
    by_attempt = [[each for each in shown if each["restarts"] == number] for number in range(3)]
    assert [len(each) for each in by_attempt] == [count] * 3
    assert {each["is_warm"] for each in shown} == {warm == "auto"}, job.stderr
    first, *later = (min(each["free"] for each in attempt) for attempt in by_attempt)
    # If a dead worker still held memory, its 256 MiB and its CUDA context would be missing here.
    assert all(free > first - (128 << 20) for free in later), by_attempt
