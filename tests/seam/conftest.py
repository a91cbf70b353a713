"""Fixture for starts that fail."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.groups import Group, group

from elasticrs import _core

__all__ = ["group"]


@pytest.fixture
def start_failure(group: Group) -> Callable[..., _core.StartFailed]:
    """Return a function that starts workers, expects this to fail, and returns the failure."""

    def start(*commands: Sequence[str], **process: Any) -> _core.StartFailed:
        with pytest.raises(AssertionError):
            group.start(*commands, **process)
        failure = group.events[-1]
        assert isinstance(failure, _core.StartFailed)
        return failure

    return start
