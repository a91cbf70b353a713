"""One node's access to the shared state, a turn at a time.

A turn reads or writes once, decides, and says how long to wait before the next one. The writes of different
nodes are put in order by the fencing tokens of the back end: one that was overtaken changes nothing, and the
node decides again.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from elasticrs.compat.dynamic import decisions
from elasticrs.compat.dynamic.decisions import Action, Sightings, View
from elasticrs.compat.dynamic.state import State, decode, encode
from elasticrs.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticrs.compat.dynamic.settings import RendezvousSettings
    from elasticrs.compat.dynamic.state import Node

SHORTEST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
"""Seconds between two looks while nothing changes: they double from the one to the other."""


class SharedState:
    """The state as this node last saw it, in a back end.

    Attributes:
        state: as last read, without the dead.
        synced: when that was; ``None``: never.
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
        """Return the nodes that were newly found dead since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def read(self) -> bool:
        """Read the state; return true if it has changed.

        Raises:
            RendezvousConnectionError: the back end cannot be reached.
            RendezvousStateError: the state is none of ours.
        """
        asked = self.clock()
        found = self._backend.get_state()
        if found is None:
            return self._take(None, None, asked)
        data, token = _pair(found)
        return self._take(data, token, asked)

    def write(self, state: State) -> bool | None:
        """Replace the state, unless another node has done so since it was read.

        Returns:
            True if it was replaced; ``None``: the back end has not said, and has to be read.

        Raises:
            RendezvousConnectionError: the back end cannot be reached.
            RendezvousStateError: the state is too large, or what is there is none of ours.
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
        """Return what this node bases its next decision on."""
        now, every = self.clock(), self.settings.keep_alive_interval.total_seconds()
        is_due = self._beat_at is None or now - self._beat_at >= every
        return View(self.node, self.state, now, is_due, self._sightings.last_call_since, self.settings)

    def next_beat(self) -> int:
        """Return a number for the next sign of life that none before had."""
        self._beat += 1
        return self._beat

    def seconds_to_beat(self) -> float:
        """Return the seconds until the next sign of life is due."""
        interval = self.settings.keep_alive_interval.total_seconds()
        return 0.0 if self._beat_at is None else self._beat_at + interval - self.clock()

    def _take(self, data: bytes | None, token: Any, asked: float) -> bool:
        has_changed = data != self._data
        state = State() if data is None else decode(data)
        answered = self.clock()
        if self.node in state.nodes and state.nodes[self.node].beat == self._beat:
            self._beat_at = self._wrote_at
        dead = self._sightings.look(state, asked, answered, decisions.patience(self.settings))
        dead = [node for node in dead if node != self.node]
        self._lost += [node for node in dead if node not in self._dead]
        self._dead = set(dead)
        self.state = decisions.without(state, dead, self.settings)
        self._data, self._token, self.synced = data, token, answered
        return has_changed


class Operation:
    """Repeats turns until this node has what it wants.

    Args:
        shared: the state.
        decide: what it wants: a function of :mod:`.decisions`.
        seconds: until it gives up.
        reason: for closing.
        has_failed: closing because the job has failed.
        acts: is told of each change that the node is about to make, and of the state before.
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
        """Take a turn; return the seconds to wait before the next one, ``None`` when done.

        Raises:
            RendezvousClosedError: it is closed; says why.
            RendezvousGracefulExitError: it is closed, and this node was a spare.
            RendezvousTimeoutError: it took too long.
            RendezvousError: as the back end says.
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
            self._wanted = decisions.closed(view.state, self._reason, self._has_failed)
        else:
            self._wanted = decisions.apply(action, view.state, view.node, shared.next_beat(), shared.settings)
        if action is Action.NO_LONGER_REDUNDANT:
            # Waiting without need did not count.
            self._deadline = view.now + self._seconds
        return 0.0

    def _until_next_look(self, view: View) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        due = [self._shared.seconds_to_beat(), self._deadline - view.now]
        if view.last_call_since is not None:
            due.append(view.last_call_since + decisions.seconds_of_last_call(view.settings) - view.now)
        # A deadline that has passed is none to wait for, but must not make this a busy loop.
        return min([pause, *(max(each, 0.001) for each in due if each > 0)])

    def _raise_for(self, action: Action) -> None:
        name, state = self._shared.settings.run_id, self._shared.state
        if action is Action.ERROR_CLOSED:
            raise RendezvousClosedError(f"the rendezvous of job {name} is closed: {state.closed}")
        if action is Action.ERROR_SPARE:
            raise RendezvousGracefulExitError(
                f"the rendezvous of job {name} is closed, and did not need this node: {state.closed}"
            )
        if action is Action.ERROR_TIMEOUT:
            raise RendezvousTimeoutError(
                f"the rendezvous of job {name}: not done within {self._seconds:g} s: {_who(state)}, "
                f"{self._shared.settings.min_nodes} are needed"
            )


def _who(state: State) -> str:
    shown = ", ".join(str(node) for node in list(state.nodes)[:8]) or "nobody"
    return f"{len(state.nodes)} nodes are there ({shown})"


def _pair(found: Any) -> tuple[bytes, Any]:
    try:
        data, token = found
    except (TypeError, ValueError):
        raise RendezvousStateError(
            f"the back end answered {found!r} to get_state, expected (state, token) or None"
        ) from None
    return data, token
