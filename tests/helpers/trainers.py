"""Trainers that form a job together. All of them are forked from one process that has imported torch."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.coordination import store_command
from helpers.forker import Forker
from helpers.launcher import clean_environment
from helpers.procs import HANG

Told = dict[str, Any]


class Parent(Forker):
    """The process that forks the trainers of all jobs, one job at a time."""

    def __init__(self) -> None:
        super().__init__("trainers.py")

    @contextmanager
    def job(self, query: str, stderr: Path) -> "Iterator[ByHand]":
        """Yield the trainers of a job with a separate coordination store. All trainers are stopped
        afterwards.

        Args:
            query: what stands after the ? of the URL.
            stderr: the file for that of the trainers.
        """
        with store() as port:
            trainers = ByHand(self, f"elasticrs://127.0.0.1:{port}/job?{query}", stderr)
            try:
                yield trainers
            finally:
                self.order({"end": True})
                trainers.wait("all ended")


@contextmanager
def store() -> Iterator[int]:
    """Run a coordination store in a separate process, and yield its port."""
    process = subprocess.Popen(
        store_command(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean_environment()
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().decode().rsplit(":", 1)[1].split()[0])
    finally:
        process.stdout.close()
        process.kill()
        process.wait()


class Trainers:
    """The trainers of one job, and their reports.

    Args:
        told: the descriptor from which that comes.
    """

    def __init__(self, told: int) -> None:
        self._fd = told
        self.told: list[Told] = []
        self.pids: dict[str, int] = {}
        self._seen = 0
        self._rest = b""

    def has_news(self, timeout: float) -> bool:
        """Wait until a trainer reports something. Return false after ``timeout`` seconds."""
        return bool(select.select([self._fd], [], [], timeout)[0])

    def story(self, last: int | None = 200) -> str:
        """Return the latest reports, or all of them, and anything else that is known."""
        return "\n".join(map(str, self.told[-last if last else 0 :]))

    def take(self, timeout: float) -> Told | None:
        """Return the next report, or `None` if there is none within ``timeout`` seconds."""
        if self._seen == len(self.told):
            if not self.has_news(timeout):
                return None
            data = os.read(self._fd, 1 << 16)
            assert data, "the parent of the trainers has ended"
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                self.told.append(told)
                self.pids[told["name"]] = told["pid"]
        if self._seen == len(self.told):
            return self.take(timeout)
        self._seen += 1
        return self.told[self._seen - 1]

    def take_for(self, seconds: float) -> None:
        """Take all reports that arrive within this time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.take(left)

    def wait(self, what: str, count: int = 1, timeout: float = HANG, **fields: Any) -> list[Told]:
        """Wait for `count` matching reports, not counting those that have been taken before."""
        found: list[Told] = []
        deadline = time.monotonic() + timeout
        while len(found) < count:
            told = self.take(max(0.0, deadline - time.monotonic()))
            assert told is not None, f"only {found} of {count} {what} {fields}\n{self.story()}"
            if told["what"] == what and all(told.get(field) == value for field, value in fields.items()):
                found.append(told)
        return found

    def wait_until(self, holds: Callable[[], bool], timeout: float = HANG) -> None:
        deadline = time.monotonic() + timeout
        while not holds():
            assert self.take(max(0.0, deadline - time.monotonic())) is not None, self.story()

    def of(self, what: str, *names: str) -> list[Told]:
        return [each for each in self.told if each["what"] == what and (not names or each["name"] in names)]

    def kill(self, name: str, signum: int = signal.SIGKILL) -> float:
        """Send a signal, and return the time at which it was sent."""
        return self.kill_pid(self.pids[name], signum)

    @staticmethod
    def kill_pid(pid: int, signum: int = signal.SIGKILL) -> float:
        """Send a signal to a trainer, and return the time at which it was sent."""
        moment = time.monotonic()
        os.kill(pid, signum)
        return moment


class ByHand(Trainers):
    """Trainers that meet at a URL and are started without agents."""

    def __init__(self, parent: Parent, url: str, stderr: Path) -> None:
        super().__init__(parent.answers.fileno())
        self._parent = parent
        self.url, self.stderr = url, stderr

    def start(self, *names: str, **order: Any) -> None:
        defaults = {"loop": "train", "url": self.url, "stderr": str(self.stderr)}
        for name in names:
            self._parent.order({**defaults, **order, "name": name})

    def start_all(self, orders: Mapping[str, Mapping[str, Any]], **_: Any) -> None:
        """Start these trainers, each with an order. Ignore the arguments that only agents need."""
        for name, order in orders.items():
            self.start(name, **order)

    def after(self, *names: str) -> Sequence[str]:  # noqa: ARG002 -- as under agents
        """Return no names, because nothing replaces a trainer that exits."""
        return ()

    def replaced(self, name: str, code: int) -> None:
        """Assert that a trainer exited with this code."""
        assert self.code(name) == code

    def fails(self, *names: str) -> None:
        for name in names:
            self.replaced(name, 1)

    def over(self) -> None:
        """Do nothing, because there are no agents to wait for."""

    def stderr_text(self) -> str:
        return self.stderr.read_text()

    def code(self, name: str) -> int:
        """Wait until a trainer has exited, and return its exit code."""
        self._parent.order({"name": name, "wait": self.pids[name]})
        code: int = self.wait("ended", name=name)[0]["code"]
        return code
