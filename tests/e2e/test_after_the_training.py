"""Replacement of a worker that dies after the training. The replacement gets the final state, or fails."""

import os
import re
import signal

import pytest
from helpers import procs
from helpers.nodes import meeting
from helpers.procs import HANG
from helpers.trainers import store

pytestmark = [pytest.mark.torch, pytest.mark.beyond_torchrun]

SCRIPT = """
    import os, signal, sys
    import torch.distributed as dist
    from torch import ones, zeros
    from elasticrs.train import AgentCoordinator, State, train
    from elasticrs.train.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager
    from elasticrs.train.distributed import all_gather_return_max_long

    folder, kind, everybody_exits, victim = sys.argv[1:]

    def say(what):
        os.write(1, f"{what}\\n".encode())

    def wait_at(gate):
        os.read(os.open(os.environ[gate], os.O_RDONLY), 1)

    class Plain(State):
        step, weights = 0, zeros(2)

        def sync(self, world_size, rank):
            leader, self.step = all_gather_return_max_long(self.step)
            dist.broadcast(self.weights, leader)

    class Saved(Plain):
        def state_dict(self):
            return {"step": self.step, "weights": self.weights}

        def load_state_dict(self, content):
            self.step, self.weights = content["step"], content["weights"]

    def step(state):
        if state.step == 5:
            raise StopIteration
        dist.all_reduce(ones(1))
        state.weights += 1
        state.step += 1
        return state, None

    if folder:
        set_checkpoint_manager(FileSystemCheckpointManager(folder))
    state = train(AgentCoordinator("gloo"), step, {"plain": Plain, "saved": Saved}[kind]())
    rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    say(f"RETURNED rank={rank} world={os.environ['WORLD_SIZE']} pid={os.getpid()} life={life}"
        f" step={state.step} weights={state.weights.tolist()}")
    if life == "0" and rank in victim:
        wait_at("ALL_HAVE_RETURNED")
        os.kill(os.getpid(), signal.SIGKILL)
    if everybody_exits == "no":
        wait_at("MAY_EXIT")
"""

RETURNED = r"RETURNED rank=(\d) world=(\d) pid=(\d+) life=(\d) step=(\d) weights=\[([\d.]+), "


@pytest.fixture
def job(launch, worker_script, tmp_path):
    """Yield two functions. The first starts 2 workers, one of which dies at a gate (a FIFO). The second opens
    a gate.
    """
    gates = {name: tmp_path / name for name in ("ALL_HAVE_RETURNED", "MAY_EXIT")}
    for path in gates.values():
        os.mkfifo(path)

    def start(*, folder="", kind="saved", everybody_exits="no", victim="1", restarts=1):
        return launch(
            *("--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"),
            *("--on-failure=replace", "--warm=torch", worker_script(SCRIPT)),
            *(str(folder), kind, everybody_exits, victim),
            env={name: str(path) for name, path in gates.items()},
        )

    opened = []

    def open_gate(name, count=8):
        # Write a byte for each worker and keep the FIFO open, because some workers may reach the gate later.
        opened.append(os.open(gates[name], os.O_RDWR))
        os.write(opened[-1], b"x" * count)

    yield start, open_gate
    for gate in opened:
        os.close(gate)


def returned(job, count):
    return job.wait_for_lines(RETURNED, count, "stdout")


def others_exit(job, victim="1"):
    """Wait until all workers except the victim have returned from the training and exited."""
    for each in returned(job, 2):
        if each[1] != victim:
            assert procs.wait_gone(int(each[3]))


def test_a_replacement_gets_the_final_state_from_a_live_worker(job):
    start, open_gate = job
    running = start(victim="01", restarts=2)
    assert {each[1] for each in returned(running, 2)} == {"0", "1"}
    replaced = set()
    for count in (3, 4):
        open_gate("ALL_HAVE_RETURNED", 1)
        late = returned(running, count)[-1]
        assert late.group(2, 4, 5, 6) == ("2", "1", "5", "5.0")
        replaced.add(late[1])
    # Each replacement has the rank of the dead worker.
    assert replaced == {"0", "1"}
    open_gate("MAY_EXIT")
    running.exits(0)


def test_a_replacement_loads_the_final_checkpoint_if_all_other_workers_exited(job, tmp_path):
    start, open_gate = job
    running = start(folder=tmp_path / "checkpoints", everybody_exits="yes")
    others_exit(running)
    open_gate("ALL_HAVE_RETURNED")
    assert returned(running, 3)[-1].group(1, 4, 5, 6) == ("1", "1", "5", "5.0")
    running.exits(0)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ({"everybody_exits": "yes"}, "final checkpoint"),
        pytest.param({"kind": "plain"}, "Plain has neither state_dict nor save", marks=pytest.mark.slow),
    ],
)
def test_the_job_fails_if_a_replacement_cannot_get_the_final_state(job, order, reason):
    start, open_gate = job
    running = start(**order)
    others_exit(running) if "everybody_exits" in order else returned(running, 2)
    open_gate("ALL_HAVE_RETURNED")
    running.wait_for_line("training had ended", "stderr")
    running.exits(1)
    assert reason in running.stderr
    assert len(re.findall(RETURNED, running.stdout)) == 2, "nobody returned an untrained state"


def test_the_job_fails_if_the_node_of_rank_0_is_lost_during_the_final_save(launch, worker_script, tmp_path):
    gate = tmp_path / "never_opened"
    os.mkfifo(gate)
    with store() as port:
        options = (
            *(*meeting("1:2", port), "--nproc-per-node=1", "--max-restarts=3", "--on-failure=replace"),
            *(f"--rdzv-conf=last_call_timeout={2 * HANG}", worker_script(SCRIPT), "", "saved", "yes", "0"),
        )
        agents = [launch(*options, env={"ALL_HAVE_RETURNED": str(gate)}) for _ in range(2)]
        places = [agent.wait_for_line(RETURNED, "stdout").group(1, 2) for agent in agents]
        assert sorted(places) == [("0", "2"), ("1", "2")]
        saving, other = sorted(agents, key=lambda agent: places[agents.index(agent)])
        assert procs.wait_gone(int(other.wait_for_line(RETURNED, "stdout")[3]))
        children = {child.pid for child in procs.children()}
        saving.signal(signal.SIGKILL)
        assert saving.wait() == -signal.SIGKILL
        procs.reap_adopted(keep=children)
        other.exits(1)
        assert re.search(r"\blost\b.*training had ended", other.stderr)
