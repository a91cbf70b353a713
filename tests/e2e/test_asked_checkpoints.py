"""Workers of ``elasticrs.train`` save a checkpoint when their agent is asked for one, and before it stops."""

import os
import re
import signal
import sys

import pytest
from helpers.nodes import meeting

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.beyond_torchrun]

STEPS = 400

SCRIPT = """
    import os, select, signal, sys, time
    import torch.distributed as dist
    from torch import ones
    from elasticrs.train import AgentCoordinator, State, train
    from elasticrs.train.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager
    from elasticrs.train.distributed import all_gather_return_max_long

    STEPS, folder, may_end = int(sys.argv[1]), sys.argv[2], sys.argv[3]

    def say(what):
        os.write(1, f"{what}\\n".encode())

    class Count(State):
        step = 0

        def sync(self, world_size, rank):
            _, self.step = all_gather_return_max_long(self.step)
            self.rank = rank

        def capture_snapshot(self):
            return self.step

        def apply_snapshot(self, snapshot):
            self.step = snapshot

        state_dict, load_state_dict = capture_snapshot, apply_snapshot

    def step(state):
        if state.step == STEPS:
            raise StopIteration
        dist.all_reduce(ones(1))
        if not os.path.exists(may_end):
            select.select([], [], [], 0.05)
        state.step += 1
        say(f"DONE rank={state.rank} step={state.step}")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] + str(state.step) == os.environ.get("HOLD"):
            say(f"HOLDS pid={os.getpid()}")
            signal.pause()
        return state, None

    if folder:
        set_checkpoint_manager(FileSystemCheckpointManager(folder))
    say(f"BEGINS pid={os.getpid()}")
    train(AgentCoordinator("gloo"), step, Count())
    say("END")
"""


def steps_of(job, rank=r"\d"):
    """Return the steps that were completed by all ranks, or by one rank."""
    return [int(each) for each in re.findall(rf"DONE rank={rank} step=(\d+)", job.stdout)]


def test_stopping_an_agent_saves_a_checkpoint_that_the_next_run_resumes_from(launch, worker_script, tmp_path):
    folder, may_end = tmp_path / "checkpoints", tmp_path / "may end"
    options = (
        *("--nproc-per-node=2", "--on-failure=replace", "--warm=torch"),
        *(worker_script(SCRIPT), STEPS, folder, may_end),
    )
    options = [str(each) for each in options]
    job = launch(*options)
    job.wait_for_lines(r"step=5$", 2, "stdout")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 1
    assert "END" not in job.stdout
    # Both workers stopped after the same step, and saved it.
    last = {max(steps_of(job, rank)) for rank in (0, 1)}
    assert len(last) == 1
    assert len(list(folder.iterdir())) == 1
    may_end.touch()
    again = launch(*options)
    assert again.wait() == 0
    assert sorted(steps_of(again, 0)) == list(range(last.pop() + 1, STEPS + 1))


PROGRAM = """
    import sys, threading
    from elasticrs.agent.server import LocalElasticAgent, WorkerSpec
    from elasticrs.multiprocessing import DefaultLogsSpecs
    from elasticrs.rendezvous import RendezvousParameters
    from elasticrs.rendezvous.registry import get_rendezvous_handler

    spec = WorkerSpec(
        "default", 1, get_rendezvous_handler(RendezvousParameters("c10d", "", "job", 1, 1)),
        entrypoint=sys.executable, args=tuple(sys.argv[2:]), max_restarts=1, on_failure="replace",
        warm="torch",
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())

    def ask():
        with open(sys.argv[1]) as asks:
            for line in asks:
                agent.request_checkpoint()
                print("ASKED", flush=True)

    threading.Thread(target=ask, daemon=True).start()
    print("RESULT", agent.run().state.name, flush=True)
    try:
        agent.request_checkpoint()
    except RuntimeError as error:
        print(error)
"""


def test_a_checkpoint_request_survives_the_death_of_a_worker(launch, worker_script, tmp_path):
    folder, may_end, asks = tmp_path / "checkpoints", tmp_path / "may end", tmp_path / "asks"
    os.mkfifo(asks)
    script, program = worker_script(SCRIPT), worker_script(PROGRAM, "program.py")
    argv = [sys.executable, program, asks, script, str(STEPS), folder, may_end]
    job = launch(argv=argv, env={"HOLD": "03"})
    pid = int(job.wait_for_line(r"HOLDS pid=(\d+)", "stdout")[1])
    with open(asks, "w") as to_the_agent:
        for _ in range(2):
            to_the_agent.write("ask\n")
        to_the_agent.flush()
        job.wait_for_lines("ASKED", 2, "stdout")
        assert list(folder.iterdir()) == []
        os.kill(pid, signal.SIGKILL)
        job.wait_for_line(r"elasticrs: checkpoint saved [\d.]+ ms")
        may_end.touch()
        assert job.wait() == 0
    assert "RESULT SUCCEEDED" in job.stdout
    assert "no workers" in job.stdout
    # The first checkpoint is from the first step after the restart and serves both requests. The second one
    # has the final state.
    assert len(list(folder.iterdir())) == 2
    assert len(re.findall("checkpoint saved", job.stderr)) == 1


def test_a_missing_checkpoint_manager_is_reported(launch, worker_script, tmp_path):
    may_end = tmp_path / "may end"
    options = ("--nproc-per-node=1", "--on-failure=replace", "--warm=torch", worker_script(SCRIPT))
    job = launch(*options, str(STEPS), "", may_end)
    job.wait_for_line(r"step=3$", "stdout")
    os.kill(job.pid, signal.SIGUSR1)
    job.wait_for_line("set_checkpoint_manager", "stderr")
    may_end.touch()
    assert job.wait() == 0


def test_draining_a_node_saves_a_checkpoint_and_the_other_node_continues(launch, worker_script, tmp_path):
    folder, may_end = tmp_path / "checkpoints", tmp_path / "may end"
    options = (*(*meeting("1:2"), "--nproc-per-node=1", "--on-failure=replace", "--warm=torch"),)
    script = worker_script(SCRIPT), str(STEPS), folder, may_end
    stays = launch(*options, "--rdzv-conf=is_host=1", *script)
    drained = launch(*options, "--rdzv-conf=is_host=0", *script)
    for job in (stays, drained):
        job.wait_for_line(r"step=5$", "stdout")
    os.kill(drained.pid, signal.SIGTERM)
    assert drained.wait() == 1
    last = max(steps_of(drained))
    assert len(list(folder.iterdir())) == 1
    stays.wait_for_line(rf"step={last + 3}$", "stdout")
    may_end.touch()
    assert stays.wait() == 0
    # No step was lost or repeated, and no worker failed.
    assert steps_of(stays) == list(range(1, STEPS + 1))
    assert "interrupted by" not in stays.stderr
    assert "replaced" not in stays.stderr


def test_a_worker_saves_a_checkpoint_on_sigterm_and_is_replaced(launch, worker_script, tmp_path):
    folder, may_end = tmp_path / "checkpoints", tmp_path / "may end"
    job = launch(
        *("--nproc-per-node=2", "--on-failure=replace", "--max-restarts=1", "--warm=torch"),
        *(worker_script(SCRIPT), str(STEPS), folder, may_end),
    )
    job.wait_for_lines(r"step=5$", 2, "stdout")
    pid = int(job.wait_for_line(r"BEGINS pid=(\d+)$", "stdout")[1])
    os.kill(pid, signal.SIGTERM)
    job.wait_for_line(rf"pid {pid}\) died by SIGTERM; .*replaced")
    may_end.touch()
    assert job.wait() == 0
    # The worker saved one checkpoint before it left. The other one has the final state.
    assert len(list(folder.iterdir())) == 2
    assert "broken off" not in job.stderr
