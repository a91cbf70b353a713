"""One process that has imported torch, for all tests of a file."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import pytest
from helpers.trainers import Parent, Trainers


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with closing(Parent()) as found:
        yield found


@pytest.fixture
def trainers(parent: Parent, tmp_path: Path) -> Iterator[Callable[[str], Trainers]]:
    """Makes a job of trainers that meet with these settings."""
    with ExitStack() as stack:

        def make(query: str) -> Trainers:
            job: AbstractContextManager[Trainers] = parent.job(query, tmp_path / "stderr")
            return stack.enter_context(job)

        yield make
