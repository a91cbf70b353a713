"""Clients of torch's TCPStore for tests, each in a separate process (``workers/torch_client.py``).

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

from helpers.forker import Forker
from helpers.procs import HANG

OTHER_TORCH = os.environ.get("ELASTICRS_TORCH_PYTHON")
# The first bytes that a client sends.
GREETING = b"\0" + struct.pack("<I", 0x3C85F7CE)


class ClientError(Exception):
    """Raised if the client raised an exception. The text has the exception's type and message."""


class TorchClient:
    def __init__(self, connection: Connection) -> None:
        self.pid: int | None = None
        self._connection = connection

    def begin(self, name: str, *args: object) -> None:
        """Start an operation that may take long. :meth:`result` waits for it."""
        self._connection.send((name, args))

    def result(self, timeout: float = HANG) -> Any:
        """Wait for the operation and return its result.

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
        """Return true if :meth:`result` would return at once."""
        return self._connection.poll()

    def ask(self, name: str, *args: object) -> Any:
        """Start an operation with :meth:`begin`, and return its :meth:`result`."""
        self.begin(name, *args)
        return self.result()

    def call(self, method: str, *args: object, timeout: float | None = None) -> Any:
        self.begin_call(method, *args, timeout=timeout)
        return self.result()

    def begin_call(self, method: str, *args: object, timeout: float | None = None) -> None:
        """Start a :meth:`call`, and let :meth:`result` wait for it."""
        if OTHER_TORCH and not self.ask("can", method):
            pytest.skip(f"this torch cannot {method}")
        self.begin("call", method, args, timeout)

    def close(self) -> None:
        """Close the connection, so that the client exits."""
        self._connection.close()


class TorchClients(Forker):
    """The process from which all clients are forked, so that torch is imported only once."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "clients")
        self._listener = Listener(address, "AF_UNIX")
        # Discard the clients' warnings about timeouts, because the tests cause these timeouts on purpose.
        python, quiet = OTHER_TORCH or sys.executable, subprocess.DEVNULL
        env = {"OMP_NUM_THREADS": "1"}
        super().__init__("torch_client.py", address, python=python, env=env, stderr=quiet)

    def fork(self, count: int = 1) -> Sequence[TorchClient]:
        """Fork new client processes, which have no store yet."""
        for _ in range(count):
            self.order("fork")
        return [TorchClient(self._listener.accept()) for _ in range(count)]

    def close(self) -> None:
        super().close()
        self._listener.close()
