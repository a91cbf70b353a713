"""Rendezvous handler for user-supplied back ends, with the interface of torch's ``DynamicRendezvousHandler``.

A back end stores a single value, and replaces it only if the caller passes the token of the current value.
:mod:`elasticrs.rendezvous.dynamic` defines what the value contains and how it may change. Differences from
torch:

- The value is JSON, because unpickling could run code. Nodes with torch's handler can therefore not take
  part.
- Clocks of different hosts are never compared.
- Every round has a new store for its workers. The store is on the node with rank 0.
- ``num_nodes_waiting`` also returns a positive number when the round has lost a node or the job has failed on
  another node. It returns 0 if the rendezvous was closed for another reason.
- Times may be fractions of seconds, and nodes poll more often than once a second while the state is changing.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

from elasticrs.events import NodeState, construct_and_record_rdzv_event
from elasticrs.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elasticrs.rendezvous.dynamic import actions
from elasticrs.rendezvous.dynamic.recording import Recorder
from elasticrs.rendezvous.dynamic.rendezvous_settings import RendezvousSettings, RendezvousTimeout, check
from elasticrs.rendezvous.dynamic.rendezvous_state import Node, Place
from elasticrs.rendezvous.dynamic.turns import LONGEST_PAUSE, SHORTEST_PAUSE, Operation, SharedState
from elasticrs.rendezvous.utils import _PeriodicTimer
from elasticrs.store.prefix_store import with_prefix
from elasticrs.workers.ports import StorePort, agent_hosts_store

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]

_log = logging.getLogger("elasticrs.rendezvous")
_NEXT = "DynamicRendezvousHandler.next_rendezvous"

Token = Any
"""Token that a back end returns with a state. A caller passes the token back to replace that state."""


def get_method_name(depth: int = 2) -> str:
    """Return the name of the caller ``depth`` frames up the stack, or ``no_method_name`` if there is none.

    Args:
        depth: 1 for the caller, 2 for the caller's caller.
    """
    stack = inspect.stack()
    return stack[depth].function if len(stack) > depth else "no_method_name"


class RendezvousBackend(ABC):
    """Base class of back ends, which store the state of a rendezvous. Users can supply subclasses."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name under which this back end is registered."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; ``None`` if there is no state yet.

        Raises:
            RendezvousConnectionError: the back end cannot be reached.
            RendezvousStateError: the state is damaged.
        """

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state if the token is that of the current state.

        Args:
            state: new state.
            token: token of the state to replace; ``None`` if there was no state when the caller last read it.

        Returns:
            The current state, its token, and true if this call has set that state. ``None`` if the outcome is
            unknown. The caller must then read the state.

        Raises:
            RendezvousConnectionError: the back end cannot be reached.
            RendezvousStateError: the state is damaged.
        """


class _NodeGenerator:
    def __init__(self) -> None:
        self._numbers = itertools.count()

    def generate(self, local_addr: str | None = None) -> Node:
        return Node(local_addr or socket.getfqdn(), os.getpid(), next(self._numbers))


class DynamicRendezvousHandler(RendezvousHandler):
    """Handler of the dynamic rendezvous for one node. All methods may be called from any thread.

    Create a handler with :meth:`from_backend`.

    Args:
        node: this node.
        settings: settings of the rendezvous.
        backend_name: name of the back end.
        store: store that all nodes share, with torch's interface. Each round uses keys with its own prefix.
        state_holder: this node's access to the state.

    Raises:
        ValueError: the settings are invalid.
    """

    _node_desc_generator = _NodeGenerator()

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = 5,
        keep_alive_max_attempt: int = 3,
        cas_backoff_max_seconds: float = 0.0,
    ) -> DynamicRendezvousHandler:
        """Create a handler.

        Args:
            run_id: name of the job.
            store: store that all nodes share, with torch's interface.
            backend: back end that keeps the state.
            min_nodes: minimum number of nodes.
            max_nodes: maximum number of nodes.
            local_addr: address of this node; its fully qualified name if ``None``.
            timeout: time limits for the steps of the rendezvous.
            keep_alive_interval: seconds between two heartbeats.
            keep_alive_max_attempt: number of missed heartbeats after which a node is considered dead.
            cas_backoff_max_seconds: longest random pause after a write that failed because another node wrote
                first.

        Raises:
            ValueError: the settings are invalid.
        """
        node = cls._node_desc_generator.generate(local_addr)
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
            cas_backoff_max_seconds,
        )
        return cls(node, settings, backend.name, store, SharedState(backend, settings, node))

    def __init__(
        self,
        node: Node,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: SharedState,
    ) -> None:
        check(settings)
        self._this_node = node
        self._settings = settings
        self._backend_name = backend_name
        self._store = store
        self._shared = state_holder
        self._recorder = Recorder(settings.run_id, node)
        # Hold this lock during every access to the shared state, because back ends need not be thread-safe.
        self._lock = threading.Lock()
        self._timer: _PeriodicTimer | None = None
        self._look_again = 0.0
        self._round: int | None = None
        self._has_succeeded = False
        self._failure: str | None = None
        self._store_port: StorePort | None = None

    @property
    def settings(self) -> RendezvousSettings:
        """Settings of the rendezvous."""
        return self._settings

    def get_backend(self) -> str:
        return self._backend_name

    @property
    def use_agent_store(self) -> bool:
        """True if an agent serves the workers' store. This is the default; setting the environment variable
        ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` to 1 disables it.
        """
        return agent_hosts_store(os.environ)

    def get_run_id(self) -> str:
        return self._settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round and wait for the next one. Leaving ends the current round for all of its
        nodes.

        Returns:
            The rank, the number of nodes, the shared store with this round's key prefix, and the address of
            the workers' store. Until its next round, the handler with rank 0 serves the workers' store, or
            reserves a port for this store.

        Raises:
            RendezvousClosedError: the job has ended. The message contains the reason.
            RendezvousConnectionError: the back end cannot be reached.
            RendezvousGracefulExitError: the job has ended, and did not need this node.
            RendezvousStateError: the state was not written by elasticrs.
            RendezvousTimeoutError: too few nodes joined in time.
        """
        with self._recorder.failures("next_rendezvous"):
            return self._next_rendezvous()

    def _next_rendezvous(self) -> RendezvousInfo:
        self._recorder.tell(_NEXT, f"node {self._this_node} wants to join the next round")
        self._stop_heartbeats()
        with self._lock:
            self._release()
            self._round, self._has_succeeded = None, False
        seconds = self._settings.timeout.join.total_seconds()
        deadline = time.monotonic() + seconds
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            self._run(actions.leave, left)
            self._run(actions.join, left)
            with self._lock:
                state = self._shared.state
                self._round = state.round
                rank, size = state.nodes[self._this_node].rank, state.size
            self._start_heartbeats()
            try:
                store = with_prefix(self._store, f"torch.rendezvous.{self._settings.run_id}.{self._round}")
                bootstrap = self._bootstrap(rank, store, deadline)
            except BaseException:
                self._stop_heartbeats()
                raise
            if bootstrap is not None:
                _log.info("node %s has rank %d of %d in round %d", self._this_node, rank, size, self._round)
                text = f"node {self._this_node} has rank {rank} of {size} in round {self._round}"
                self._recorder.tell(_NEXT, text, rank=rank)
                return RendezvousInfo(store, rank, size, bootstrap)
            # The round ended before rank 0 had published the address of the workers' store, so join another
            # round.
            self._stop_heartbeats()

    def num_nodes_waiting(self) -> int:
        """Return a positive number if the agent should stop its workers and join the next round.

        The result is the number of waiting nodes that the round has room for. The result is at least 1 if the
        round has lost a node, which torch does not report. If the rendezvous was closed because the job has
        failed, the result is 1, so that the agent calls :meth:`next_rendezvous`, which raises an error with
        the reason. If the rendezvous was closed for another reason, the result is 0, because no other round
        follows.

        Raises:
            RendezvousConnectionError: the back end was unreachable for so long that the other nodes consider
                this node dead.
        """
        with self._recorder.failures("num_nodes_waiting"), self._lock:
            self._look()
            state = self._shared.state
            if state.closed is not None:
                return int(state.has_failed and self._round is not None)
            waiting = 0 if self._has_succeeded else actions.waiting(state, self._settings)
            if self._round is not None and actions.ended(state, self._this_node, self._round):
                return max(waiting, 1)
            return waiting

    def set_succeeded(self) -> None:
        """Record that this node's workers have finished. From then on, a newly arrived node does not cause a
        restart, but the loss of a node still does. This method does not exist in torch.
        """
        with self._lock:
            self._has_succeeded = True

    def set_failed(self, reason: str) -> None:
        """Record that the job has failed on this node, and why. When the rendezvous is closed later, the
        other nodes stop their workers. This has no effect on a node that is not in a round. The method does
        not exist in torch.
        """
        with self._lock:
            self._failure = reason if self._round is not None else None

    def is_closed(self) -> bool:
        with self._recorder.failures("is_closed"), self._lock:
            self._look()
            return self._shared.state.closed is not None

    def set_closed(self) -> None:
        """Close the rendezvous for all nodes; see :class:`RendezvousHandler`.

        Raises:
            RendezvousError: the rendezvous could not be closed.
        """
        with self._recorder.failures("set_closed"):
            self._close()

    def _close(self) -> None:
        reason = self._failure or ("its work is done" if self._has_succeeded else "it has stopped")
        reason = f"node {self._this_node} has closed it, because {reason}"
        seconds = self._settings.timeout.close.total_seconds()
        self._run(actions.close, seconds, reason, self._failure is not None)
        text = f"node {self._this_node} has closed the rendezvous"
        self._recorder.tell("DynamicRendezvousHandler._close", text, NodeState.SUCCEEDED)

    def shutdown(self) -> bool:
        """Close the rendezvous, and release this node's resources.

        Returns:
            True if the rendezvous was closed for all nodes.
        """
        self._stop_heartbeats()
        try:
            with self._recorder.failures("shutdown"):
                self._close()
        except RendezvousError as error:
            _log.warning("the rendezvous of job %s could not be closed: %s", self.get_run_id(), error)
            return False
        finally:
            with self._lock:
                self._release()
        return True

    # --- the workers' store ---

    def _bootstrap(self, rank: int, store: Any, deadline: float) -> RendezvousStoreInfo | None:
        """Return the address of the workers' store. Return ``None`` if the round ends before the address is
        published.
        """
        keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
        pause = SHORTEST_PAUSE
        if rank == 0:
            with self._lock:
                self._store_port = port = StorePort(is_served=self.use_agent_store)
                port.serve(None)
            return RendezvousStoreInfo.build(rank, store, self._this_node.addr, port.number)
        while not store.check(keys):
            with self._lock:
                self._shared.read()
                state = self._shared.state
                if self._round is None or actions.ended(state, self._this_node, self._round):
                    return None
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"the rendezvous of job {self.get_run_id()}: {_rank_0(state.nodes)} has joined, but has "
                    "not published the address of the workers' store"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return RendezvousStoreInfo.build(rank, store, self._this_node.addr)

    def _release(self) -> None:
        if self._store_port is not None:
            self._store_port.close()
            self._store_port = None

    # --- the shared state ---

    def _run(self, decide: Any, seconds: float, reason: str = "", has_failed: bool = False) -> None:
        operation = Operation(self._shared, decide, seconds, reason, has_failed, self._recorder.acts)
        while True:
            with self._lock:
                pause = operation.turn()
                self._recorder.lost(self._shared.take_lost())
            if pause is None:
                return
            if pause > 0:
                time.sleep(pause)

    def _look(self) -> None:
        """Read the state, unless it was read recently. The minimum interval is one second, or half a
        heartbeat interval if that is shorter.
        """
        now, shared = time.monotonic(), self._shared
        if shared.synced is not None and now < self._look_again:
            return
        interval = self._settings.keep_alive_interval.total_seconds()
        self._look_again = now + min(interval / 2, LONGEST_PAUSE)
        try:
            shared.read()
            self._recorder.lost(shared.take_lost())
        except RendezvousConnectionError as error:
            # Tolerate an unreachable back end for some time, but raise the error before the other nodes
            # consider this node dead.
            if shared.synced is None or now - shared.synced > actions.patience(self._settings) - interval:
                raise
            _log.warning("the rendezvous of job %s cannot be reached: %s", self.get_run_id(), error)

    # --- heartbeats ---

    def _start_heartbeats(self) -> None:
        interval = self._settings.keep_alive_interval
        self._timer = _PeriodicTimer(interval, self._keep_alive_weak, weakref.ref(self))
        self._timer.set_name(f"RendezvousKeepAliveTimer_{self._this_node.local_id}")
        self._timer.start()

    def _stop_heartbeats(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    @staticmethod
    def _keep_alive_weak(weak_self: weakref.ref[DynamicRendezvousHandler]) -> None:
        handler = weak_self()
        if handler is not None:
            handler._keep_alive()

    def _keep_alive(self) -> None:
        served = self._store_port.store if self._store_port is not None else None
        for line in served.take_notices() if served is not None else ():
            _log.warning("the workers' store: %s", line)
        try:
            with self._recorder.failures("_keep_alive"):
                self._run(actions.keep_alive, self._settings.timeout.heartbeat.total_seconds())
        except Exception as error:
            # Catch all exceptions, including those of the user's back end, because the next heartbeat may
            # succeed.
            _log.warning("node %s could not send a heartbeat: %s", self._this_node, error or repr(error))


def _rank_0(nodes: dict[Node, Any]) -> str:
    for node, standing in nodes.items():
        if standing.place is Place.PARTICIPANT and standing.rank == 0:
            return f"node {node}"
    return "the node of rank 0"


def create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Create a handler from parameters.

    Args:
        store: store that all nodes share, with torch's interface.
        backend: back end that keeps the state.
        params: settings, with these defaults: ``join_timeout`` 600, ``last_call_timeout`` 30,
            ``close_timeout`` 30, ``heartbeat_timeout`` 5, ``keep_alive_interval`` 5,
            ``keep_alive_max_attempt`` 3, ``cas_backoff_max_seconds`` 0. Times are in seconds and may be
            fractions.

    Raises:
        ValueError: a parameter is invalid.
        TypeError: ``keep_alive_interval`` or ``keep_alive_max_attempt`` is ``None``.
    """
    try:
        return _create_handler(store, backend, params)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        construct_and_record_rdzv_event(params.run_id, text, NodeState.FAILED, "create_handler")
        raise


def _create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    timeout = RendezvousTimeout(
        *(_time(params, f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat"))
    )
    interval = _seconds(params, "keep_alive_interval", 5)
    attempts = params.get_as_int("keep_alive_max_attempt", 3)
    if interval is None or attempts is None:
        name = "keep_alive_interval" if interval is None else "keep_alive_max_attempt"
        raise TypeError(f"You passed '{name}=None' as a rendezvous configuration option")
    backoff = params.get("cas_backoff_max_seconds", 0.0)
    try:
        backoff = float(backoff)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cas_backoff_max_seconds({backoff!r}) is not a valid float value.") from error
    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        timeout,
        keep_alive_interval=interval,
        keep_alive_max_attempt=attempts,
        cas_backoff_max_seconds=backoff,
    )


def _time(params: RendezvousParameters, key: str) -> timedelta | None:
    seconds = _seconds(params, key)
    return None if seconds is None else timedelta(seconds=seconds)


def _seconds(params: RendezvousParameters, key: str, default: float | None = None) -> float | None:
    value = params.get(key, default)
    if value is None:
        return None
    try:
        seconds = float(value)
        timedelta(seconds=seconds)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"The rendezvous configuration option '{key}' does not represent a valid number of seconds: "
            f"{value!r}."
        ) from error
    return seconds
