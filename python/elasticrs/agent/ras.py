"""Queries NCCL's RAS service (its built-in diagnostics) about a hang. The answer only adds lines to the
failure report.

Each process that uses NCCL 2.24 or later runs RAS in a thread. All processes of a job on one node listen on
the address in ``NCCL_RAS_ADDR``, with ``SO_REUSEPORT``. The default address is the same for all jobs, so the
agent chooses a separate port for each job. The agent reserves the port by binding it with ``SO_REUSEPORT``
without listening. Processes of the same user can then share the port, and the kernel does not assign it to
another program. If NCCL cannot listen on the port, NCCL continues without RAS.

RAS may blame the waiting ranks instead of the rank that they wait for, so its answer never changes a verdict.
"""

from __future__ import annotations

import _socket
import os
import time

from elasticrs.host import nvidia
from elasticrs.host.background_call import BackgroundCall
from elasticrs.report.phrases import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs.workers.logs import LogPaths

VARIABLE = "NCCL_RAS_ADDR"
TIME_LIMIT = 1.5
"""Maximum duration of a query in seconds, whatever the service does. Waiting longer is useless, because the
workers are killed soon after a hang, and the service dies with them.
"""

MAX_BYTES = 256 << 10
MAX_NOTES = 5
MAX_NOTE = 160
_COLLECT = 1
"""Seconds that the service may wait for answers from the other processes."""

_REQUEST = f"CLIENT PROTOCOL 2\nTIMEOUT {_COLLECT}\nVERBOSE STATUS\n".encode()
_GREETING, _ACCEPTED = b"SERVER PROTOCOL ", b"OK\n"


class RasAddress:
    """Address of a job's RAS service on this node. The port is reserved until :meth:`close` is called.

    Args:
        environ: environment of the workers. If the user has set ``NCCL_RAS_ADDR``, that address is used, and
            no port is reserved.
        driver: path of a file that exists if this node may have GPUs.

    Attributes:
        address: host and port; ``None`` if there are no GPUs, if no port is free, or if the address that the
            user has set is invalid.
        variables: environment variables to add to the workers.
    """

    def __init__(self, environ: Mapping[str, str], driver: str = nvidia.DEVICE) -> None:
        self._socket: _socket.socket | None = None
        self.variables: dict[str, str] = {}
        self.address: tuple[str, int] | None = _parsed(environ.get(VARIABLE, ""))
        if VARIABLE in environ or not os.path.exists(driver):
            return
        try:
            self._socket = _socket.socket(
                _socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
            )
            for option in (_socket.SO_REUSEADDR, _socket.SO_REUSEPORT):
                self._socket.setsockopt(_socket.SOL_SOCKET, option, 1)
            self._socket.bind(("127.0.0.1", 0))
        except OSError:
            # Continue without NCCL's RAS service, because it only adds details to the failure report.
            self.close()
            return
        self.address = self._socket.getsockname()
        self.variables = {VARIABLE: "%s:%d" % self.address}  # noqa: UP031 -- a tuple of two

    def query(self, paths: LogPaths) -> RasQuery | None:
        """Start to query NCCL's RAS service about a hung worker. The response is written to a file in the
        attempt's log folder.

        Return ``None`` if there is no address or no log folder, or if the query cannot be started.
        """
        files = [path for path in paths.error_files.values() if path]
        if self.address is None or not files:
            return None
        folder = os.path.dirname(os.path.dirname(files[0]))
        try:
            return RasQuery(self.address, os.path.join(folder, "nccl_ras.txt"))
        except (OSError, RuntimeError):
            return None  # Ignore the error, because the query only adds details to the failure report.

    def close(self) -> None:
        """Release the port. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _parsed(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5):
        return None
    return host.strip("[]"), int(port)


class RasQuery:
    """A query that runs on its own thread.

    Args:
        address: host and port of the service.
        path: path of the file to which the whole answer is written.

    Raises:
        OSError: the process has run out of file descriptors.
        RuntimeError: no thread can be started.
    """

    def __init__(self, address: tuple[str, int], path: str) -> None:
        self._path = path
        self._deadline = time.monotonic() + TIME_LIMIT
        self._asked = BackgroundCall(lambda: _answer_in_file(address, path, self._deadline))
        self._notes: list[str] | None = None

    def notes(self) -> list[str]:
        """Return the lines of the answer to show in the report, or an empty list if no answer has arrived
        yet. Never blocks.
        """
        return self._finish(0.0) or []

    def close(self) -> None:
        """Wait for the answer, but no longer than the query's time limit. Idempotent."""
        if self._finish(max(0.0, self._deadline - time.monotonic())) is None:
            self._notes = []
            self._asked.close()

    def _finish(self, seconds: float) -> list[str] | None:
        if self._notes is None and self._asked.wait(seconds):
            text = self._asked.take()
            where = f"NCCL's RAS, which may blame the wrong ranks: {self._path}"
            self._notes = [] if text is None else [*_notes(text), where]
            self._asked.close()
        return self._notes


def _answer_in_file(address: tuple[str, int], path: str, deadline: float) -> str | None:
    text = query(address, deadline)
    if text is not None:
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            return None  # Drop the answer, because the report must name a file that contains the answer.
    return text


def query(address: tuple[str, int], deadline: float) -> str | None:
    """Query a RAS service. Return its answer, which may be incomplete. Return ``None`` if there is no service
    or if the service does not answer by the deadline.

    Args:
        address: host and port of the service.
        deadline: latest time for the answer, in seconds of the monotonic clock.
    """
    from contextlib import closing

    try:
        family, kind, protocol, _, where = _socket.getaddrinfo(*address, 0, _socket.SOCK_STREAM)[0]
        with closing(_socket.socket(family, kind | _socket.SOCK_CLOEXEC, protocol)) as connection:
            _limit(connection, deadline)
            connection.connect(where)
            connection.send(_REQUEST)
            received = _received(connection, deadline)
    except OSError:
        return None  # No service answers at this address. Most jobs have no RAS service.
    greeting, _, rest = received.partition(b"\n")
    if not greeting.startswith(_GREETING) or not rest.startswith(_ACCEPTED) or rest == _ACCEPTED:
        return None
    return rest[len(_ACCEPTED) :].decode("utf-8", "replace")


def _limit(connection: _socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _received(connection: _socket.socket, deadline: float) -> bytes:
    """Return the data that arrives until the service closes the connection, the deadline passes, or
    :data:`MAX_BYTES` have been received.
    """
    parts, size = [], 0
    try:
        while size < MAX_BYTES:
            _limit(connection, deadline)
            part = connection.recv(MAX_BYTES - size)
            if not part:
                break
            parts.append(part)
            size += len(part)
    except OSError:
        return b"".join(parts)  # The service has died or is too slow. Use the data received so far.
    return b"".join(parts)


def _notes(text: str) -> list[str]:
    """Return shortened lines from the ``Errors`` and ``Warnings`` sections of an answer."""
    lines = [line.rstrip() for line in text.splitlines()]
    sections: dict[str, list[str]] = {"Errors": [], "Warnings": []}
    heading = ""
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        if line and set(next_line) == {"="}:
            # A heading is underlined.
            heading = line
        elif line and set(line) != {"="} and heading in sections:
            sections[heading].append(f"NCCL's RAS: {line}")
    notes = [printable(line[:MAX_NOTE]) for found in sections.values() for line in found]
    more = len(notes) - MAX_NOTES
    return notes if more <= 0 else [*notes[:MAX_NOTES], f"NCCL's RAS: {more} more lines"]
