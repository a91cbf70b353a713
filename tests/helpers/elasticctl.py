"""Runs ``elasticctl`` in tests, and sends requests to agents over the same sockets as it does."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elasticrs import ctl
from elasticrs._engine.cli.control_client import Connection
from helpers.launcher import Launched
from helpers.procs import HANG

WAITS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
signal.sigwait([signal.SIGUSR1])
"""

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS
"""Program as ``WAITS`` that SIGTERM does not end."""

SAVES = """
import os, signal
saved = []
signal.signal(signal.SIGUSR1, lambda *_: saved.append(1))
os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
while not saved:
    signal.pause()
os.write(1, f"saved {os.environ['RANK']}.\\n".encode())
"""
"""Program that handles SIGUSR1 as a request for a checkpoint."""

COUNTS = (
    """
import time
from elasticrs._engine.inside.boundary import _map_words
from elasticrs._engine.inside.keep.layout import Agreed
while (words := _map_words()) is None:  # The agent prepares the file soon after the start.
    pass
words[Agreed.STEPS], words[Agreed.TIME] = 1041, time.monotonic_ns()
"""
    + WAITS
)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for the Unix sockets on which agents listen to ``elasticctl``. Only jobs of this test use it."""
    monkeypatch.setenv("ELASTICRS_CONTROL_DIR", str(tmp_path / "c"))
    return tmp_path / "c"


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs ``elasticctl``, and returns its exit code and what it wrote."""

    def ask(*args: str) -> tuple[int, str]:
        code = ctl.main(args)
        written = capsys.readouterr()
        return code, written.out + written.err

    return ask


def socket_of(sockets: Path, job: Launched) -> Path:
    return sockets / f"{job.pid}.sock"


def status_of(sockets: Path, job: Launched) -> dict[str, Any]:
    with closing(Connection(str(socket_of(sockets, job)), HANG)) as connection:
        connection.request("GET", "/status")
        status: dict[str, Any] = json.loads(connection.getresponse().read())
        return status


def sizes(sockets: Path, agent: Launched) -> tuple[str, int | None] | None:
    """Ask an agent for the job's state and number of nodes. Return ``None`` if the agent has no socket."""
    if not socket_of(sockets, agent).exists():
        return None
    status = status_of(sockets, agent)
    return status["state"], (status["group"] or {}).get("world_size")
