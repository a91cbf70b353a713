"""Run a single etcd server as a child process. When it exits, find the reason in its log."""

from __future__ import annotations

import json
import os
import socket

from elasticrs.rendezvous.etcd_keeper import end, spawn
from elasticrs.workers.logs import last_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

_MOST = 65536
"""Number of bytes at the end of etcd's log that are searched for the last error."""

_OPTIONS = (
    "--pre-vote",
    *("--auto-compaction-mode=revision", "--auto-compaction-retention=10000", "--snapshot-count=10000"),
    # Use the fastest password hash. The passwords have 256 bits and cannot be guessed, so a slow hash adds no
    # security.
    "--bcrypt-cost=4",
    *("--logger=zap", "--log-level=warn", "--log-outputs=stderr"),
)


class EtcdProcess:
    """Starts and stops an etcd server. At most one server runs at a time.

    Attributes:
        fd: file descriptor that becomes readable when etcd exits; ``None`` while etcd is not running.
    """

    def __init__(self) -> None:
        self._log = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.fd: int | None = None

    def start(self, command: list[str], log: str, lock: int) -> None:
        """Start etcd. The kernel kills it when the calling thread exits.

        Args:
            command: absolute path of the program, and its arguments.
            log: path of the log file, which is overwritten.
            lock: file descriptor of a lock, which etcd inherits.
        """
        self._log = log
        with open(log, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            self._process = spawn(command, stderr=file.fileno(), pass_fds=(lock,))
        self.fd = os.pidfd_open(self._process.pid)

    def end(self, grace: float) -> None:
        """Stop etcd if it is running, and kill it if it has not exited after ``grace`` seconds. In that time,
        a cluster leader can hand over its leadership to another member.
        """
        if self._process is not None:
            end(self._process, grace)
            self.reap()

    def reap(self) -> int:
        """Wait until the etcd process exits, and return its exit code."""
        assert self._process is not None
        assert self.fd is not None
        code = self._process.wait()
        os.close(self.fd)
        self._process = self.fd = None
        return code

    def last_words(self) -> str:
        """Return the last error in etcd's log."""
        return reason(last_bytes(self._log, _MOST).decode(errors="replace").splitlines())


def reason(lines: Sequence[str]) -> str:
    """Return the message of the last error in etcd's log. If the log contains no error, return the message of
    its last line.
    """
    last = ""
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            last = last or line.strip()
            continue
        if not isinstance(record, dict):
            continue
        text = ": ".join(str(record[key]) for key in ("msg", "error") if record.get(key))
        if record.get("level") in {"error", "fatal", "panic"} and text:
            return text
        last = last or text
    return last or "its log does not say why"


def trouble_with(address: str, port: int) -> str | None:
    """Return the error that prevents a server from listening on an address and port; ``None`` if there is
    none.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen()
        except OSError as error:
            return error.strerror or str(error)
    return None


def options(files: Sequence[str]) -> list[str]:
    """Return etcd's command-line options for a member that an agent hosts.

    Args:
        files: paths of the CA certificates, the certificate and its key. Clients and members use them to
            authenticate each other. Empty without TLS.
    """
    found = list(_OPTIONS)
    for prefix in ("--", "--peer-") if files else ():
        for name, file in zip(("trusted-ca-file", "cert-file", "key-file"), files, strict=True):
            found.append(f"{prefix}{name}={file}")
        found.append(f"{prefix}client-cert-auth")
    return found
