"""Ranks that hang in a job of several nodes: every node names the same rank, and one restart is used.

A rank gives its first heartbeat only when the one that is to hang has given its last: before that nobody is
watched, however slow the machine is, and afterwards nobody goes on.
"""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers.http_client import get, get_json, port_of
from helpers.nodes import LoopbackJob
from helpers.said import line_with, says

pytestmark = pytest.mark.slow

TRAINING = """
    import os, signal
    from elasticrs.timer import heartbeat
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt, hung = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["HUNG"])
    nproc, by_node = int(os.environ["LOCAL_WORLD_SIZE"]), "BY_NODE" in os.environ
    pipe = os.pipe()
    # A byte for each of those that have to be there before: the one that hangs, or all others of its node.
    others = [other for other in range(world) if other != hung]
    here = [other for other in others if not by_node or other // nproc == hung // nproc]
    there = [other for other in others if other not in here]
    def wait_for_peers():
        return [os.write(gate, b"x") for gate in gates], os.read(pipe[0], 1)
    def read_batch():
        return [os.write(gate, b"x") for gate in gates], os.read(pipe[0], 1)
    if attempt == 0:
        # Opening one waits for its reader.
        mine = os.open(f"gate{rank}", os.O_RDWR)
        follow = here if rank == hung else there if rank in here else []
        gates = [os.open(f"gate{other}", os.O_WRONLY) for other in follow]
        if rank == hung:
            heartbeat(1203)
            heartbeat(1204)
            read_batch()
        for _ in here if rank in there else [hung]:
            os.read(mine, 1)
        heartbeat(int(os.environ["STEP"]))
        wait_for_peers()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.write(1, f"here {rank} {os.getpid()} {attempt}.\\n".encode())
    if "STAY" in os.environ:
        signal.sigwait([signal.SIGUSR1])
"""


class Job(LoopbackJob):
    """A job with a gate for each rank, in which one rank hangs."""

    def __init__(self, launch, folder, nodes, nproc, *options, host=0, hung=None, step=1205, **env):
        self.world = nodes * nproc
        for rank in range(self.world):
            os.mkfifo(folder / f"gate{rank}")
        env |= {"HUNG": str(self.world - 1 if hung is None else hung), "STEP": str(step)}
        super().__init__(launch, folder, nodes, nproc, *options, host=host, env=env)

    def evidence(self, rank):
        """Return a function that reads the evidence of a rank in the first attempt."""
        node, local_rank = divmod(rank, self.nproc)
        (path,) = Path(self.folder / f"logs{node}").glob(f"*/attempt_0/{local_rank}/hang.txt")
        return path.read_text()


def has_restarted_once(job, named, budget):
    """Check that all nodes name this rank, and that the job used one restart."""
    assert job.ended() == [0] * len(job.nodes), job.story
    for node in job.nodes:
        assert re.search(rf"rank {named} \(pid \d+\) on node \S+: hung: ", node.stderr), job.story
        assert re.findall(r"round (\d+) starts with (\d+) nodes? \((.*)\)", node.stderr) == [
            ("2", str(len(job.nodes)), f"restart 1 of {budget}")
        ], job.story
    told = "".join(node.stdout for node in job.nodes)
    attempts = re.findall(r"here (\d+) \d+ (\d+)\.", told)
    assert sorted(attempts) == [(str(rank), "1") for rank in range(job.world)], job.story


@pytest.mark.parametrize("host", [0, 1])
def test_the_rank_a_step_behind_is_named_on_both_nodes(launch, worker_script, tmp_path, host):
    job = Job(launch, tmp_path, 2, 2, "--hang-timeout=1", "--max-restarts=2", host=host)
    script = worker_script(TRAINING)
    for _ in range(2):
        job.start(script)
    has_restarted_once(job, 3, 2)
    for node in job.nodes:
        assert re.search(r"rank 3 .*step 1,204\b.* in \w+ \(worker.py", node.stderr), job.story
    # Each node keeps the stacks of its own ranks.
    for rank in range(4):
        assert "Current thread" in job.evidence(rank)


@pytest.mark.parametrize("host", [0, 1])
def test_a_node_with_a_long_limit_names_the_rank_that_the_other_node_waits_for(
    launch, worker_script, tmp_path, host
):
    job = Job(launch, tmp_path, 2, 2, "--max-restarts=0", host=host)
    script = worker_script(TRAINING)
    job.start(script, "--hang-timeout=1")
    job.start(script, "--hang-timeout=600")
    assert job.ended() == [1, 1], job.story
    for node in job.nodes:
        assert "max_restarts=0" in node.stderr, job.story
        root = node.stderr[node.stderr.index("Root Cause") :]
        assert "  rank      : 3 (local_rank: 1)" in root, job.story
        assert "step 1,204" in root, job.story
        if node is job.nodes[1]:
            line_with(root, "last heartbeat ", "rank 3", "step 1,204")
    # The first node suspected one of its own ranks first. It now names the rank that its own rank was waiting
    # for.
    says(job.nodes[0].stderr, "waited for rank 3")
    says(job.nodes[1].stderr, "limit 600 s", "another node")


def test_the_rank_at_another_place_in_the_same_step_is_named(launch, worker_script, tmp_path):
    job = Job(launch, tmp_path, 2, 2, "--max-restarts=1", hung=2, step=1204, BY_NODE="1")
    script = worker_script(TRAINING)
    job.start(script, "--hang-timeout=2")
    job.start(script, "--hang-timeout=600")
    has_restarted_once(job, 2, 1)
    # No rank of the first node is behind or in a different place, so the node had to name a waiting rank.
    waits = r"rank [01] .* in wait_for_peers \(worker.py:\d+\), rank [01] in wait_for_peers .*; stopping"
    assert re.search(waits, job.nodes[0].stderr), job.story
    assert re.search(r"rank 2 .* in read_batch \(worker.py:\d+\), rank 3 in wait_for_peers", job.story)


def test_metrics_count_a_hang_as_worker_hung_on_exactly_one_node(launch, worker_script, tmp_path):
    job = Job(launch, tmp_path, 3, 2, "--max-restarts=1", "--health-check-port=0", host=1, STAY="1")
    script = worker_script(TRAINING)
    # The hung rank belongs to the last node, whose limit is too long to find the hang.
    for options in (("--hang-timeout=1",), ("--hang-timeout=600",), ("--hang-timeout=900",)):
        job.start(script, *options)
    lines = [node.wait_for_lines(r"here (\d+) (\d+) 1\.", 2) for node in job.nodes]
    pages = []
    for node in job.nodes:
        port = port_of(node)
        pages.append(get(port, "/metrics")[2])
        status = get_json(port, "/status")[1]
        assert (status["restarts"], status["round"]) == (1, 2)
    for found in lines:
        for line in found:
            os.kill(int(line[2]), signal.SIGUSR1)
    has_restarted_once(job, 5, 1)

    def value(page, name):
        return float(re.search(rf"^elasticrs_{re.escape(name)} (\S+)$", page, re.MULTILINE)[1])

    # All nodes lost a second. Expect only half of it, because an agent may notice late that its workers run.
    for page in pages:
        assert value(page, 'time_seconds_total{activity="hung"}') >= 0.5, page
    causes = [
        [
            value(page, f'restarts_total{{cause="{cause}"}}')
            for cause in ("worker_hung", "worker_failed", "nodes")
        ]
        for page in pages
    ]
    assert causes == [[1, 0, 0], [0, 0, 1], [0, 0, 1]], "of one hang one node has made a failure"


@pytest.mark.parametrize("hung", [0, 1])
def test_ranks_without_heartbeats_are_not_named_as_hung(launch, worker_script, tmp_path, hung):
    """Whichever rank keeps the other waiting, only the one that sends heartbeats can be found."""
    job = Job(launch, tmp_path, 2, 1, "--hang-timeout=1", "--max-restarts=1", hung=hung)
    sends = "from elasticrs.timer import heartbeat"
    only_rank_1 = f"heartbeat = id\n    if os.environ['RANK'] == '1':\n        {sends}"
    script = worker_script(TRAINING.replace(sends, only_rank_1))
    for _ in range(2):
        job.start(script)
    has_restarted_once(job, 1, 1)
    assert "rank 0 (pid" not in job.story
    assert "Current thread" in job.evidence(0), "where it stood is kept all the same"


CRASHES = """
    import os, signal
    from elasticrs.timer import heartbeat
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and rank == 0:
        open("gate0").read()
        os._exit(3)
    if attempt == 0 and rank == 1:
        gate = open("gate0", "w")
        # Asked where it stands, it lets the other one go on: that one crashes while this one is looked at.
        signal.signal(signal.SIGRTMIN + 12, lambda *_: gate.close())
        heartbeat(1204)
        while True:
            signal.sigtimedwait([], 0.05)
    os.write(1, f"here {rank} {os.getpid()} {attempt}.\\n".encode())
"""


@pytest.mark.parametrize("budget", [0, 1])
def test_a_simultaneous_crash_and_hang_count_as_one_failure(launch, worker_script, tmp_path, budget):
    job = Job(launch, tmp_path, 2, 1, "--hang-timeout=1", f"--max-restarts={budget}")
    for _ in range(2):
        job.start(worker_script(CRASHES))
    assert job.ended() == [1 - budget] * 2, job.story
    crash, hang = (
        r"rank 0 \(pid \d+\) on node \S+ .*code 3",
        r"rank 1 \(pid \d+\) on node \S+: hung:",
    )
    if budget:
        for node in job.nodes:
            line_with(node.stderr, "round 2 starts", "2 nodes", "restart 1 of 1")
        # Either failure may come first. A node that has reported its own cause then reports the agreed one.
        told = [re.findall(f"{crash}|{hang}", node.stderr)[-1] for node in job.nodes]
        assert len(set(told)) == 1, job.story
        return
    roots = [node.stderr[node.stderr.index("Root Cause") :] for node in job.nodes]
    (first,) = {re.search(r"rank      : (\d)", root)[1] for root in roots}
    # A node also reports what it found itself.
    assert "exitcode  : 3" in job.nodes[0].stderr or first == "1", job.story
    assert "hung: " in job.nodes[1].stderr, job.story
    for node in job.nodes:
        assert "max_restarts=0" in node.stderr, job.story
