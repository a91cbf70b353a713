"""Commands of ``elasticctl`` that act on all nodes of a job, given on any one of them. All agents run on this
machine, but each has a host name of its own.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import ports
from helpers.elasticctl import COUNTS, SAVES, STUBBORN, WAITS, sizes, status_of
from helpers.launcher import launcher_with
from helpers.lines import long_lines
from helpers.nodes import QUICK, meeting
from helpers.procs import wait_until

pytestmark = pytest.mark.privileged

DEAF = SAVES.replace("signal.signal(", "os.environ['RANK'] != '2' and signal.signal(")


class Nodes:
    """A job of several agents, which run on this machine, but have different host names: n0, n1, …"""

    def __init__(self, launch, sockets, nnodes, count, nproc, *command):
        self._launch, self._folder = launch, sockets
        self._port = ports.free()
        self._command = (
            *meeting(nnodes, self._port),
            f"--nproc-per-node={nproc}",
            "--shutdown-timeout=20",
            *command,
        )
        self.agents = []
        for _ in range(count):
            self.start()
        wait_until(
            lambda: [sizes(sockets, agent) for agent in self.agents],
            lambda found: found == [("HEALTHY", count)] * count,
        )
        for agent in self.agents:
            agent.wait_for_lines(r"here (\d+) (\d+)\.", nproc)

    def start(self, number=None):
        """Start another agent. With ``number``, start one with the host name of an earlier agent."""
        number = len(self.agents) if number is None else number
        command = ("unshare", "--uts", "sh", "-c", f'hostname n{number}; exec "$@"', "sh")
        env = {"ELASTICRS_CONTROL_DIR": str(self._folder)}
        agent = self._launch(*self._command, env=env, prefix=command)
        self.agents.append(agent)
        return agent

    def by_host(self):
        """Return the agents, beginning with the one that hosts the store in which they meet."""
        return sorted(self.agents, key=lambda agent: not ports.listens(agent.pid, self._port))


@pytest.fixture
def nodes(launch, worker_script, sockets):
    """Return a function that starts a job of several nodes, and waits until its workers run."""

    def start(nnodes, count, *options, source=WAITS, nproc=1):
        return Nodes(launch, sockets, nnodes, count, nproc, *options, worker_script(source))

    return start


def test_any_node_is_drained_from_another_one_and_stays_out(nodes, sockets, asked):
    job = nodes("2:3", 3)
    by_name = {status_of(sockets, agent)["host"]: agent for agent in job.agents}
    asker = job.agents[0]
    code, text = asked("drain", "elsewhere", f"--job={asker.pid}")
    assert (code, "these have: n0 (" in text) == (2, True), text
    for name in ("n1", "n2"):
        code, text = asked("drain", name, "--stay-out", f"--job={asker.pid}")
        if code == 0:
            break
        # The order is refused if this node hosts the store in which the nodes meet. Then try the next node.
        assert (code, f"{name} hosts the store" in text) == (5, True), text
    assert f"{name} leaves the job: SIGTERM to the workers; 2 nodes continue; SIGTERM sent to 1 rank" in text
    assert re.search(r"attempt 0 of round 2 is running on 2 nodes, after", text)
    drained = by_name.pop(name)
    assert drained.wait() == 1
    assert re.search(rf"elasticctl \(user {os.geteuid()}, pid \d+ on node n0\): drain", drained.stderr)
    assert "sent again" not in " ".join(drained.stderr.split())
    rest = list(by_name.values())
    for agent in rest:
        agent.wait_for_line(rf"node {name} left \(elasticctl drain\)", stream="stderr")
    left = {sizes(sockets, agent) for agent in rest}
    assert left == {("HEALTHY", 2)}
    code, text = asked("drain", next(iter(set(by_name) - {"n0"})), f"--job={asker.pid}")
    assert (code, "needs 2 (--nnodes)" in text or "hosts" in text) == (5, True), text
    again = job.start(int(name[1:]))
    assert again.wait() == 1
    assert f"node {name} has left this job for good" in again.stderr
    assert asked("stop", f"--job={asker.pid}")[0] == 0
    assert [agent.wait() for agent in rest] == [1, 1]


def test_commands_and_events_know_the_present_nodes_although_no_worker_was_restarted(
    nodes, sockets, asked, tmp_path
):
    options = ("--on-failure=replace", "--max-restarts=1", f"--event-log-handler=file:{tmp_path}/events")
    job = nodes("2:4", 3, *options)
    host, *others = job.by_host()
    left, stays = sorted(others, key=lambda agent: status_of(sockets, agent)["group"]["rank"])
    names = {agent.pid: status_of(sockets, agent)["host"] for agent in job.agents}
    code, text = asked("drain", names[left.pid], f"--job={stays.pid}")
    assert (code, "is running on 2 nodes, after" in text) == (0, True), text
    assert left.wait() == 1
    code, text = asked("drain", names[stays.pid], f"--job={host.pid}")
    assert (code, "1 node would be left, and the job needs 2" in text) == (5, True), text
    rank, lost = map(int, stays.wait_for_line(r"here (\d+) (\d+)\.").groups())
    os.kill(lost, signal.SIGKILL)
    # A node with a lower rank has left, so the new worker does not get the rank that the lost one began with.
    begun, new = map(int, stays.wait_for_lines(r"here (\d+) (\d+)\.", 2)[1].groups())

    def told():
        events = [json.loads(line)["metadata"] for line in (tmp_path / "events").read_text().splitlines()]
        facts = {
            each["worker_id"]: [each[name] for name in ("state", "global_rank", "group_rank")]
            for each in events
        }
        return facts.get(str(new)), facts[str(lost)]

    first, last = wait_until(told, lambda found: found[0] is not None)
    now = [rank - 1] * 2
    assert (begun, first, last) == (rank - 1, ["START", *now], ["FAILED", *now])
    late = job.start()
    present = [host, stays, late]
    wait_until(lambda: {sizes(sockets, agent) for agent in present}, lambda found: found == {("HEALTHY", 3)})
    ranks = [status_of(sockets, agent)["group"]["rank"] for agent in present]
    assert sorted(ranks) == [0, 1, 2]
    for agent in present:
        text = asked("status", f"--job={agent.pid}")[1]
        assert sorted(line.split()[0] for line in text.splitlines() if line[:1].isdecimal()) == [
            "0",
            "1",
            "2",
        ]
    code, text = asked("drain", str(ranks[2]), f"--job={stays.pid}")
    assert (code, "n3 leaves the job" in text) == (0, True), text
    assert late.wait() == 1
    assert asked("stop", f"--job={stays.pid}")[0] == 0
    assert [agent.wait() for agent in (host, stays)] == [1, 1]


@pytest.mark.parametrize("mode", ["restart", "replace"])
@pytest.mark.parametrize("options", [(), ("--now",)], ids=["stop", "now"])
def test_a_stop_on_a_node_that_leaves_ends_the_job(nodes, sockets, asked, tmp_path, mode, options):
    # Only the workers of the node whose name is the name of a file do not end at SIGTERM.
    late = f"os.path.exists('{tmp_path}/' + os.uname().nodename)"
    source = f"import os, signal\nsignal.signal(15, lambda *_: {late} or os._exit(1))\n{SAVES}"
    job = nodes("2:3", 3, f"--on-failure={mode}", f"--report={tmp_path}/report", source=source)
    host, leaves, other = job.by_host()
    name = status_of(sockets, leaves)["host"]
    (tmp_path / name).touch()
    assert asked("drain", name, "--no-wait", f"--job={host.pid}")[0] == 0
    code, text = asked("stop", *options, "--no-wait", f"--job={leaves.pid}")
    assert (code, "stopping the job: " in text) == (0, True), text
    if not options:
        code, text = asked("stop", "--no-wait", f"--job={leaves.pid}")
        assert (code, "the job is being stopped already" in text) == (5, True), text
        assert asked("stop", "--now", f"--job={leaves.pid}")[0] == 0
    assert [agent.wait() for agent in job.agents] == [1, 1, 1]
    for agent in (host, other):
        assert ("elasticctl stop --now" if options else f"elasticctl stop on node {name}") in agent.stderr
        ends = [line for line in agent.stderr.splitlines() if "the job ends" in line]
        assert not any("left" in line for line in ends), ends
    assert "by elasticctl stop" in leaves.stderr


def test_a_sigterm_to_a_drained_node_kills_no_worker_that_saves(nodes, sockets, asked):
    job = nodes(
        "1:2",
        2,
        source=f"import os, signal\nsignal.signal(15, lambda *_: os.write(1, b'saving\\n'))\n{SAVES}",
    )
    host, leaves = job.by_host()
    name = status_of(sockets, leaves)["host"]
    assert asked("drain", name, "--no-wait", f"--job={host.pid}")[0] == 0
    leaves.wait_for_line("saving")
    # The scheduler that has drained the node ends the launcher. Within 0.1 s, nothing would be said.
    leaves.read_for(0.15)
    leaves.signal(signal.SIGTERM)
    leaves.wait_for_line("SIGTERM counts as the stop request", "stderr")
    os.kill(int(leaves.wait_for_line(r"here \d+ (\d+)\.")[1]), signal.SIGUSR1)
    assert leaves.wait() == 1
    assert "saved" in leaves.stdout
    assert asked("stop", "--now", f"--job={host.pid}")[0] == 0
    assert host.wait() == 1


def test_an_agent_that_was_paused_says_so_and_not_only_that_the_store_was_lost(launch, worker_script):
    argv = launcher_with("_engine.supervise.decide.several_nodes", SAFETY_TICK=0.2)
    port = ports.free()
    conf = ",".join(f"{name}={value}" for name, value in QUICK.items())
    options = (*meeting("1:2", port), f"--rdzv-conf={conf},last_call_timeout=600", worker_script(WAITS))
    agents = [launch(*options, argv=argv) for _ in range(2)]
    for agent in agents:
        agent.wait_for_line(r"here \d")
    host, paused = sorted(agents, key=lambda agent: not ports.listens(agent.pid, port))
    os.kill(paused.pid, signal.SIGSTOP)
    host.wait_for_line("lost", "stderr")
    os.kill(paused.pid, signal.SIGCONT)
    paused.wait_for_line(r"this agent did not run for \d", "stderr")
    for agent in (host, paused):
        agent.signal(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [1, 1]
    assert "did not run" not in host.stderr


def test_a_checkpoint_by_one_command_reaches_the_ranks_of_all_nodes(nodes, asked):
    job = nodes("2", 2, source=SAVES, nproc=2)
    code, text = asked("checkpoint", f"--job={job.agents[1].pid}")
    assert (code, "SIGUSR1 sent to 4 ranks at once" in text) == (0, True), text
    for agent in job.agents:
        agent.wait_for_lines(r"saved (\d)\.", 2)
    assert [agent.wait() for agent in job.agents] == [0, 0]


def test_a_checkpoint_is_refused_if_a_rank_of_another_node_has_no_handler(nodes, sockets, asked):
    job = nodes("2", 2, source=DEAF, nproc=2)
    ranks = [status_of(sockets, agent)["group"]["rank"] for agent in job.agents]
    for agent in job.agents:
        code, text = asked("checkpoint", f"--job={agent.pid}")
        assert (code, "SIGUSR1 would kill rank 2. A checkpoint on request needs one of these:" in text) == (
            5,
            True,
        ), text
        assert long_lines(agent.stderr) == []
    assert sorted(ranks) == [0, 1]
    assert asked("stop", "--now", f"--job={job.agents[0].pid}")[0] == 0
    assert [agent.wait() for agent in job.agents] == [1, 1]


@pytest.mark.parametrize(("options", "source"), [((), WAITS), (("--now",), STUBBORN)], ids=["stop", "now"])
def test_a_stop_is_told_as_a_stop_on_all_nodes(nodes, asked, tmp_path, options, source):
    job = nodes("2", 2, f"--report={tmp_path}/report", source=source)
    assert asked("stop", *options, f"--job={job.agents[1].pid}")[0] == 0
    assert [agent.wait() for agent in job.agents] == [1, 1]
    for agent in job.agents:
        assert re.search(r"\]: stopped(?: by elasticctl stop(?: --now)?)? after", agent.stderr), agent.stderr
        assert "verdict" not in agent.stderr
        assert "failed" not in agent.stderr
        assert long_lines(agent.stderr) == []
    first = "SIGKILL" if options else "SIGTERM"
    assert f"elasticctl: the job ends; {first} to the workers" in job.agents[1].stderr
    told = " ".join(job.agents[1].stderr.split())
    assert "sent again" not in told
    assert ("at once: elasticctl stop --now" in told) == (not options)
    assert json.loads((tmp_path / "report").read_text())["outcome"] == "stopped"


def test_the_ranks_of_all_nodes_are_shown_while_somebody_asks(nodes, sockets, asked):
    job = nodes("3", 3, source=COUNTS)
    assert status_of(sockets, job.agents[0])["others"] == []
    code, text = asked("status", f"--job={job.agents[0].pid}")
    assert code == 0
    assert ": running with 3 ranks on 3 nodes for " in text
    assert ", step 1,041 (" in text
    hosts = {status_of(sockets, agent)["workers"][0]["rank"]: f"n{at}" for at, agent in enumerate(job.agents)}
    rows = [line.split()[:2] for line in text.splitlines() if line[:1].isdecimal()]
    assert rows == [[str(rank), hosts[rank]] for rank in range(3)]
    told = json.loads(asked("status", "--json", f"--job={job.agents[0].pid}")[1])["others"]
    assert [each["node"] for each in told] == [hosts[each["group_rank"]] for each in told]
    # The second command shows the other agents' answers to the first one, which are under two seconds old.
    assert told[0]["age_seconds"] > 0
    stopped = next(each for each in told if each["node"] == "n2")
    agent = job.agents[2]
    os.kill(stopped["workers"][0]["pid"], signal.SIGSTOP)
    agent.wait_for_line(r"is stopped \(SIGSTOP\)", "stderr")
    wait_until(
        lambda: asked("status", f"--job={job.agents[0].pid}")[1],
        lambda text: f"kill -CONT {stopped['workers'][0]['pid']} on n2 continues it" in text,
    )
    os.kill(stopped["workers"][0]["pid"], signal.SIGCONT)
    assert asked("stop", "--now", f"--job={agent.pid}")[0] == 0
    assert [agent.wait() for agent in job.agents] == [1, 1, 1]


TRAINS = """
import os, select, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, slow = dist.get_rank(), int(os.environ["SLOW"])
for step in range(1 << 40):
    select.select([], [], [], 0.02 if rank == slow else 0.005)  # work
    dist.all_reduce(torch.ones(8))
    if step == 100:
        os.write(1, f"here {rank} {os.getpid()}.\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("slow", [3, -1])
def test_a_slow_rank_is_named_on_all_nodes(nodes, asked, monkeypatch, slow):
    for name, value in {"SLOW": str(slow), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    job = nodes("2", 2, source=TRAINS, nproc=2)

    def told():
        status = json.loads(asked("status", "--json", f"--job={job.agents[0].pid}")[1])
        workers = [*status["workers"], *(each for other in status["others"] for each in other["workers"])]
        return {each["rank"]: each for each in workers}

    def is_known(workers):
        found = [rank for rank, each in workers.items() if each["late"]]
        return [each["has_recorder"] for each in workers.values()] == [True] * 4 and bool(found) == (
            slow >= 0
        )

    workers = wait_until(told, is_known)
    late = {rank: each["late"] for rank, each in workers.items() if each["late"]}
    assert late.keys() == {slow} - {-1}
    lines = asked("status", f"--job={job.agents[0].pid}")[1].splitlines()
    assert [line.split(":")[0] for line in lines if " behind the others on n" in line] == [
        f"rank {rank}" for rank in late
    ]
    if late:
        assert (late[slow]["operation"], late[slow]["may_wait"]) == ("all_reduce", False)
        assert 10 < late[slow]["lag_ms"] < 40
    assert asked("stop", "--now", f"--job={job.agents[0].pid}")[0] == 0
    assert [agent.wait() for agent in job.agents] == [1, 1]


LOADS = """
import os, signal
from elasticrs._engine.inside.flight import answer_with_record

def load():
    os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.sigwait([signal.SIGUSR1])

if os.environ["RANK"] != "3":
    answer_with_record()
load()
"""


def test_the_stacks_of_all_nodes_are_merged(nodes, asked, monkeypatch):
    job = nodes("2", 2, source=LOADS, nproc=2)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    texts = {asked("stacks", f"--job={agent.pid}") for agent in job.agents}
    for code, text in texts:
        assert code == 0
        assert re.search(r"^ranks 0-2  sigwait \(signal.py:\d+\) <- load \(worker.py:8\)", text), text
    assert len(texts) == 2
    assert any(
        "rank 3: no answer; py-spy may see more if you run this command on n" in text for _, text in texts
    )
    assert asked("stop", "--now", f"--job={job.agents[0].pid}")[0] == 0
    assert [agent.wait() for agent in job.agents] == [1, 1]


@pytest.mark.slow
@pytest.mark.torch
def test_a_checkpoint_by_one_command_is_agreed_between_the_nodes(launch, sockets, asked):
    program = Path(__file__).parents[1] / "workers" / "agreed_training.py"
    env = {"ELASTICRS_CONTROL_DIR": str(sockets), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options = (*meeting("2"), "--nproc-per-node=2", program, "plain", "note")
    agents = [launch(*options, env=env) for _ in range(2)]
    for agent in agents:
        agent.wait_for_lines(r"BEGUN \d+", 2)
    for number in (1, 2):
        code, text = asked("checkpoint", f"--job={agents[number - 1].pid}")
        step = re.search(r"SIGUSR1 sent to 4 ranks after step \d+ of this attempt, held", text)
        assert (code, step is not None) == (0, True), text
        acted = [agent.wait_for_lines(r"ACTED \d+ (\d+) \w+ \w+", 2 * number)[-2:] for agent in agents]
        assert len({match[1] for matches in acted for match in matches}) == 1
    code, text = asked("stop", f"--job={agents[0].pid}")
    assert code == 0, text
    assert [agent.wait() for agent in agents] == [1, 1]


@pytest.mark.slow
def test_an_agent_that_does_not_answer_delays_no_command_for_long(nodes, sockets, asked):
    job = nodes("3", 3, "--rdzv-conf=keep_alive_max_attempt=60", source=SAVES)
    asker, silent, _ = job.by_host()
    name = status_of(sockets, silent)["host"]
    os.kill(silent.pid, signal.SIGSTOP)
    code, text = asked("checkpoint", f"--job={asker.pid}")
    assert (code, re.search(r"the node with group rank \d does not answer", text) is not None) == (1, True), (
        text
    )
    code, text = asked("drain", name, f"--job={asker.pid}")
    assert (code, f"no node {name!r} has answered" in text) == (2, True), text
    code, text = asked("status", f"--job={asker.pid}")
    assert (code, "and 1 rank of which other nodes have not told yet" in text) == (0, True), text
    os.kill(silent.pid, signal.SIGCONT)
    code, text = wait_until(lambda: asked("checkpoint", f"--job={asker.pid}"), lambda found: found[0] == 0)
    assert [agent.wait() for agent in job.agents] == [0, 0, 0]
