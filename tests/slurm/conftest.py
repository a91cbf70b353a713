"""A Slurm for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import slurm
from helpers.hosts import Network
from helpers.slurm import Slurm


@pytest.fixture
def cluster(network: Callable[..., Network], tmp_path: Path) -> Iterator[Callable[..., Slurm]]:
    """Return a function that starts a Slurm cluster of N nodes. See :class:`helpers.slurm.Slurm`."""
    programs = slurm.find()
    if programs is None:
        pytest.skip("needs Slurm, which `make setup` gets where Debian's packages are at hand")
    started: list[Slurm] = []

    def start(nodes: int) -> Slurm:
        folder = tmp_path / "slurm"
        folder.mkdir()
        started.append(Slurm(folder, network(nodes + 1), programs))
        return started[-1]

    yield start
    for each in started:
        each.close()
