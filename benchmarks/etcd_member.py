"""Run a single etcd member on free loopback ports during a benchmark."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import DEVNULL
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.nodes import free_port

PROGRAM = "TORCHELASTIC_ETCD_BINARY_PATH"
READY = 60.0
"""Seconds to wait until the member answers."""


class Member(NamedTuple):
    """Client address and pid of a running etcd member."""

    endpoint: str
    pid: int


@contextmanager
def running() -> Iterator[Member]:
    """Context manager: start etcd with an empty data folder, and stop it at the end. Enable the v2 API,
    because torch's back end needs it.
    """
    clients, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get(PROGRAM) or shutil.which("etcd") or "etcd", "--data-dir", folder]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"default={peers}"]
        environment = {**os.environ, "ETCD_ENABLE_V2": "true"}
        with subprocess.Popen(command, stdin=DEVNULL, stderr=DEVNULL, env=environment) as process:
            try:
                _wait_until_ready(f"{clients}/health", process)
                yield Member(clients.removeprefix("http://"), process.pid)
            finally:
                process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urlopen(url, timeout=1).close()
        except (URLError, ConnectionError, TimeoutError):  # noqa: PERF203 -- until it answers
            time.sleep(0.02)
        else:
            return
    raise SystemExit(f"etcd does not answer (exit code {process.poll()})")
