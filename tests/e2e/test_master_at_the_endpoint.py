"""Scripts that set ``MASTER_ADDR`` and ``MASTER_PORT`` to the endpoint of the rendezvous."""

import re

import pytest
from helpers import ports
from helpers.nodes import WORKERS

SCRIPT = WORKERS / "at_endpoint.py"


def seen(output: str) -> list[tuple[int, int, str]]:
    """Return the rank, attempt and values that each worker has printed."""
    found = re.findall(r"SEEN rank=(\d) attempt=(\d) values=(\S+)", output)
    return sorted((int(rank), int(attempt), values) for rank, attempt, values in found)


def test_the_workers_of_one_node_meet_at_the_endpoint_in_each_attempt(launch):
    port = str(ports.free())
    options = ("--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--max-restarts=1")
    launched = launch(*options, f"--rdzv-endpoint=localhost:{port}", SCRIPT, "localhost", port, "RESTART")
    assert launched.wait() == 0, launched.stderr
    # The workers of the second attempt see no key of the first one.
    last = [each for each in seen(launched.stdout) if each[1] == 1]
    assert last == [(0, 1, "1,1"), (1, 1, "1,1")]
    assert "MASTER_ADDR" not in launched.stderr


@pytest.mark.torch
def test_torchs_own_process_group_forms_at_the_endpoint(launch, tmp_path):
    port = str(ports.free())
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = sys.argv[1:]\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "os.write(1, f'SUM {int(total)}\\n'.encode())\n"
        "dist.destroy_process_group()\n"
    )
    options = ("--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d")
    launched = launch(*options, f"--rdzv-endpoint=localhost:{port}", script, "localhost", port)
    assert launched.wait() == 0, launched.stderr
    assert launched.stdout.count("SUM 2") == 2
