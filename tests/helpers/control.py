"""A helper program that reads commands as lines of JSON from standard input, and answers each with a line of
JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.procs import HANG, bystanders, wait_readable

INSIDE = Path(__file__).resolve().parent / "inside"
"""Where these programs are."""


class Program:
    """A running program of `tests/helpers/inside`. It exits when :meth:`close` closes its standard input.

    Args:
        name: of the file.
        prefix: before its command line, to run it in the namespaces of a host.

    Raises:
        AssertionError: it ended before it was ready; the message has what it said.
    """

    def __init__(self, name: str, *args: str, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-S", str(INSIDE / f"{name}.py"), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        bystanders.add(self.pid)
        self._buffer = b""
        try:
            self.greeting = self.read_line()
        except AssertionError:
            self.close()
            raise

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            AssertionError: it ended, does not answer, or refused the command.
        """
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(self.read_line())
        assert "error" not in answer, answer["error"]
        return answer

    def read_line(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + HANG
        while b"\n" not in self._buffer:
            assert wait_readable(stdout.fileno(), deadline - time.monotonic()), "no answer"
            chunk = os.read(stdout.fileno(), 1 << 16)
            assert chunk, f"it ended with {self._process.wait(HANG)}: {self._process.args!r}"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def close(self) -> int:
        """Close the program's standard input, wait for the program to exit, and return its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        bystanders.discard(self.pid)
        try:
            return self._process.wait(HANG)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
