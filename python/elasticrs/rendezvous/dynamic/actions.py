"""Pure functions of the dynamic rendezvous: they choose a node's next action and apply it to the shared
state.

- **DYN-1** Nodes do not compare clocks. A node considers another node dead if that node's heartbeat count has
  not changed for ``keep_alive_interval * keep_alive_max_attempt`` on the observer's own clock. A node never
  considers itself dead.
- **DYN-2** A last call starts when the minimum number of nodes has joined. A node that has observed the last
  call for its full duration completes the round. If several nodes try this, only one write succeeds, because
  a write fails if the state has changed.
- **DYN-3** Ranks and size are fixed when the round is completed. If a node leaves the round or dies, the
  round is over for all its nodes. The nodes leave the round, and when the last one has left, the next round
  starts. If a node finds that its round was completed but is already over, the node leaves the round at once.
- **DYN-4** A node that arrives when the round is complete waits. If the round has room for the node, the node
  is counted as waiting, so that a new round is formed. If the round is full, the node is redundant: it is not
  counted, and waits without a deadline. In torch, a node that started to wait before the round was full is
  still counted afterwards, so the group keeps restarting forever.
- **DYN-5** A closed rendezvous stays closed. Its state contains the reason. If it was closed because the job
  has failed, the round is over for all nodes. In torch, the workers of the other nodes would keep running
  until their own timeouts. If it was closed for another reason, the workers run until they finish.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from elasticrs.rendezvous.dynamic.rendezvous_state import Node, Place, Standing, State, natural_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticrs.rendezvous.dynamic.rendezvous_settings import RendezvousSettings

ROLLBACK = 5.0
"""Extra seconds, as in torch, for a node to withdraw after it has missed the join deadline."""


class Action(Enum):
    """A node's next action during an operation such as joining a round. ``SYNC``, ``FINISH`` and
    ``KEEP_ALIVE`` leave the node's role unchanged. ``ERROR_CLOSED``, ``ERROR_SPARE`` and ``ERROR_TIMEOUT``
    make the operation fail.
    """

    SYNC = auto()
    FINISH = auto()
    KEEP_ALIVE = auto()
    PARTICIPATE = auto()
    WAIT = auto()
    BE_REDUNDANT = auto()
    LEAVE = auto()
    NO_LONGER_REDUNDANT = auto()
    COMPLETE = auto()
    CLOSE = auto()
    ERROR_CLOSED = auto()
    ERROR_SPARE = auto()
    ERROR_TIMEOUT = auto()


@dataclass(frozen=True)
class View:
    """Input for a node's decision about its next action.

    Args:
        node: the node that makes the decision.
        state: shared state as last read, without dead nodes.
        now: current time in seconds, on the node's monotonic clock.
        is_beat_due: true if a heartbeat is due.
        last_call_since: time at which the node first observed the current last call; ``None`` if there is no
            last call.
        settings: settings of the rendezvous.
    """

    node: Node
    state: State
    now: float
    is_beat_due: bool
    last_call_since: float | None
    settings: RendezvousSettings


class Sightings:
    """Times at which this node first observed changes to the shared state. All times are read from this
    node's monotonic clock.
    """

    def __init__(self) -> None:
        self._beats: dict[Node, tuple[int, float]] = {}
        self._last_call: tuple[int, float] | None = None

    @property
    def last_call_since(self) -> float | None:
        """Time at which this node first observed the current last call, which is the final wait for more
        nodes. ``None`` if no last call is in progress.
        """
        return None if self._last_call is None else self._last_call[1]

    def look(self, state: State, asked: float, answered: float, patience: float) -> list[Node]:
        """Update the recorded heartbeats from a newly read state. Return the nodes considered dead.

        Args:
            state: state that was read.
            asked: time just before the read. The state contains all changes that were made before this time.
            answered: time just after the read. All changes in the state were made before this time.
            patience: seconds without a heartbeat after which a node is considered dead.
        """
        seen, dead = self._beats, []
        self._beats = {}
        for node, standing in state.nodes.items():
            beat, since = seen.get(node, (None, answered))
            if beat != standing.beat:
                since = answered
            self._beats[node] = (standing.beat, since)
            if asked - since > patience:
                dead.append(node)
        if state.last_call is None:
            self._last_call = None
        elif self._last_call is None or self._last_call[0] != state.last_call:
            self._last_call = (state.last_call, answered)
        return dead


# --- deciding the next action ---


def leave(view: View, deadline: float) -> Action:
    """Decide the next action of a node that wants to leave its round."""
    if view.state.place_of(view.node) is not Place.PARTICIPANT:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if view.now > deadline else Action.LEAVE


def join(view: View, deadline: float) -> Action:
    """Decide the next action of a node that wants to join a round."""
    state, settings = view.state, view.settings
    place = state.place_of(view.node)
    has_room = len(state.at(Place.PARTICIPANT)) < settings.max_nodes
    if state.closed is not None:
        return Action.ERROR_SPARE if place is Place.REDUNDANT else Action.ERROR_CLOSED
    if place is Place.REDUNDANT:
        if has_room or not state.is_complete:
            return Action.NO_LONGER_REDUNDANT
        return _stay(view)
    if place is Place.PARTICIPANT and state.is_complete:
        return Action.FINISH if state.is_intact else Action.LEAVE
    if view.now > deadline:
        may_take_back = place is not None and view.now <= deadline + ROLLBACK
        return Action.LEAVE if may_take_back else Action.ERROR_TIMEOUT
    if place is Place.PARTICIPANT:
        return Action.COMPLETE if _is_last_call_over(view) else _stay(view)
    if not state.is_complete:
        return Action.PARTICIPATE if has_room else _stay(view)
    if not has_room:
        return Action.BE_REDUNDANT
    return _stay(view) if place is Place.WAITING else Action.WAIT


def close(view: View, deadline: float) -> Action:
    """Decide the next action of a node that wants to close the rendezvous."""
    if view.state.closed is not None:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if view.now > deadline else Action.CLOSE


def keep_alive(view: View, deadline: float) -> Action:
    """Decide the next action of a node whose heartbeat may be due."""
    if not view.is_beat_due or view.node not in view.state.nodes:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if view.now > deadline else Action.KEEP_ALIVE


def _stay(view: View) -> Action:
    return Action.KEEP_ALIVE if view.is_beat_due and view.node in view.state.nodes else Action.SYNC


def _is_last_call_over(view: View) -> bool:
    since, needed = view.last_call_since, view.settings.min_nodes
    is_enough = len(view.state.at(Place.PARTICIPANT)) >= needed
    return is_enough and since is not None and view.now - since >= seconds_of_last_call(view.settings)


def seconds_of_last_call(settings: RendezvousSettings) -> float:
    """Return the duration of the last call (the time for late nodes to join), in seconds."""
    return float(settings.timeout.last_call.total_seconds())


def patience(settings: RendezvousSettings) -> float:
    """Return the time without a heartbeat after which a node is considered dead, in seconds."""
    return settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt


def ended(state: State, node: Node, number: int) -> bool:
    """Return true if round ``number``, in which this node took part, is over."""
    return state.round != number or not state.is_intact or state.place_of(node) is not Place.PARTICIPANT


def waiting(state: State, settings: RendezvousSettings) -> int:
    """Return the number of waiting nodes for which the round has room."""
    room = settings.max_nodes - len(state.at(Place.PARTICIPANT))
    return min(len(state.at(Place.WAITING)), max(room, 0))


# --- applying an action to the state ---


def apply(action: Action, state: State, node: Node, beat: int, settings: RendezvousSettings) -> State:
    """Return the state that results from a node's action. For :attr:`Action.CLOSE`, use :func:`closed`
    instead.

    Raises:
        ValueError: the action does not change the state.
    """
    standing = state.nodes.get(node)
    if action is Action.KEEP_ALIVE and standing is not None:
        return state.with_node(node, replace(standing, beat=beat))
    if action is Action.PARTICIPATE:
        return _participating(state.with_node(node, Standing(Place.PARTICIPANT, beat)), settings)
    if action is Action.WAIT:
        return state.with_node(node, Standing(Place.WAITING, beat))
    if action is Action.BE_REDUNDANT:
        return state.with_node(node, Standing(Place.REDUNDANT, beat))
    if action in {Action.LEAVE, Action.NO_LONGER_REDUNDANT}:
        return without(state, [node], settings)
    if action is Action.COMPLETE:
        return _completed(state)
    raise ValueError(f"{action} changes nothing for node {node}")


def closed(state: State, reason: str, has_failed: bool = False) -> State:
    """Return the state after closing the rendezvous for ``reason``. ``has_failed`` is true if the job has
    failed.
    """
    return replace(state, closed=reason[:256], has_failed=has_failed)


def without(state: State, gone: Iterable[Node], settings: RendezvousSettings) -> State:
    """Return the state without the nodes in ``gone``. If a complete round loses its last participant, start
    the next round.

    If an incomplete round no longer has enough participants, cancel its last call (the final wait for more
    nodes).
    """
    left = set(gone)
    if not left & state.nodes.keys():
        return state
    nodes = {node: standing for node, standing in state.nodes.items() if node not in left}
    state = replace(state, nodes=nodes)
    participants = len(state.at(Place.PARTICIPANT))
    if state.is_complete:
        return state if participants else replace(state, round=state.round + 1, size=0)
    return state if participants >= settings.min_nodes else replace(state, last_call=None)


def _participating(state: State, settings: RendezvousSettings) -> State:
    participants = len(state.at(Place.PARTICIPANT))
    if participants >= settings.max_nodes:
        return _completed(state)
    if participants >= settings.min_nodes and state.last_call is None:
        return replace(state, last_call=state.last_calls + 1, last_calls=state.last_calls + 1)
    return state


def _completed(state: State) -> State:
    participants = sorted(state.at(Place.PARTICIPANT), key=natural_order)
    ranks = {node: replace(state.nodes[node], rank=rank) for rank, node in enumerate(participants)}
    return replace(state, size=len(participants), last_call=None, nodes={**state.nodes, **ranks})
