"""Clients of etcd with the interface of the coordination store, for tests."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from elasticrs import _core
from helpers.control import Program
from helpers.coordination import Patient

Endpoints = Sequence[tuple[str, int]]
Connect = Callable[..., "EtcdClient"]


class EtcdClient(Patient):
    """A :class:`Patient` client of etcd. The options are those of ``CoordinationClient.etcd``."""

    def __init__(self, endpoints: Endpoints, prefix: str, **options: Any) -> None:
        defaults: dict[str, Any] = {
            **dict.fromkeys(("ca_cert", "cert", "key", "user", "password", "stall_timeout", "supervisor")),
            "is_tls": False,
            "ttl": 5.0,
            "job_lease": None,
            "connect_timeout": 20.0,
            "read_timeout": 40.0,
        }
        self.inner = _core.CoordinationClient.etcd(endpoints, prefix=prefix, **{**defaults, **options})
        self.tag = 0
        self.events = []


class Relay:
    """A relay between clients and a member. It can stall either direction and reset connections."""

    def __init__(self, endpoint: tuple[str, int]) -> None:
        host, port = endpoint
        self._program = Program("tcp_relay", "127.0.0.1", "0", host, str(port))
        self.endpoint = ("127.0.0.1", int(self._program.greeting.split()[1]))
        self.close = self._program.close

    def set(self, **settings: bool | str) -> None:
        """Change settings of the relay; see `inside/tcp_relay.py`."""
        self._program.ask("set", **settings)

    def reset(self) -> None:
        """Send RST to both sides of every connection."""
        self._program.ask("reset")


@pytest.fixture
def connect_etcd() -> Iterator[Connect]:
    """Return a function that creates clients, which are closed after the test."""
    made: list[EtcdClient] = []

    def connect(endpoints: Endpoints, prefix: str, **options: Any) -> EtcdClient:
        made.append(EtcdClient(endpoints, prefix, **options))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def relay_to() -> Iterator[Callable[[tuple[str, int]], Relay]]:
    """Return a function that creates relays, which are closed after the test."""
    made: list[Relay] = []

    def relay(endpoint: tuple[str, int]) -> Relay:
        made.append(Relay(endpoint))
        return made[-1]

    yield relay
    for each in made:
        each.close()


def names_of_threads() -> list[str]:
    """Return the names of this process's threads. Each name ends with a newline."""
    names = []
    for task in os.listdir("/proc/self/task"):
        # Ignore a thread that has exited since the folder was listed.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read())
    return names
