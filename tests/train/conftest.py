"""Fixtures: a process that has imported torch and forks the trainers of all tests, and agents for
the acceptance tests.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from urllib.parse import urlencode

import pytest
from helpers.agent_trainers import UnderAgents
from helpers.launcher import Launched
from helpers.trainers import ByHand, Parent, store


@pytest.fixture(scope="session")
def parent() -> Iterator[Parent]:
    with closing(Parent()) as found:
        yield found


@pytest.fixture
def trainers(parent: Parent, tmp_path: Path) -> Iterator[Callable[[str], ByHand]]:
    """Return a function that makes a job of trainers with these rendezvous settings."""
    with ExitStack() as stack:

        def make(query: str) -> ByHand:
            job: AbstractContextManager[ByHand] = parent.job(query, tmp_path / "stderr")
            return stack.enter_context(job)

        yield make


@pytest.fixture
def under_agents(launch: Callable[..., Launched], tmp_path: Path) -> Iterator[Callable[..., UnderAgents]]:
    """Return a function that makes a job whose trainers are started by agents. See
    :class:`helpers.agent_trainers.UnderAgents`.
    """
    with ExitStack() as stack:

        def make(workers: tuple[int, int], conf: dict[str, object], *, together: bool) -> UnderAgents:
            port = stack.enter_context(store())
            job = UnderAgents(launch, tmp_path, workers, conf, port, together=together)
            return stack.enter_context(closing(job))

        yield make


BY_HAND, ONE_NODE, NODES = "by hand", "one node", "nodes"


@pytest.fixture(params=[BY_HAND, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (ONE_NODE, NODES))])
def how(request: pytest.FixtureRequest) -> str:
    """Ways to start the workers: by hand, by the agent of a single node, or by one agent each."""
    return str(request.param)


@pytest.fixture
def job_of(
    how: str, trainers: Callable[[str], ByHand], under_agents: Callable[..., UnderAgents]
) -> Callable[..., ByHand | UnderAgents]:
    """Return a function that makes a job from the minimum and maximum number of workers and the rendezvous
    settings.
    """

    def make(least: int, most: int, **conf: object) -> ByHand | UnderAgents:
        if how == BY_HAND:
            return trainers(urlencode({"min_workers": least, "max_workers": most, **conf}))
        return under_agents((least, most), conf, together=how == ONE_NODE)

    return make
