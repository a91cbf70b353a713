"""``worker_main`` starts torch's server if the worker requests it, and always records the worker's errors."""

import http.client
import json
import os
import socket
import subprocess
import sys

import pytest

WORKER = """
import sys
from elasticrs.control_plane import worker_main

assert "torch" not in sys.modules

def body():
    print("ready", "torch" in sys.modules, flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise ValueError("told to")

decorated = worker_main()(body)
if sys.argv[1] == "decorator":
    decorated()
else:
    with worker_main():
        body()
"""


@pytest.fixture
def worker(tmp_path):
    """Return a function that starts the worker. Use its result in a ``with`` block."""

    def start(form, **variables):
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, form],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
        )

    return start


@pytest.mark.parametrize("form", ["decorator", "context"])
@pytest.mark.parametrize("word", ["fail", "end"])
def test_worker_main_without_a_socket_records_errors_and_needs_no_torch(worker, tmp_path, form, word):
    with worker(form) as process:
        out, _ = process.communicate(word + "\n", timeout=30)
    assert out == "ready False\n"
    assert process.returncode == (word == "fail")
    error_file = tmp_path / "error.json"
    assert error_file.exists() == (word == "fail")
    if word == "fail":
        assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: told to"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("form", ["decorator", "context"])
def test_worker_main_with_a_socket_starts_a_server_that_responds(worker, tmp_path, form):
    path = str(tmp_path / "socket")
    with worker(form, TORCH_WORKER_SERVER_SOCKET=path) as process:
        assert process.stdout.readline() == "ready True\n"
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(30)
        connection.sock.connect(path)
        connection.request("POST", "/handler/ping")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"pong")
        connection.close()
        process.communicate("end\n", timeout=30)
    assert process.returncode == 0
