"""Fixtures for tests on several hosts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import hosts as hosts_of
from helpers import packets
from helpers.hosts import Host, Network
from helpers.launcher import Launched
from helpers.nodes import Agent, Job, Worker
from helpers.packets import PacketRelay

Formed = tuple[Job, list[Agent], list[Worker]]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Callable[..., Network]]:
    """Return a function that creates a network of N hosts; see :class:`helpers.hosts.Network`.

    A test must leave nothing running on them. What it leaves is ended here, and fails it.
    """
    if reason := hosts_of.why_not():
        pytest.skip(reason)
    made: list[Network] = []

    def make(hosts: int, *, is_ipv6_only: bool = False) -> Network:
        folder = tmp_path / f"network{len(made)}"
        folder.mkdir()
        made.append(Network(folder, hosts, is_ipv6_only=is_ipv6_only))
        return made[-1]

    yield make
    left = [each for network in made for each in network.close()]
    assert not left, "left on the hosts:\n  " + "\n  ".join(left)


@pytest.fixture
def hosts(network: Callable[..., Network]) -> Callable[..., list[Host]]:
    """Return a function that creates N hosts that can reach each other: `node1` at 10.77.0.1 and so on."""

    def make(count: int, *, is_ipv6_only: bool = False) -> list[Host]:
        return network(count, is_ipv6_only=is_ipv6_only).hosts

    return make


@pytest.fixture
def multinode(
    network: Callable[..., Network], launch: Callable[..., Launched], tmp_path: Path
) -> Callable[..., Job]:
    """Return a function that creates a job with its store on a given host; see :class:`helpers.nodes.Job`."""

    def make(store: Host, nnodes: str, *options: str, **how: Any) -> Job:
        return Job(launch, tmp_path, store, nnodes, *options, **how)

    return make


@pytest.fixture
def formed(hosts: Callable[..., list[Host]], multinode: Callable[..., Job]) -> Callable[..., Formed]:
    """Return a function that starts a job on N hosts, with its store on the first, and waits until its
    workers run.
    """

    def make(count: int, *options: str, nnodes: str | None = None, **how: Any) -> Formed:
        machines = hosts(count)
        job = multinode(machines[0], nnodes or str(count), *options, **how)
        agents = job.start(*machines)
        return job, agents, job.formed(*agents)

    return make


@pytest.fixture
def impair() -> Callable[..., PacketRelay]:
    """Return a function that inserts a packet relay into a host's cable; see
    :meth:`helpers.hosts.Host.impair`.
    """
    if reason := packets.why_not():
        pytest.skip(reason)

    def put(host: Host, seed: int, **how: float) -> PacketRelay:
        return host.impair(seed, **how)

    return put
