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
    """Processes without a store."""
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
    """A client of the store; ``prefixes`` from the inmost, other options are those of ``TCPStore``."""

    def connected(**options: Any) -> TorchClient:
        (client,) = fork(1)
        client.pid = client.ask("connect", store.port, options)
        return client

    return connected


@pytest.fixture
def wait_for_waiters(store: _core.WorkerStore) -> Callable[[int], dict[str, list[str]]]:
    """Tells who waits once there are so many: that a wait has arrived can be seen nowhere else."""

    def wait(count: int) -> dict[str, list[str]]:
        return wait_until(store.waiting, lambda told: len(told) == count)

    return wait
