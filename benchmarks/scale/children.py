"""Child processes that receive commands and send answers, as one line of JSON each."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, wait_readable

HANG = 300.0
PAGE = os.sysconf("SC_PAGE_SIZE")


class Child:
    """A child process that runs a module of this package.

    Args:
        module: which part of it.
        arguments: of that part.
    """

    def __init__(self, module: str, **arguments: Any) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", f"benchmarks.scale.{module}", json.dumps(arguments)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        self._rest = b""
        self._proc = Path(f"/proc/{self._process.pid}")

    def tell(self, do: str, **details: Any) -> None:
        """Send a command without waiting for its answer."""
        write_line(self._in, {"do": do, **details})

    def answer(self, timeout: float = HANG) -> Any:
        """Return the answer to the oldest unanswered command.

        Raises:
            TimeoutError: there is none.
            EOFError: the process is gone.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._rest:
            if not wait_readable(self._out, deadline - time.monotonic()):
                raise TimeoutError(f"{self._process.args!r} does not answer")
            data = os.read(self._out, 1 << 20)
            if not data:
                raise EOFError(f"{self._process.args!r} ended with {self._process.wait()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def ask(self, do: str, **details: Any) -> Any:
        """Send a command and wait for its answer."""
        self.tell(do, **details)
        return self.answer()

    def stands_for(self, pid: int) -> None:
        """Measure the costs of the process ``pid`` instead of the child's from now on."""
        self._proc = Path(f"/proc/{pid}")

    def cpu(self) -> dict[str, float]:
        """Return the CPU time in seconds, by thread name."""
        used: dict[str, float] = {}
        for task in (self._proc / "task").iterdir():
            name = (task / "comm").read_text(encoding="utf-8").strip()
            nanoseconds = int((task / "schedstat").read_text(encoding="utf-8").split()[0])
            used[name] = used.get(name, 0.0) + nanoseconds / 1e9
        return used

    def resident(self) -> int:
        """Bytes of memory."""
        return int((self._proc / "statm").read_text(encoding="utf-8").split()[1]) * PAGE

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Close the child's input so that it exits. Kill it after 30 seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def write_line(fd: int, message: Any) -> None:
    """Write a complete line of JSON, even if that needs several writes."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


class Lines:
    def __init__(self, fd: int = 0) -> None:
        self.fd = fd
        self._rest = b""
        self.is_open = True

    def read(self) -> list[Any]:
        """Wait for input and return the complete commands received. At the end of the input, set
        :attr:`is_open` to false.
        """
        data = os.read(self.fd, 1 << 16)
        if not data:
            self.is_open = False
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
