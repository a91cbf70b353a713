"""In multi-node jobs, each node has a nursery that imports modules for its workers, whatever the rendezvous
back end.
"""

import os

import pytest
from helpers import ports

pytestmark = [pytest.mark.beyond_torchrun]

WORKER = """
    import sys
    is_warm = "decimal" in sys.modules
    import os, signal
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"RAN rank={os.environ['RANK']} attempt={attempt} warm={is_warm}\\n".encode())
    if attempt == "0":
        if os.environ["RANK"] == "3":
            open(sys.argv[1]).read()
            os._exit(3)
        signal.pause()
"""


RAN = r"RAN rank=\d attempt=\d warm=\w+"


@pytest.fixture
def check(launch, worker_script, tmp_path):
    """Return a function that runs two nodes and checks that all their workers start warm, before and after a
    restart.
    """
    go = tmp_path / "go"
    os.mkfifo(go)

    def run(backend, endpoint, run_id):
        jobs = [
            launch(
                *("--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=2", "--max-restarts=1"),
                *(f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"),
                *("--warm=decimal", worker_script(WORKER), go),
            )
            for rank in range(2)
        ]
        for job in jobs:
            job.wait_for_lines(RAN, 2, "stdout")
        go.write_text("go")
        assert [job.wait() for job in jobs] == [0, 0], [job.stderr for job in jobs]
        ran = [each[0] for job in jobs for each in job.wait_for_lines(RAN, 4, "stdout")]
        assert sorted(ran) == [
            f"RAN rank={rank} attempt={n} warm=True" for rank in range(4) for n in range(2)
        ]

    return run


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_workers_of_all_nodes_and_attempts_are_warm(check, backend):
    check(backend, f"127.0.0.1:{ports.free()}", "warm")


def test_workers_of_all_nodes_and_attempts_are_warm_with_etcd(check, etcd):
    check("etcd", etcd.endpoint, f"warm{os.getpid()}")
