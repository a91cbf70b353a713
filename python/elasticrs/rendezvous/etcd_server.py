"""Local etcd server for tests and for jobs on one machine. The names in this module are the same as in torch.

etcd runs under a small supervising process, :mod:`elasticrs.rendezvous.etcd_keeper`. When this program exits
for any reason, the supervising process stops etcd and removes its data.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import closing
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING

from elasticrs.rendezvous.elastic.etcd_gateway import Gateway, GatewayError
from elasticrs.rendezvous.elastic.etcd_membership import Seat
from elasticrs.rendezvous.etcd_keeper import end, find_program
from elasticrs.workers.ports import bind

if TYPE_CHECKING:
    from typing import IO

    from elasticrs.rendezvous.etcd_client import EtcdClient

_log = logging.getLogger("elasticrs.rendezvous")

_HOST = "127.0.0.1"
_TICK = 0.02
_LONGEST_STOP = 10.0
"""Seconds to wait until the keeper process has exited. This exceeds the keeper's own time limit for stopping
etcd.
"""


def find_free_port() -> socket.socket:
    """Return a socket that listens on a free port of ``localhost``. The port is reserved until the socket is
    closed.

    Close the socket before starting a server on the port. IPv4 is tried first, because programs tend to
    connect to ``127.0.0.1``.

    Raises:
        OSError: the name ``localhost`` could not be resolved.
        RuntimeError: no address of ``localhost`` has a free port, or file descriptors have run out.
    """
    found = socket.getaddrinfo("localhost", None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    failure: OSError | None = None
    for family, kind, protocol, *_ in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            sock.bind(("localhost", 0))
            sock.listen(0)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise RuntimeError(f"Failed to create a socket: {failure}") from failure


def stop_etcd(subprocess: Popen[bytes] | None, data_dir: str | None = None) -> None:
    """Stop an etcd server, and remove its data folder. Idempotent."""
    if subprocess is not None:
        end(subprocess, _LONGEST_STOP)
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)


class EtcdServer:
    """Starts and stops a single-member etcd cluster on free loopback ports.

    The environment variable ``TORCHELASTIC_ETCD_BINARY_PATH`` contains the path of the program; the default
    is ``etcd`` on ``PATH``. If this process exits without calling :meth:`stop`, even by SIGKILL, etcd is
    stopped and its data are removed.

    Args:
        data_dir: folder for etcd's data, which :meth:`stop` removes; a temporary folder if ``None``.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._port = -1
        self._host = "localhost"
        self._base_data_dir = data_dir
        self._etcd_proc: Popen[bytes] | None = None
        self._starter = -1

    def get_port(self) -> int:
        """Return the port of the server; -1 before the first :meth:`start`."""
        return self._port

    def get_host(self) -> str:
        """Return the host of the server."""
        return self._host

    def get_endpoint(self) -> str:
        """Return ``HOST:PORT`` of the server."""
        return f"{self._host}:{self._port}"

    def get_client(self) -> EtcdClient:
        """Return a client for this server."""
        from elasticrs.rendezvous.elastic.etcd_site import EtcdSite
        from elasticrs.rendezvous.etcd_client import EtcdClient

        return EtcdClient(EtcdSite(((self._host, self._port),), read_timeout=10))

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[bytes] | None = None) -> None:
        """Start the server and wait until it answers.

        Args:
            timeout: seconds for each attempt.
            num_retries: number of attempts.
            stderr: standard error of the server, as for :class:`subprocess.Popen`.

        Raises:
            FileNotFoundError: etcd is not installed on this machine. The message says how to install it.
            RuntimeError: the server exited before it answered.
            TimeoutError: the server did not answer in time.
        """
        program = find_program()
        base = self._base_data_dir = self._base_data_dir or tempfile.mkdtemp(prefix="elasticrs_etcd_data")
        self._starter = os.getpid()
        atexit.register(self._stop_at_exit)
        for attempt in range(num_retries):
            try:
                self._start(program, os.path.join(base, str(attempt)), timeout, stderr)
                return
            except (OSError, RuntimeError) as error:  # noqa: PERF203 -- there are few
                stop_etcd(self._etcd_proc)
                if attempt + 1 >= num_retries:
                    self.stop()
                    raise
                _log.warning("etcd could not be started: %s; trying again", error)

    def stop(self) -> None:
        """Stop the server and remove its data. Idempotent."""
        stop_etcd(self._etcd_proc, self._base_data_dir)
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        # Do nothing in a forked child process, because the server belongs to the parent.
        if os.getpid() == self._starter:
            self.stop()

    def _start(self, program: str, data_dir: str, timeout: float, stderr: int | IO[bytes] | None) -> None:
        os.makedirs(data_dir, exist_ok=True)
        # etcd can listen on the reserved ports, because it sets SO_REUSEADDR.
        with closing(bind(0)) as client, closing(bind(0)) as peer:
            self._port = client.getsockname()[1]
            clients, peers = (f"http://{_HOST}:{each.getsockname()[1]}" for each in (client, peer))
            keeper = os.path.join(os.path.dirname(__file__), "etcd_keeper.py")
            self._etcd_proc = Popen(
                [
                    *(sys.executable, "-I", "-S", keeper, str(os.getpid()), str(self._base_data_dir)),
                    *(program, "--data-dir", data_dir),
                    *("--listen-client-urls", clients, "--advertise-client-urls", clients),
                    *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                    *("--initial-cluster", f"default={peers}"),
                ],
                stdin=DEVNULL,
                stderr=stderr,
                # Start a new session, so that Ctrl-C does not reach the server. This program stops the server
                # itself.
                start_new_session=True,
            )
            self._wait_for_ready(timeout)

    def _wait_for_ready(self, timeout: float) -> None:
        assert self._etcd_proc is not None
        deadline = time.monotonic() + timeout
        while not self._is_healthy(deadline - time.monotonic()):
            exit_code = self._etcd_proc.poll()
            if exit_code is not None:
                raise RuntimeError(f"etcd ended with exit code {exit_code} before it was ready")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"etcd was not ready within {timeout:g} s")
            time.sleep(_TICK)

    def _is_healthy(self, timeout: float) -> bool:
        try:
            return Gateway().is_healthy(Seat(_HOST, self._port, 0), max(timeout, _TICK))
        except (OSError, GatewayError):
            return False
