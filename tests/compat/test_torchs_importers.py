"""Torch's modules that import ``torch.distributed.elastic`` work when the alias gives them ours."""

import pytest
from helpers import ports

pytestmark = [pytest.mark.torch, pytest.mark.slow]

CHECKPOINT = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

def main():
    assert executor.get_free_port.__module__.startswith("elasticrs.")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"weights{rank}": torch.full((3,), float(rank))}
    how = AsyncCheckpointerType.PROCESS
    dcp.async_save(state, checkpoint_id=sys.argv[1], async_checkpointer_type=how).result()
    read = {name: torch.zeros(3) for name in state}
    dcp.load(read, checkpoint_id=sys.argv[1])
    assert all(torch.equal(read[name], state[name]) for name in state)
    dist.barrier()
    os.write(1, b"SAVED\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

BARRIER = """
import os, sys
from torch.distributed.checkpoint._experimental import barriers

rank = int(os.environ["RANK"])
assert barriers.store_util.__name__ == "elasticrs.utils.store"
barrier = barriers.TCPStoreBarrier(rank, 2, "saved", 30, False, int(sys.argv[1]), "127.0.0.1", 30)
for number in range(3):
    barrier.execute_barrier()
    os.write(1, f"PASSED {number}\\n".encode())
"""

XEON = """
import os
os.write(1, f"RUNS {os.environ['LAUNCHED']}\\n".encode())
"""


def test_torch_saves_an_asynchronous_checkpoint_in_a_separate_process(installed, tmp_path):
    (tmp_path / "save.py").write_text(CHECKPOINT, encoding="utf-8")
    saved = tmp_path / "checkpoint"
    done = installed("-m", "elasticrs", "--nproc-per-node=2", "save.py", str(saved), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SAVED") == 2
    assert (saved / ".metadata").exists()


def test_the_checkpoint_barrier_of_torch_works(installed, tmp_path):
    (tmp_path / "meet.py").write_text(BARRIER, encoding="utf-8")
    done = installed("-m", "elasticrs", "--nproc-per-node=2", "meet.py", str(ports.free()), check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["PASSED", *"0", "PASSED", *"1", "PASSED", *"2"] * 2)


def test_the_xeon_launcher_of_torch_works(installed, tmp_path):
    (tmp_path / "infer.py").write_text(XEON, encoding="utf-8")
    how = ("--ninstances=1", "--ncores-per-instance=1", "--disable-numactl", "--disable-taskset")
    done = installed(
        *("-m", "torch.backends.xeon.run_cpu", *how, f"--log-path={tmp_path}", "infer.py"),
        check=False,
        LAUNCHED="yes",
    )
    assert done.returncode == 0, done.stderr
    assert "RUNS yes" in done.stdout, done.stderr
