"""Scripts that set ``MASTER_ADDR`` and ``MASTER_PORT`` to the endpoint of the rendezvous."""

import re
import signal

from helpers import ports, procs
from helpers.coordination import store_command
from helpers.launcher import Launched, clean_environment
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


def test_the_workers_of_several_nodes_meet_at_a_store_of_its_own(launch, tmp_path):
    store = Launched(store_command(), env=clean_environment(), cwd=tmp_path)
    procs.bystanders.add(store.pid)
    try:
        port = store.wait_for_line(r"serving at .*:(\d+)", "stdout")[1]
        options = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--max-restarts=1")
        where = (f"--rdzv-endpoint=localhost:{port}", SCRIPT, "localhost", port, "RESTART")
        nodes = [launch(*options, *where) for _ in range(2)]
        found = []
        for node in nodes:
            assert node.wait() == 0, node.stderr
            found += [each for each in seen(node.stdout) if each[1] == 1]
            assert "MASTER_ADDR" not in node.stderr
        assert sorted(found) == [(rank, 1, "1,1,1,1") for rank in range(4)]
    finally:
        store.signal(signal.SIGTERM)
        store.wait()
        procs.bystanders.discard(store.pid)
        store.close()


def test_torchs_own_process_group_forms_at_the_endpoint(launch_with_torch):
    port = str(ports.free())
    script = WORKERS / "all_reduce.py"
    options = ("--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d")
    launched = launch_with_torch(*options, f"--rdzv-endpoint=localhost:{port}", script, "localhost", port)
    assert launched.wait() == 0, launched.stderr
    assert launched.stdout.count("SUM 3") == 2
