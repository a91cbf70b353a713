"""A workers' store for each test, and torch's own clients for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.groups import group
from helpers.procs import wait_until
from helpers.torch_clients import TorchClient, TorchClients

from elasticrs import _core

__all__ = ["group"]


@pytest.fixture(scope="session")
def torch_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchClients]:
    clients = TorchClients(Path(tmp_path_factory.mktemp("clients")))
    yield clients
    clients.close()


@pytest.fixture
def store() -> Iterator[_core.WorkerStore]:
    store = _core.WorkerStore()
    store.serve()
    yield store
    store.close()


@pytest.fixture
def fork(torch_clients: TorchClients) -> Iterator[Callable[[int], list[TorchClient]]]:
    """Return a function that forks processes without a connection to the store."""
    forked: list[TorchClient] = []

    def some(count: int) -> list[TorchClient]:
        new = list(torch_clients.fork(count))
        forked.extend(new)
        return new

    yield some
    for client in forked:
        client.close()


@pytest.fixture
def connect(store: _core.WorkerStore, fork: Callable[[int], list[TorchClient]]) -> Callable[..., TorchClient]:
    """Return a function that connects a client to the store. ``prefixes`` start with the innermost one, and
    other options are those of ``TCPStore``.
    """

    def connected(**options: Any) -> TorchClient:
        (client,) = fork(1)
        client.pid = client.ask("connect", store.port, options)
        return client

    return connected


@pytest.fixture
def wait_for_waiters(store: _core.WorkerStore) -> Callable[[int], dict[str, list[str]]]:
    """Return a function that blocks until ``count`` clients wait in the store, and returns the keys of each.
    Only the store shows that a wait has arrived.
    """

    def wait(count: int) -> dict[str, list[str]]:
        return wait_until(store.waiting, lambda told: len(told) == count)

    return wait
