"""Record the events of the dynamic rendezvous at the same points as torch.

Each event has the name of torch's class and method, because consumers of the events expect these names. No
event is created unless a logging handler is registered for ``dynamic_rendezvous``.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elasticrs.events import NodeState, RdzvEvent, get_logging_handler, record_rdzv_event
from elasticrs.job.value import Record
from elasticrs.rendezvous.dynamic.actions import Action
from elasticrs.rendezvous.dynamic.rendezvous_state import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticrs.rendezvous.dynamic.rendezvous_state import Node, State

_FILE = "dynamic_rendezvous.py"
_EXECUTOR = "_DistributedRendezvousOpExecutor"

_LEAVING = {
    Place.PARTICIPANT: ("_remove_from_participants", "leaves the participants"),
    Place.WAITING: ("_remove_from_wait_list", "leaves the waiting list"),
    Place.REDUNDANT: ("_remove_from_redundancy_list", "leaves the redundancy list"),
}
_ACTS = {
    Action.KEEP_ALIVE: ("_keep_alive", "sends a keep-alive"),
    Action.PARTICIPATE: ("_add_to_participants", "joins the participants"),
    Action.WAIT: ("_add_to_wait_list", "joins the waiting list"),
    Action.BE_REDUNDANT: ("_add_to_redundancy_list", "joins the redundancy list"),
    Action.COMPLETE: ("_mark_rendezvous_complete", "completes the round"),
    Action.CLOSE: ("_mark_rendezvous_closed", "closes the rendezvous"),
}
_DONE = (Action.COMPLETE, Action.CLOSE)


class Recorder(Record):
    """Recorder of one node's rendezvous events."""

    _run_id: str
    _node: Node

    def tell(
        self, what: str, message: str, node_state: NodeState = NodeState.RUNNING, rank: int | None = None
    ) -> None:
        """Record an event, named after a class and method of torch. If ``node_state`` is ``FAILED``, include
        the traceback of the current exception.
        """
        if isinstance(get_logging_handler("dynamic_rendezvous"), logging.NullHandler):
            return
        event = RdzvEvent(
            name=f"{_FILE}:{what}",
            run_id=self._run_id,
            message=message,
            hostname=self._node.addr,
            pid=self._node.pid,
            node_state=node_state,
            rank=rank,
            local_id=self._node.local_id,
            error_trace=traceback.format_exc() if node_state is NodeState.FAILED else "",
        )
        record_rdzv_event(event)

    def acts(self, action: Action, state: State) -> None:
        """Record an action of this node, just before it changes the shared state. ``state`` is the state
        before the change.
        """
        place = state.place_of(self._node)
        if action in _ACTS:
            method, deed = _ACTS[action]
        elif place is not None:
            method, deed = _LEAVING[place]
        else:
            return
        node_state = NodeState.SUCCEEDED if action in _DONE else NodeState.RUNNING
        self.tell(f"{_EXECUTOR}.{method}", f"node {self._node} {deed} (round {state.round})", node_state)

    def lost(self, nodes: Iterable[Node]) -> None:
        """Record that this node considers ``nodes`` dead."""
        names = ", ".join(map(str, nodes))
        if names:
            self.tell("_BackendRendezvousStateHolder.sync", f"no keep-alive from {names}: removed")

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Return a context manager that records any exception raised in its block. The record contains
        ``what`` as the name of the handler method.
        """
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.tell(f"DynamicRendezvousHandler.{what}", text, NodeState.FAILED)
            raise
