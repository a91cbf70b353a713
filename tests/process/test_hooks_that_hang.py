"""Real agents whose hooks hang or take long, and the responses of their health check servers."""

import re
import signal
import socket
import sys

import pytest
from helpers.held import held, thread_of
from helpers.http_client import get_json, port_of

LIMIT = 0.2

HOST = f"""
import os, sys, time
from elasticrs.agent.server import LocalElasticAgent, WorkerSpec
from elasticrs.agent.server.health_check_server import HealthCheckServer
from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException
from elasticrs.rendezvous import RendezvousHandler, RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler

WHERE, INTERVAL, TOLD = sys.argv[1], float(sys.argv[2]), sys.argv[3]

def wait_in(name):
    '''Until the test says so, once.'''
    global WHERE
    if name == WHERE:
        WHERE = ""
        if TOLD:
            agent._tell_progress(float(TOLD))
        os.write(1, f"IN {{name}}\\n".encode())
        os.read(0, 1)

class Waits(LocalElasticAgent):
    pass

def waiting(name):
    def hook(self, *arguments, **named):
        wait_in(name)
        return getattr(LocalElasticAgent, name)(self, *arguments, **named)
    return hook

for name in ("_rendezvous", "_start_workers", "_monitor_workers", "_stop_workers", "_pause"):
    setattr(Waits, name, waiting(name))

handler = get_rendezvous_handler(RendezvousParameters("c10d", "", "job", 1, 1))
asked = handler.num_nodes_waiting
handler.num_nodes_waiting = lambda: wait_in("num_nodes_waiting") or asked()
spec = WorkerSpec(
    "trainer", 1, handler, entrypoint="sleep", args=("1000",), max_restarts=0, monitor_interval=INTERVAL
)
server = HealthCheckServer(time.time, 0, {LIMIT})
server.open()
print("health check server on http://" + server.address, file=sys.stderr, flush=True)
agent = Waits(spec, DefaultLogsSpecs(os.devnull), health_check_server=server, shutdown_timeout=30)
try:
    agent.run()
except SignalException as error:
    print("ENDED", error.sigval.name, flush=True)
handler.shutdown()
"""


class Host:
    """An agent with a hook that waits for the test."""

    def __init__(self, launched, writer):
        self.launched, self._writer = launched, writer
        self.port = port_of(launched)

    def answers(self):
        """Send /healthz requests one after another, and yield the responses."""
        while True:
            code, health = get_json(self.port, "/healthz")
            assert (code == 200) == health["alive"]
            yield health

    def goes_on(self):
        self._writer.send(b".")

    def uptime(self):
        return get_json(self.port, "/status")[1]["agent"]["uptime_seconds"]

    def end(self):
        self.launched.signal(signal.SIGTERM)
        assert self.launched.wait() == 0, self.launched.stderr
        assert self.launched.stdout.splitlines()[-1] == "ENDED SIGTERM"


@pytest.fixture
def host(launch, tmp_path):
    program, opened = tmp_path / "host.py", []
    program.write_text(HOST, encoding="utf-8")

    def start(where, interval=0.01, told=""):
        reader, writer = socket.socketpair()
        opened.append(writer)
        arguments = (program, where, str(interval), str(told))
        with reader:
            launched = launch(*arguments, argv=[sys.executable], stdin=reader.fileno())
        return Host(launched, writer)

    yield start
    for each in opened:
        each.close()


@pytest.mark.parametrize(
    ("where", "told"),
    [("_monitor_workers", ""), ("num_nodes_waiting", ""), ("_start_workers", 0), ("_rendezvous", 0)],
)
def test_a_hanging_hook_makes_the_agent_unhealthy_until_it_returns(host, where, told):
    agent = host(where, told=told)
    agent.launched.wait_for_line(f"IN {where}")
    said = next(health for health in agent.answers() if "progress" in (health["reason"] or ""))
    assert not said["alive"]
    assert said["age_seconds"] > said["limit_seconds"] == LIMIT
    assert re.fullmatch(rf".*\b[\d.]+ s ago, in {where}", said["reason"])
    agent.goes_on()
    # The agent is alive again, even if its next pause is long.
    assert any(health["alive"] and health["reason"] is None for health in agent.answers())
    agent.end()


@pytest.mark.parametrize(
    ("where", "told", "interval"),
    [
        ("_rendezvous", "", 0.01),
        ("_start_workers", "", 0.01),
        ("_pause", "", 1000),
        ("_monitor_workers", 1000, 0.01),
    ],
)
def test_a_hook_that_may_take_long_keeps_the_agent_healthy(host, where, told, interval):
    agent = host(where, interval, told)
    agent.launched.wait_for_line(f"IN {where}")
    until = agent.uptime() + 3 * LIMIT
    # On a loaded machine, the health check thread may be late, but the hook never misses its deadline.
    for health in agent.answers():
        assert "progress" not in (health["reason"] or "")
        if agent.uptime() > until:
            break
    agent.goes_on()
    agent.end()


def test_a_hanging_runtime_makes_the_agent_unhealthy(host):
    agent = host("nowhere")
    while get_json(agent.port, "/readyz")[0] != 200:
        pass
    with held(thread_of(agent.launched.pid, "elasticrs")):
        # On a loaded machine, the first failures may have other reasons, so poll until one names the runtime.
        assert any("runtime" in health["reason"] for health in agent.answers() if not health["alive"])
    assert any(health["alive"] for health in agent.answers())
    agent.end()
