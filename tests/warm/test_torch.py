"""Tests for torch in workers that are forked from a process that has imported it."""

import os

import pytest
from helpers.fidelity import ARGUED, FACTS, Job
from helpers.said import line_with

pytestmark = [
    pytest.mark.beyond_torchrun,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

TIMEOUT = 180.0

ARGUED_HERE = ARGUED | {
    r"[\d.]+/facts/seen_first/.*": "what an import does is done before the script's first line",
    r"[\d.]+/facts/descriptors/[3-9]/.*": "the file of kept state has the lowest number that was free",
}


@pytest.mark.parametrize("threads", ["1", "2", None])
def test_torch_sees_the_same_environment_warm_and_cold(launch, tmp_path, threads):
    job = Job(launch, tmp_path, "torch", TIMEOUT)
    parts = ("torch", "process", "signals", "environment", "threads", "descriptors", "state", "seen_first")
    env = {} if threads is None else {"OMP_NUM_THREADS": threads}
    outcome = job.compare("--nproc-per-node=2", FACTS, "facts", "torch", *parts, argued=ARGUED_HERE, env=env)
    assert outcome.code == 0, outcome.stderr
    for worker in outcome.workers.values():
        assert "torch" in worker.facts["seen_first"]["modules"], outcome.stderr


TRAINING = """
import sys
IS_WARM = "torch" in sys.modules
import json, multiprocessing, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, get_worker_info


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        info = get_worker_info()
        return torch.tensor([index, info.id, info.num_workers, torch.get_num_threads()])


def main():
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    seen = {}
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(3):
        loss = model(torch.rand(32, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seen["loss"] = loss.item()
    seen["weights"] = [parameter.sum().item() for parameter in model.parameters()]
    total = torch.ones(1)
    dist.all_reduce(total)
    seen["total"] = total.item()
    if attempt == 0:
        write(attempt, rank, seen)
        dist.barrier()
        os._exit(3 if rank == 1 else 0)
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        loader = DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context=context)
        seen[method] = torch.cat(list(loader)).tolist()
    seen["shared"] = shared()
    write(attempt, rank, seen)
    dist.barrier()
    # Threads of gloo now and then abort the interpreter's own way out.
    os._exit(0)


def double(tensor):
    tensor *= 2


def shared():
    tensor = torch.ones(4).share_memory_()
    process = torch.multiprocessing.get_context("fork").Process(target=double, args=(tensor,))
    process.start()
    process.join()
    return tensor.tolist()


def write(attempt, rank, seen):
    with open(f"facts/{attempt}.{rank}.json", "w") as file:
        json.dump({"warm": IS_WARM, "seen": seen}, file)


if __name__ == "__main__":
    main()
"""


def test_training_with_data_loaders_and_a_restart_is_the_same_warm_and_cold(launch, tmp_path, worker_script):
    script = worker_script(TRAINING)
    job = Job(launch, tmp_path, "auto", TIMEOUT)
    command = ("--nproc-per-node=2", "--max-restarts=1", script)
    outcome = job.compare(
        *command, argued={r"[\d.]+/facts/warm": "tells them apart", r"ends|0.0/.*": "a race"}
    )
    assert outcome.code == 0, outcome.stderr
    assert sorted(outcome.workers) == ["0.0", "0.1", "1.0", "1.1"]
    for name in ("1.0", "1.1"):
        assert outcome.workers[name].facts["warm"], outcome.stderr


COMPILED = """
import sys
IS_WARM = "torch" in sys.modules
import json, os
import torch


@torch.compile
def compiled(value):
    return (value.sin() + value.cos()).sum()


value = compiled(torch.ones(100)).item()
with open(f"facts/0.{os.environ['RANK']}.json", "w") as file:
    json.dump({"warm": IS_WARM, "value": round(value, 3)}, file)
"""


def test_a_compiled_function_works_the_same_warm_and_cold(launch, tmp_path, worker_script):
    if os.system("c++ --version >/dev/null 2>&1") != 0:
        pytest.skip("needs a C++ compiler")
    job = Job(launch, tmp_path, "torch,torch._dynamo", TIMEOUT)
    command = ("--nproc-per-node=2", worker_script(COMPILED))
    outcome = job.compare(*command, argued={r"[\d.]+/facts/warm": "tells them apart"})
    assert outcome.code == 0, outcome.stderr
    assert all(each.facts["warm"] for each in outcome.workers.values()), outcome.stderr


def test_optimizer_steps_are_heartbeats_in_warm_workers(launch, worker_script):
    """Optimizer steps are heartbeats even if the optimizers were imported before the worker got its heartbeat
    page.
    """
    script = worker_script("""
        import os, signal, torch
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(5):
            weight.sum().backward()
            optimizer.step()
        while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.pause()
        os._exit(0)
    """)
    job = launch("--warm=torch", "--hang-timeout=3", "--max-restarts=1", script).exits(0, timeout=TIMEOUT)
    line_with(job.stderr, "hung", "step 4")
