"""Clients of etcd with the interface of the coordination store, for tests."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from elasticrs import _core
from helpers.coordination import Patient
from helpers.relay import TcpRelay

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


@pytest.fixture
def connect_etcd() -> Iterator[Connect]:
    """Return a function that creates clients, which are closed after the test."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(closing(EtcdClient(*arguments, **options)))


@pytest.fixture
def relay_to() -> Iterator[Callable[[tuple[str, int]], TcpRelay]]:
    """Return a function that creates a relay to an endpoint. The relays are closed after the test."""
    with ExitStack() as stack:
        yield lambda endpoint: stack.enter_context(closing(TcpRelay(endpoint)))


def names_of_threads() -> list[str]:
    """Return the names of this process's threads. Each name ends with a newline."""
    names = []
    for task in os.listdir("/proc/self/task"):
        # Ignore a thread that has exited since the folder was listed.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read())
    return names
