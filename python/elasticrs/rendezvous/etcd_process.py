"""One etcd as the program that hosts it sees it: a child with ports, and a log that says why it has ended."""

from __future__ import annotations

import json
import os
import socket

from elasticrs.logs import last_bytes
from elasticrs.rendezvous.etcd_keeper import end, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 65536
"""Bytes of the log in which the last error is looked for."""

_OPTIONS = (
    # Its check refuses learners for 5 s after a member has gone; what it guards against does not occur here.
    *("--strict-reconfig-check=false", "--pre-vote"),
    # Nothing of a member is used after its agent: it need not outlast the machine, nor wait for its disk.
    "--unsafe-no-fsync",
    *("--auto-compaction-mode=revision", "--auto-compaction-retention=10000", "--snapshot-count=10000"),
    # Derived passwords have 256 bits: guesses need not be made slow.
    "--bcrypt-cost=4",
    *("--logger=zap", "--log-level=warn", "--log-outputs=stderr"),
)


class EtcdProcess:
    """At most one etcd at a time.

    Args:
        log: file to which it writes.

    Attributes:
        fd: readable when etcd has ended; ``None`` while none runs.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._pid = -1
        self.fd: int | None = None

    def start(self, command: list[str]) -> None:
        """Start it; the kernel kills it with the thread that calls this."""
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._pid = spawn(command, log)
            self.fd = os.pidfd_open(self._pid)
        finally:
            os.close(log)

    def end(self, grace_ms: int) -> None:
        """End it, if it runs, so that a leader hands over."""
        if self.fd is not None:
            end(self._pid, self.fd, grace_ms)
            self.reap()

    def reap(self) -> int:
        """Return the exit code of an etcd that has ended."""
        assert self.fd is not None
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self.fd)
        self.fd = None
        return code

    def last_words(self) -> str:
        """Return the last error in the log."""
        lines = last_bytes(self._log, _MOST).decode(errors="replace").splitlines()
        for line in reversed(lines):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("level") in {"error", "fatal", "panic"}:
                return ": ".join(str(record[key]) for key in ("msg", "error") if record.get(key))
        return lines[-1] if lines else "it has written nothing"


def trouble_with(address: str, port: int) -> str | None:
    """Return why a server cannot listen there; ``None`` if it can."""
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
    """Return etcd's options for a member that outlives neither its agent nor the job.

    Args:
        files: of authorities, certificate and key, by which clients and members know each other; or none.
    """
    found = list(_OPTIONS)
    for prefix in ("--", "--peer-") if files else ():
        for name, file in zip(("trusted-ca-file", "cert-file", "key-file"), files, strict=True):
            found.append(f"{prefix}{name}={file}")
        found.append(f"{prefix}client-cert-auth")
    return found
