"""Several nodes with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, where rank 0 hosts the workers' store."""

import pytest
from helpers.nodes import WORKERS, meeting

WORKER = """
    import os, socket, threading
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if rank == 0:
        # As torch's store: the port is bound already, but nobody listens.
        server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        print("USE", os.environ["TORCHELASTIC_USE_AGENT_STORE"], port, flush=True)
        server.accept()[0].sendall(b"hello")
    else:
        while True:
            try:
                client = socket.create_connection((os.environ["MASTER_ADDR"], port))
                break
            except ConnectionRefusedError:
                # Nothing tells when somebody listens.
                threading.Event().wait(0.01)
        print("GOT", client.recv(5).decode(), flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise SystemExit(rank)
"""


@pytest.fixture
def two_nodes(launch):
    def start(script, launch=launch):
        options = (*meeting(), "--max-restarts=1")
        confs = [f"--rdzv-conf=order_hint={node},is_host={1 - node}" for node in (0, 1)]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [launch(*options, conf, script, env=env) for conf in confs]

    return start


@pytest.mark.beyond_torchrun
def test_rank_0_hosts_the_store_on_a_new_port_in_each_round(two_nodes, worker_script):
    started = two_nodes(worker_script(WORKER))
    assert [each.wait() for each in started] == [0, 0], started[0].stderr
    told = started[0].wait_for_lines(r"^USE False (\d+)$", 2)
    # Each round uses a different port.
    assert told[0][1] != told[1][1]
    assert len(started[1].wait_for_lines("^GOT hello$", 2)) == 2


@pytest.mark.beyond_torchrun
def test_torch_workers_train_with_the_store_of_rank_0(two_nodes, launch_with_torch):
    started = two_nodes(WORKERS / "all_reduce.py", launch_with_torch)
    assert [each.wait(60) for each in started] == [0, 0], started[0].stderr
    for each in started:
        each.wait_for_line("^SUM 3 in rank")
