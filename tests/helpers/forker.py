"""Programs that import torch once, and fork processes when a test orders it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers import procs
from helpers.launcher import clean_environment

WORKERS = Path(__file__).resolve().parent.parent / "workers"


class Forker:
    """A running program of `tests/workers`. It reads orders from its standard input, and ends when that ends.

    Args:
        program: name of the file.
        arguments: arguments of the program.
        python: the interpreter.
        env: more environment variables.
        how: more arguments for :class:`subprocess.Popen`.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        **how: Any,
    ) -> None:
        self._process = subprocess.Popen(
            [python, str(WORKERS / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(env),
            **how,
        )
        # This process outlives the tests that use it, and other tests must not wait for it as an orphan.
        procs.bystanders.add(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self.answers = self._process.stdin, self._process.stdout

    def order(self, order: object) -> None:
        """Send an order, which is a line of JSON."""
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()

    def close(self) -> None:
        self._process.communicate()
        procs.bystanders.discard(self._process.pid)
