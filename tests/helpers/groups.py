"""Groups of plain programs, run directly with the extension module."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from elasticrs import _core
from helpers.procs import HANG


class Group:
    """A supervisor and the events that it has reported."""

    def __init__(self, supervisor: _core.Supervisor) -> None:
        self.supervisor = supervisor
        self.events: list[_core.Event] = []

    def start(
        self,
        *commands: Sequence[str],
        env: Mapping[str, str] | None = None,
        linger: float | None = 0.0,
        replaces: bool = False,
        keep_grace: float = 0.0,
        **process: Any,
    ) -> list[int]:
        """Start one process for each command, and return their pids."""
        specs = [
            _core.ProcessSpec(rank, argv, env=dict(os.environ if env is None else env), **process)
            for rank, argv in enumerate(commands)
        ]
        policy = _core.StopPolicy(signal.SIGTERM, HANG)
        group = _core.GroupSpec(
            specs, on_failure=policy, linger=linger, replaces=replaces, keep_grace=keep_grace
        )
        self.supervisor.start(group)
        started = self.until(_core.GroupStarted, _core.StartFailed)
        assert isinstance(started, _core.GroupStarted), started.message
        return started.pids

    def replace(self, local_rank: int, argv: Sequence[str], **process: Any) -> int:
        """Start a replacement for a worker whose processes have been cleaned up, and return its pid."""
        self.supervisor.replace(_core.ProcessSpec(local_rank, argv, env=dict(os.environ), **process))
        replaced = self.until(_core.WorkerReplaced, _core.ReplaceFailed)
        assert isinstance(replaced, _core.WorkerReplaced), replaced.message
        return replaced.pid

    def until(self, *kinds: type) -> Any:
        """Wait for an event of one of these kinds and return it. Keep all events in ``events``."""
        while True:
            event = self.supervisor.next_event(HANG)
            assert event is not None, f"hangs; so far: {self.events}"
            self.events.append(event)
            if isinstance(event, kinds):
                return event

    def end(self) -> _core.GroupEnded:
        """Wait until the group has ended, and return that event."""
        ended = self.until(_core.GroupEnded)
        assert isinstance(ended, _core.GroupEnded)
        return ended

    def kill(self) -> _core.GroupEnded:
        """Kill all processes of the group, and return its end."""
        self.supervisor.stop(_core.StopPolicy(signal.SIGKILL, 0.0))
        return self.end()


@pytest.fixture
def group() -> Iterator[Group]:
    """Yield a group with a new supervisor, which is closed after the test."""
    group = Group(_core.Supervisor())
    yield group
    group.supervisor.close()
    # Drop the supervisor, because pytest keeps the group for longer than the leak guard waits.
    del group.supervisor
