"""The tests' end of ``workers/torch_client.py``: clients of torch's TCPStore, each in its own process.

``ELASTICRS_TORCH_PYTHON`` names the interpreter of another torch; tests of operations that it lacks are then
skipped.
"""

import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from helpers import procs
from helpers.launcher import clean_environment
from helpers.procs import HANG

OTHER_TORCH = os.environ.get("ELASTICRS_TORCH_PYTHON")
PROGRAM = Path(__file__).resolve().parent.parent / "workers" / "torch_client.py"
# With what a client begins.
GREETING = b"\0" + struct.pack("<I", 0x3C85F7CE)


class ClientError(Exception):
    """What the client raised: the name of its type, and its text."""


class TorchClient:
    """A process with a client of its own."""

    def __init__(self, connection: Connection) -> None:
        self.pid: int | None = None
        self._connection = connection

    def begin(self, name: str, *args: object) -> None:
        """Ask for something that may take long; :meth:`result` waits for it."""
        self._connection.send((name, args))

    def result(self, timeout: float = HANG) -> Any:
        """What came of it.

        Args:
            timeout: seconds after which it hangs.

        Raises:
            ClientError: the client raised.
            TimeoutError: it hangs.
        """
        if not self._connection.poll(timeout):
            raise TimeoutError("the client hangs")
        is_well, answer = self._connection.recv()
        if not is_well:
            raise ClientError(answer)
        return answer

    def is_done(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self._connection.poll()

    def ask(self, name: str, *args: object) -> Any:
        """:meth:`begin` and :meth:`result`."""
        self.begin(name, *args)
        return self.result()

    def call(self, method: str, *args: object, timeout: float | None = None) -> Any:
        """A method of the store."""
        self.begin_call(method, *args, timeout=timeout)
        return self.result()

    def begin_call(self, method: str, *args: object, timeout: float | None = None) -> None:
        """As :meth:`call`, to be waited for with :meth:`result`."""
        if OTHER_TORCH and not self.ask("can", method):
            pytest.skip(f"this torch cannot {method}")
        self.begin("call", method, args, timeout)

    def close(self) -> None:
        """It ends by itself."""
        self._connection.close()


class TorchClients:
    """The process from which all clients are forked: torch is imported once."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "clients")
        self._listener = Listener(address, "AF_UNIX")
        self._process = subprocess.Popen(
            [OTHER_TORCH or sys.executable, str(PROGRAM), address],
            stdin=subprocess.PIPE,
            # The clients' warnings about time-outs that tests bring about are no news.
            stderr=subprocess.DEVNULL,
            env=clean_environment({"OMP_NUM_THREADS": "1"}),
        )
        # It outlives the tests that need it, and others of the same process may wait for all their orphans.
        procs.bystanders.add(self._process.pid)

    def fork(self, count: int = 1) -> Sequence[TorchClient]:
        """New processes, without a store yet."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n" * count)
        self._process.stdin.flush()
        return [TorchClient(self._listener.accept()) for _ in range(count)]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(HANG)
        procs.bystanders.discard(self._process.pid)
        self._listener.close()
