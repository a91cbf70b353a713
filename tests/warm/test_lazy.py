"""Modules that torch imports lazily at a script's first step are preloaded, but no others."""

import json

import pytest

PROBE = """
import json, os, runpy, sys
from elasticrs._engine.workers.warm import modules as warm

script = sys.argv[1]
for name in warm.preload("auto", warm.entry_of_script(script)).modules:
    module, _, attribute = name.partition(":")
    __import__(module, fromlist=[attribute] if attribute else [])
before = set(sys.modules)
runpy.run_path(script, run_name="__main__")
more = sorted(name for name in set(sys.modules) - before if name.startswith(("torch", "sympy", "triton")))
os.write(1, (json.dumps({"more": more, "dynamo": "torch._dynamo" in sys.modules}) + "\\n").encode())
# Threads of gloo now and then abort the interpreter's own way out (torch 2.15).
os._exit(0)
"""

BEGIN = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
values = torch.ones(3)
dist.all_reduce(values)
"""
END = """
dist.destroy_process_group()
"""
STEP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("code", "needs_dynamo", "ranks"),
    [
        ("", False, 1),
        ("model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))" + STEP, True, 1),
        pytest.param(
            "from torch.distributed.fsdp import fully_shard\n"
            "from torch.utils.checkpoint import checkpoint\n"
            "model = fully_shard(nn.Linear(8, 8))\n"
            "checkpoint(model, torch.randn(4, 8), use_reentrant=False)" + STEP,
            True,
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["collectives", "ddp", "fsdp"],
)
def test_torch_imports_only_the_expected_modules_at_the_first_step(
    launch, worker_script, code, needs_dynamo, ranks
):
    script = worker_script(BEGIN + code + END, "train.py")
    started = launch(f"--nproc-per-node={ranks}", worker_script(PROBE, "probe.py"), script)
    assert started.wait() == 0, started.stderr
    told = [json.loads(line) for line in started.stdout.splitlines() if line.startswith("{")]
    assert told == [{"more": [], "dynamo": needs_dynamo}] * ranks
