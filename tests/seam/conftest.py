"""A supervisor for each test."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helpers.groups import Group

from elasticrs import _core


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(_core.Supervisor())
    yield group
    group.supervisor.close()
    # pytest holds on to the group for longer than the guard against leaks waits.
    del group.supervisor


@pytest.fixture
def start_failure(group: Group) -> Callable[..., _core.StartFailed]:
    """What a start that fails says."""

    def start(*commands: Sequence[str], **process: Any) -> _core.StartFailed:
        with pytest.raises(AssertionError):
            group.start(*commands, **process)
        failure = group.events[-1]
        assert isinstance(failure, _core.StartFailed)
        return failure

    return start
