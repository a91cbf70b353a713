"""Agents that die or do not answer while a command of ``elasticctl`` waits for all nodes of a job."""

import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import ports, procs
from helpers.elasticctl import WAITS, status_of
from helpers.nodes import meeting
from helpers.procs import wait_until

pytestmark = pytest.mark.slow

HANDLES = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)\n" + WAITS.replace(
    "SIGUSR1", "SIGUSR2"
)


@pytest.fixture
def agents(launch, worker_script, sockets):
    """Four agents of a job, which continues as long as one of them is left. The store in which they meet runs
    in a process of its own, so it survives the death of any agent.
    """
    port = ports.free()
    store = launch(f"--port={port}", argv=(sys.executable, "-m", "elasticrs.store"))
    wait_until(lambda: ports.listens(store.pid, port))
    options = (*meeting("1:4", port), "--rdzv-conf=keep_alive_max_attempt=60,last_call_timeout=0")
    env = {"ELASTICRS_CONTROL_DIR": str(sockets)}
    started = []
    for _ in range(4):
        # Wait for each agent before the next one starts, so that the first one becomes the leader.
        started.append(launch(*options, worker_script(HANDLES), env=env))
        is_there = sockets.joinpath(f"{started[-1].pid}.sock").exists
        wait_until(is_there)
    yield started, sockets
    procs.reap_adopted(keep=[store.pid])
    store.signal(signal.SIGTERM)
    store.wait()


def is_whole(sockets, agents):
    """Return true if these agents run workers in one round, in which no other agent takes part."""
    found = [status_of(sockets, agent) for agent in agents]
    sizes = {(each["state"], (each["group"] or {}).get("world_size")) for each in found}
    return sizes == {("HEALTHY", len(agents))}


@pytest.mark.parametrize("order", ["checkpoint", "stacks", "status", "drain"])
def test_a_command_ends_if_the_leader_dies_while_an_agent_does_not_answer(agents, asked, order):
    (leader, silent, *rest), sockets = agents
    wait_until(lambda: is_whole(sockets, [leader, silent, *rest]))
    asker = rest[0]
    os.kill(silent.pid, signal.SIGSTOP)
    name = "9" if order == "drain" else None
    command = [sys.executable, "-m", "elasticrs.ctl", order, *filter(None, [name]), f"--job={asker.pid}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
        if order in ("checkpoint", "drain"):
            asker.wait_for_line(rf"elasticctl \(user {os.geteuid()}, pid {client.pid}\): {order}", "stderr")
        os.kill(leader.pid, signal.SIGKILL)
        text, _ = client.communicate(timeout=procs.HANG)
    leader.wait()
    assert client.returncode in ({"checkpoint": (1, 5), "drain": (2, 5)}.get(order, (0, 1, 5))), text
    os.kill(silent.pid, signal.SIGCONT)
    wait_until(lambda: is_whole(sockets, [silent, *rest]))
    text = wait_until(
        lambda: asked("checkpoint", f"--job={asker.pid}")[1], lambda text: "SIGUSR1 sent" in text
    )
    assert re.search(r"SIGUSR1 sent to 3 ranks at once", text)
    assert asked("stop", "--now", f"--job={asker.pid}")[0] == 0
    assert [agent.wait() for agent in (silent, *rest)] == [1, 1, 1]


def test_a_drain_is_refused_if_the_workers_are_restarted_while_it_waits_for_an_agent(agents, asked):
    (leader, silent, *rest), sockets = agents
    every = [leader, silent, *rest]
    wait_until(lambda: is_whole(sockets, every))
    asker = rest[0]
    os.kill(silent.pid, signal.SIGSTOP)
    command = [sys.executable, "-m", "elasticrs.ctl", "drain", "nowhere", f"--job={asker.pid}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
        asker.wait_for_line(rf"elasticctl \(user {os.geteuid()}, pid {client.pid}\): drain", "stderr")
        assert asked("restart", "--no-wait", f"--job={leader.pid}")[0] == 0
        text, _ = client.communicate(timeout=procs.HANG)
    assert (client.returncode, "no workers are running now" in text) == (5, True), text
    os.kill(silent.pid, signal.SIGCONT)
    wait_until(lambda: is_whole(sockets, every))
    assert asked("stop", "--now", f"--job={asker.pid}")[0] == 0
    assert [agent.wait() for agent in every] == [1, 1, 1, 1]
