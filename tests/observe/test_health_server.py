"""The API of the health check server, and its responses when an agent hangs."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers.http_client import get, get_json, wait_until_answers
from helpers.ports import free
from helpers.procs import HANG, wait_readable, wait_until

from elasticrs import _core
from elasticrs.agent.server.health_check_server import HealthCheckServer, create_healthcheck_server


@pytest.fixture
def serve():
    servers = []

    def start(callback, timeout=60):
        servers.append(create_healthcheck_server(callback, 0, timeout))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_the_health_server_can_be_started_and_stopped_repeatedly():
    server = HealthCheckServer(time.time, 0, 60)
    server.stop()
    for _ in range(2):
        server.start()
        server.start()
        port = server.port
        assert get_json(port, "/healthz")[0] == 200
        server.stop()
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            get(port, "/healthz")
        assert server.alive_callback is time.time


def test_an_agent_with_outdated_progress_is_reported_as_not_alive(serve):
    server = serve(lambda: int(time.time()) - 100)
    code, health = get_json(server.port, "/healthz")
    assert (code, health["alive"]) == (503, False)
    assert health["age_seconds"] >= 100
    assert " 10" in health["reason"]


def test_an_agent_is_not_alive_while_its_alive_callback_hangs(serve):
    goes_on = threading.Event()
    called = threading.Event()

    def hangs():
        called.set()
        goes_on.wait(30)
        return time.time()

    server = serve(hangs, timeout=0.2)
    # The first request waits until the timeout expires.
    get_json(server.port, "/healthz")
    assert called.is_set()
    code, health = get_json(server.port, "/healthz")
    assert (code, health["alive"]) == (503, False)
    assert "not answered" in health["reason"]
    goes_on.set()
    # The agent is alive again as soon as the callback has returned.
    wait_until_answers(server.port, "/healthz")


def test_an_agent_is_not_alive_if_its_alive_callback_raises(serve, monkeypatch):
    asked, said = [], []
    # Do not keep log records: their tracebacks would hold the server's file descriptor open.
    monkeypatch.setattr(logging.getLogger("elasticrs.agent"), "exception", said.append)

    def breaks():
        asked.append(1)
        raise ValueError("no")

    server = serve(breaks, timeout=0.1)
    get_json(server.port, "/healthz")
    assert get_json(server.port, "/healthz")[0] == 503
    assert len(asked) == 1
    assert said == ["the alive_callback failed"]


@pytest.mark.parametrize("path", ["/status", "/metrics"])
def test_status_is_served_only_for_host_names_of_this_machine(serve, path):
    port = serve(time.time).port
    own = ("127.0.0.1", f"10.1.2.3:{port}", "[::1]:1", "localhost", "LOCALHOST.:80", socket.gethostname())
    for host in own:
        assert get(port, path, host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example"):
        status, kind, text = get(port, path, host=host)
        assert (status, kind.partition(";")[0]) == (421, "text/plain")
        assert "--health-check-host" in text


def test_health_probes_are_served_for_any_host_name(serve):
    port = serve(time.time).port
    assert get(port, "/healthz", host="job.cluster.example")[0] == 200
    assert get(port, "/readyz", host="job.cluster.example")[0] == 503


def test_the_configured_host_counts_as_a_name_of_this_machine():
    # No hosts file contains `127.1`: the C library's resolver parses it as an address.
    server = _core.HealthServer("127.1", 0, 60.0)
    try:
        assert get(server.port, "/status", host="127.1:80")[0] == 200
        assert get(server.port, "/status", host="127.2")[0] == 421
    finally:
        server.close()


def test_a_client_that_keeps_sending_is_disconnected_and_delays_no_other(serve):
    port = serve(time.time).port
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        # Send more data than the socket buffers and the server take together.
        much = bytes(64 << 20)
        with pytest.raises(ConnectionError):
            client.sendall(much)
    assert get_json(port, "/healthz")[0] == 200


def test_simultaneous_requests_share_calls_of_the_alive_callback(serve):
    asked = []
    goes_on = threading.Event()

    def counts():
        asked.append(1)
        goes_on.wait(30)
        return time.time()

    server = serve(counts)
    codes = []
    clients = [
        threading.Thread(target=lambda: codes.append(get_json(server.port, "/healthz")[0])) for _ in range(20)
    ]
    for client in clients:
        client.start()
    wait_until(lambda: asked)
    goes_on.set()
    for client in clients:
        client.join()
    assert codes == [200] * 20
    assert len(asked) <= 3


def test_invalid_values_for_the_status_page_are_refused():
    server = _core.HealthServer("127.0.0.1", 0, 60.0)
    with pytest.raises(ValueError, match="no JSON"):
        server.publish("HEALTHY", "{", None)
    with pytest.raises(ValueError, match="no object"):
        server.publish("HEALTHY", "[]", None)
    for call in (lambda: server.enter("idle"), lambda: server.restarted("weather")):
        with pytest.raises(ValueError, match=r"idle|weather"):
            call()
    with pytest.raises(ValueError, match="expected 1 or 2, got 3"):
        server.watch_files([(0, 3, "stdout.log")], True)
    server.close()
    server.close()


def test_closing_the_server_in_a_forked_child_does_not_affect_the_parent():
    server = _core.HealthServer("127.0.0.1", 0, 60.0)
    pid = os.fork()
    if pid == 0:
        server.close()
        del server
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert get_json(server.port, "/readyz") == (503, {"ready": False, "state": "INIT"})
    server.close()


HOST = """
import json, os, sys, time
from elasticrs import LaunchConfig, elastic_launch
from elasticrs.agent.server.health_check_server import HealthCheckServer
from elasticrs.multiprocessing import DefaultLogsSpecs

fifo, kind = sys.argv[1:]

def callback():
    # Hangs until somebody writes.
    with open(fifo) as file:
        file.read()
    return time.time()

class Stuck(DefaultLogsSpecs):
    def reify(self, envs):
        callback()
        return super().reify(envs)

if __name__ == "__main__":
    server = None
    if kind != "of_the_environment":
        stuck = kind == "stuck"
        server = HealthCheckServer(time.time if stuck else callback, 0, 1.5 if stuck else 0.2)
    specs = (Stuck if kind == "stuck" else DefaultLogsSpecs)(os.getcwd())
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", run_id="job", logs_specs=specs)
    if server is not None:
        server.open()
        print(server.port, flush=True)
    elastic_launch(config, "sh", server)("-c", "read line < job")
    print("done", flush=True)
"""


@pytest.fixture
def host(tmp_path):
    (tmp_path / "host.py").write_text(HOST)
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "job")
    started = []

    def start(kind, **env):
        command, env = [sys.executable, "host.py", "fifo", kind], {**os.environ, **env}
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_health_check_returns_503_while_the_agent_loop_hangs(host, tmp_path):
    process = host("ours")
    with process.stdout:
        port = int(process.stdout.readline())
        # The workers start even if nothing has called /healthz yet.
        with open(tmp_path / "job", "w") as job:
            wait_until_answers(port, "/readyz")
            get_json(port, "/healthz")
            code, health = get_json(port, "/healthz")
            assert (code, health["alive"]) == (503, False)
            # While the loop hangs, the server returns the state that was published last.
            assert get_json(port, "/readyz") == (200, {"ready": True, "state": "HEALTHY"})
            assert get_json(port, "/status")[1]["agent"]["alive"] is False
            assert "elasticrs_agent_alive 0\n" in get(port, "/metrics")[2]
            with open(tmp_path / "fifo", "w"):
                pass
            # The metrics show that the loop has resumed, although nothing has called /healthz since.
            wait_until(lambda: "elasticrs_agent_alive 1\n" in get(port, "/metrics")[2])
            job.write("end\n")
        assert process.stdout.read() == "done\n"
        assert process.wait() == 0


def test_the_first_health_check_returns_503_if_the_agent_loop_already_hangs(host, tmp_path):
    process = host("stuck")
    with process.stdout:
        port = int(process.stdout.readline())
        with open(tmp_path / "fifo", "w"):
            # The loop is stuck in the user's LogsSpecs class for longer than the limit.
            assert not wait_readable(process.stdout.fileno(), 1.7)
            assert "elasticrs_agent_alive 0\n" in get(port, "/metrics")[2]
            code, health = get_json(port, "/healthz")
            assert (code, health["alive"]) == (503, False)
            assert health["age_seconds"] >= 1.7
            assert "no step" in health["reason"]
        with open(tmp_path / "job", "w") as job:
            # Wait until the workers run and the loop waits for them.
            wait_until_answers(port, "/readyz")
            assert get_json(port, "/healthz")[0] == 200
            job.write("end\n")
        assert process.stdout.read() == "done\n"
        assert process.wait() == 0


def test_the_port_variable_of_torch_starts_the_server_for_python_launches(host, tmp_path):
    port = free()
    process = host("of_the_environment", TORCHELASTIC_HEALTH_CHECK_PORT=str(port))
    with process.stdout:
        with open(tmp_path / "job", "w") as job:
            code, status = get_json(port, "/status")
            assert (code, status["job"]["run_id"]) == (200, "job")
            assert get_json(port, "/healthz")[1]["alive"]
            job.write("end\n")
        assert process.stdout.read() == "done\n"
        assert process.wait() == 0
