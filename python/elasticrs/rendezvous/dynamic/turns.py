"""A node's access to the shared state of the rendezvous, and the operations on this state.

An operation runs in turns. Each turn reads or writes the state once, chooses the next action, and returns how
long to wait before the next turn. The back end's tokens prevent lost updates: if another node has changed the
state since this node read it, the write fails, and this node reads the state again and chooses a new action.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from elasticrs.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticrs.rendezvous.dynamic import actions
from elasticrs.rendezvous.dynamic.actions import Action, Sightings, View
from elasticrs.rendezvous.dynamic.rendezvous_state import State, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs.rendezvous.dynamic.rendezvous_settings import RendezvousSettings
    from elasticrs.rendezvous.dynamic.rendezvous_state import Node

SHORTEST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
"""Minimum and maximum number of seconds between two reads of the state. The interval doubles with each read
that finds the state unchanged."""


class SharedState:
    """A node's access to the shared state in the back end.

    Attributes:
        state: state as last read, without dead nodes.
        synced: time of the last read; ``None`` if the state was never read.
    """

    def __init__(
        self,
        backend: Any,
        settings: RendezvousSettings,
        node: Node,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.node = node
        self.clock = clock
        self.state = State()
        self.synced: float | None = None
        self._backend = backend
        self._sightings = Sightings()
        self._data: bytes | None = None
        self._token: Any = None
        self._beat = 0
        self._beat_at: float | None = None
        self._wrote_at: float | None = None
        self._dead: set[Node] = set()
        self._lost: list[Node] = []

    def take_lost(self) -> list[Node]:
        """Return the nodes that were found dead since the previous call."""
        lost, self._lost = self._lost, []
        return lost

    def read(self) -> bool:
        """Read the state. Return true if it has changed since the last read.

        Raises:
            RendezvousConnectionError: the back end cannot be reached.
            RendezvousStateError: the state was not written by elasticrs.
        """
        asked = self.clock()
        found = self._backend.get_state()
        if found is None:
            return self._take(None, None, asked)
        data, token = _pair(found)
        return self._take(data, token, asked)

    def write(self, state: State) -> bool | None:
        """Replace the state, unless another node has changed it since the last read.

        Returns:
            True if the state was replaced. ``None`` if the back end did not report the outcome. The caller
            must then read the state.

        Raises:
            RendezvousConnectionError: the back end cannot be reached.
            RendezvousStateError: the new state is too large, or the stored state was not written by
                elasticrs.
        """
        data, asked = encode(state), self.clock()
        self._wrote_at = asked
        answer = self._backend.set_state(data, self._token)
        if answer is None:
            return None
        try:
            found, token, is_set = answer
        except (TypeError, ValueError):
            raise RendezvousStateError(
                f"the back end answered {answer!r} to set_state, expected (state, token, has_set)"
            ) from None
        self._take(found, token, asked)
        return bool(is_set)

    def view(self) -> View:
        """Return the input for choosing this node's next action: the shared state, the current time, and the
        settings.
        """
        now, every = self.clock(), self.settings.keep_alive_interval.total_seconds()
        is_due = self._beat_at is None or now - self._beat_at >= every
        return View(self.node, self.state, now, is_due, self._sightings.last_call_since, self.settings)

    def next_beat(self) -> int:
        """Return the number of the next heartbeat, which is one higher than the last."""
        self._beat += 1
        return self._beat

    def seconds_to_beat(self) -> float:
        """Return the number of seconds until the next heartbeat is due."""
        interval = self.settings.keep_alive_interval.total_seconds()
        return 0.0 if self._beat_at is None else self._beat_at + interval - self.clock()

    def _take(self, data: bytes | None, token: Any, asked: float) -> bool:
        has_changed = data != self._data
        state = State() if data is None else decode(data)
        answered = self.clock()
        if self.node in state.nodes and state.nodes[self.node].beat == self._beat:
            self._beat_at = self._wrote_at
        dead = self._sightings.look(state, asked, answered, actions.patience(self.settings))
        dead = [node for node in dead if node != self.node]
        self._lost += [node for node in dead if node not in self._dead]
        self._dead = set(dead)
        self.state = actions.without(state, dead, self.settings)
        self._data, self._token, self.synced = data, token, answered
        return has_changed


class Operation:
    """An operation of one node, such as joining or closing the rendezvous. It repeatedly reads and writes the
    shared state until it has finished.

    Args:
        shared: this node's access to the shared state.
        decide: function from :mod:`.actions` that chooses the next action of the operation.
        seconds: time limit of the operation.
        reason: reason for closing the rendezvous, if the operation closes it.
        has_failed: true if the rendezvous is closed because the job has failed.
        acts: function that is called before each change by this node, with the action and the state before
            the change.
    """

    def __init__(
        self,
        shared: SharedState,
        decide: Callable[[View, float], Action],
        seconds: float,
        reason: str = "",
        has_failed: bool = False,
        acts: Callable[[Action, State], None] | None = None,
    ) -> None:
        self._shared = shared
        self._decide = decide
        self._seconds = seconds
        self._deadline = shared.clock() + seconds
        self._reason = reason
        self._has_failed = has_failed
        self._acts = acts
        self._wanted: State | None = None
        self._pause = SHORTEST_PAUSE

    def turn(self) -> float | None:
        """Read or write the shared state of the rendezvous once. Return the number of seconds to wait before
        the next call, or ``None`` if the operation has finished.

        Raises:
            RendezvousClosedError: the rendezvous is closed. The message contains the reason.
            RendezvousGracefulExitError: the rendezvous is closed, and this node was a spare.
            RendezvousTimeoutError: the operation took too long.
            RendezvousError: the back end raised an error.
        """
        shared = self._shared
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            is_set, backoff = shared.write(wanted), shared.settings.cas_backoff_max_seconds
            if is_set is None:
                pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
                return pause
            self._pause = SHORTEST_PAUSE
            if not is_set and backoff > 0:
                return random.uniform(0, backoff)
        elif shared.read():
            self._pause = SHORTEST_PAUSE
        view = shared.view()
        action = self._decide(view, self._deadline)
        if action is Action.FINISH:
            return None
        if action is Action.SYNC:
            return self._until_next_look(view)
        self._raise_for(action)
        if self._acts is not None:
            self._acts(action, view.state)
        if action is Action.CLOSE:
            self._wanted = actions.closed(view.state, self._reason, self._has_failed)
        else:
            self._wanted = actions.apply(action, view.state, view.node, shared.next_beat(), shared.settings)
        if action is Action.NO_LONGER_REDUNDANT:
            # Restart the operation's time limit, because time spent as a redundant node does not count
            # towards it.
            self._deadline = view.now + self._seconds
        return 0.0

    def _until_next_look(self, view: View) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        due = [self._shared.seconds_to_beat(), self._deadline - view.now]
        if view.last_call_since is not None:
            due.append(view.last_call_since + actions.seconds_of_last_call(view.settings) - view.now)
        # Skip deadlines that have passed, and wait at least a millisecond to avoid a busy loop.
        return min([pause, *(max(each, 0.001) for each in due if each > 0)])

    def _raise_for(self, action: Action) -> None:
        name, state = self._shared.settings.run_id, self._shared.state
        if action is Action.ERROR_CLOSED:
            raise RendezvousClosedError(f"the rendezvous of job {name} is closed: {state.closed}")
        if action is Action.ERROR_SPARE:
            raise RendezvousGracefulExitError(
                f"the rendezvous of job {name} was closed without this node: {state.closed}"
            )
        if action is Action.ERROR_TIMEOUT:
            raise RendezvousTimeoutError(
                f"the rendezvous of job {name} was not complete within {self._seconds:g} s: {_who(state)}, "
                f"{self._shared.settings.min_nodes} are needed"
            )


def _who(state: State) -> str:
    shown = ", ".join(str(node) for node in list(state.nodes)[:8]) or "none"
    return f"{len(state.nodes)} nodes have joined ({shown})"


def _pair(found: Any) -> tuple[bytes, Any]:
    try:
        data, token = found
    except (TypeError, ValueError):
        raise RendezvousStateError(
            f"the back end answered {found!r} to get_state, expected (state, token) or None"
        ) from None
    return data, token
