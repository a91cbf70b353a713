"""Ranks of several nodes that do not restore what the others restore, and launchers inside of workers."""

import signal
import sys
import textwrap

import pytest
from helpers.kept_nodes import Nodes, said
from helpers.procs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torch]

TRAINS = """
    import os, signal, sys, torch, torch.distributed as dist
    from elasticrs import Keep

    class Odd:
        def state_dict(self):
            return {}
        def load_state_dict(self, state):
            if sys.argv[1] == "refuses" and rank == 1:
                raise ValueError("another loader")

    dist.init_process_group("gloo")
    number, rank = os.environ["ELASTICRS_ROUND"], dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if sys.argv[1] == "hides" and rank == 1 and number != "1":
        os.environ["ELASTICRS_KEEP"] = "1" + os.environ["ELASTICRS_KEEP"]  # the mark of another file
    keep = Keep(model=model, optimizer=optimizer, odd=Odd(), replicated=True, every=int(sys.argv[2]))
    if sys.argv[1] == "flips" and number == "2":
        from elasticrs._engine.inside.keep import file, layout, restore
        for slot in file.KeepFile(os.environ["ELASTICRS_KEEP"]).slots:
            slot.map[slot.words[layout.Slot.DATA_AT]] ^= 1
        if rank == 0:
            restore.Kept = lambda *_: signal.pause()  # Only the other rank finds the damage.
        dist.barrier()
    step = 0
    if not (sys.argv[1] == "waits" and rank == 1):
        step = keep.restore()
    os.write(1, f"BEGIN {number} {rank} {step}\\n".encode())
    while step < 20:
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        step += 1
        keep.step(step)
        if (number, rank, step) == ("1", 1, 9):
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
"""


@pytest.fixture
def agents(launch, worker_script):
    command = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", worker_script(TRAINS))
    return lambda how, every=0: Nodes(launch, *command, how, str(every)).start(2)


@pytest.mark.parametrize(("every", "second"), [(0, "9"), (2, "8")], ids=["one copy", "an older copy"])
def test_a_rank_that_cannot_load_the_kept_state_does_not_train_from_another_step(agents, every, second):
    """The second time, an older step is tried, if it is kept. The third time, the script begins anew."""
    job = agents("refuses", every)
    assert [agent.wait() for agent in job] == [0, 0]
    assert said(job, "BEGIN") == ["1 0 0", "1 1 0", "2 0 9", f"3 0 {second}", "4 0 0", "4 1 0"]
    assert any("ValueError('another loader')" in agent.stderr for agent in job)
    assert any("could not be loaded in two attempts" in agent.stderr for agent in job)


def test_damage_of_all_copies_on_all_nodes_costs_one_attempt(agents):
    job = agents("flips", 2)
    assert [agent.wait() for agent in job] == [0, 0]
    assert said(job, "BEGIN") == ["1 0 0", "1 1 0", "3 0 0", "3 1 0"]
    assert any("rank 0: 2 damaged copies of steps" in agent.stderr for agent in job)
    assert any("without kept state (copies of ranks 0, 1 were damaged" in agent.stderr for agent in job)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_that_cannot_use_its_file_does_not_begin_at_another_step(launch, worker_script, nodes):
    """After two attempts that ended for this reason, all ranks begin anew, without Keep."""
    command = ("--nproc-per-node=2", "--max-restarts=3", worker_script(TRAINS), "hides", "0")
    if nodes == 1:
        job = [launch("--standalone", "--warm=torch._dynamo", *command)]
    else:
        job = Nodes(launch, f"--nnodes={nodes}", *command).start(nodes)
    assert [agent.wait() for agent in job] == [0] * nodes
    begun = [tuple(map(int, line.split())) for line in said(job, "BEGIN")]
    assert {(number, step) for number, _, step in begun} <= {(1, 0), (2, 9), (3, 9), (4, 0)}
    assert [rank for number, rank, _ in begun if number == 4] == [*range(2 * nodes)]
    assert {number for number, rank, _ in begun if rank == 1} == {1, 4}
    off = "rank 1 could not use the agent's memory in two attempts"
    assert any(off in agent.stderr for agent in job)


def test_a_rank_that_waits_for_nodes_that_do_not_restore_says_so(agents):
    job = agents("waits")

    def with_line():
        for agent in job:
            agent.read_for(0.05)
        return any("must call Keep.restore()" in agent.stderr for agent in job)

    wait_until(with_line)
    for agent in job:
        agent.signal(signal.SIGTERM)
        agent.wait()


INNER = """
    import os, torch
    from elasticrs import Keep
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    keep = Keep(optimizer=optimizer, replicated=True)
    step = keep.restore()
    for step in range(step + 1, 4):
        weight.grad = torch.ones(3)
        optimizer.step()
        keep.step(step)
    print("DONE", step, flush=True)
"""


def test_a_torchrun_inside_a_worker_keeps_nothing(launch, worker_script, tmp_path):
    (tmp_path / "inner.py").write_text(textwrap.dedent(INNER))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(str(tmp_path / "inner.py"))
    script = worker_script(f"import subprocess; subprocess.run({command}, check=True)")
    job = launch("--standalone", script).exits(0)
    assert job.stdout.count("DONE 3") == 2
    assert job.stderr.count("Keep is off: another launcher has started this process") == 2
