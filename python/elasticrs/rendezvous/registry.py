"""Finds the rendezvous handler for a backend: first among those of elasticrs, then among those that the
program has registered, then in the entry points ``elasticrs.rendezvous_handlers`` and ``torchrun.handlers``
of installed packages.

A job on a single node gets a :class:`OneNodeRendezvous`, whatever its backend.

As in torch, an entry point is a function without arguments that returns a creator (a function that creates a
handler). It is loaded only when its backend is requested, because it may be broken.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, cast

from elasticrs._engine.job.config import DEFAULT_MASTER_PORT, UsageError
from elasticrs._engine.nodes.describe import BACKENDS, PYTHON, Words, check_backend, describe, is_in_file
from elasticrs._engine.nodes.transport.addresses import parse_endpoint
from elasticrs._engine.nodes.transport.coordination import Client, NativeSession, Server
from elasticrs._engine.workers.plan import StorePort, agent_hosts_store
from elasticrs.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    is_kind,
    rendezvous_handler_registry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticrs.store import Store

__all__ = ["OneNodeRendezvous", "get_rendezvous_handler"]

_log = logging.getLogger("elasticrs.rendezvous")

_DEFAULT_TIMEOUT = 900
"""Timeout in seconds that torch's launcher passes to every handler."""

_HOST = "127.0.0.1"

GROUPS = ("elasticrs.rendezvous_handlers", "torchrun.handlers")


class OneNodeRendezvous(RendezvousHandler):
    """Rendezvous handler for a single-node job, with any back end.

    With the back end ``static`` and an endpoint, rank 0 hosts the workers' store at this endpoint. Otherwise,
    this process serves a new store in every round (an attempt of the workers), or, with
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, reserves a port on which rank 0 serves it.

    Attributes:
        address: address of the workers' store.
        port: port of the workers' store that the user has chosen; ``None`` for a new port in every round.
        store_port: port that :meth:`next_rendezvous` has reserved for the current round.

    Raises:
        ValueError: the job may have more than one node, or the endpoint is malformed.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        if params.max_nodes != 1:
            raise ValueError(f"{params.min_nodes}:{params.max_nodes} nodes, expected one node")
        self._backend = params.backend
        self._run_id = params.run_id
        self.address = params.local_addr or "localhost"
        self.port: int | None = None
        if params.backend == "static" and params.endpoint.strip():
            host, port = parse_endpoint("endpoint", params.endpoint.strip())
            self.address = host
            # Port 0 means any free port, as in torch.
            self.port = DEFAULT_MASTER_PORT if port is None else port or None
        self.store_port: StorePort | None = None
        self._server: Server | None = None
        self._store: Store | None = None
        self._round = 0
        self._is_closed = False

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return self.port is None and agent_hosts_store(os.environ)

    def next_rendezvous(self) -> RendezvousInfo:
        open_store = self.next_round()
        port = self.port
        if port is None:
            self.store_port = StorePort(is_served=self.use_agent_store)
            self.store_port.serve(None)
            port = self.store_port.number
        return RendezvousInfo(open_store(), 0, 1, RendezvousStoreInfo(self.address, port))

    def open_shared_store(self) -> Store:
        """Return the store of this round. Its server starts at the first call, because few jobs need it."""
        if self._store is None:
            from elasticrs._engine.nodes.transport.store import Requests
            from elasticrs.store import Store

            self._store = Store(Requests(self._connect))
        return self._store.with_prefix(f"torch.rendezvous.{self._run_id}.{self._round}/")

    def _connect(self) -> NativeSession:
        from elasticrs.store import DistNetworkError

        # The server requires a token of its clients, because other users of this machine can connect, too.
        token = os.urandom(16)
        try:
            if self._server is not None:
                # An earlier call of this method could not connect to the server that it started. Replace it.
                self._server.close()
            self._server = Server([(_HOST, 0)], run_id=self._run_id, token=token)
            client = Client(_HOST, self._server.port, run_id=self._run_id, token=token, stall_timeout=None)
            return NativeSession(client)
        except OSError as error:
            raise DistNetworkError(f"the store of this node cannot be served: {error}") from error

    def next_round(self) -> Callable[[], Store]:
        """Begin a round (an attempt of the workers). Return the function that opens the store of the round.
        Unlike :meth:`next_rendezvous`, leave it to the caller to assign ranks and to choose a port. Raise
        ``RendezvousClosedError`` after :meth:`set_closed`.
        """
        if self._is_closed:
            raise RendezvousClosedError(f"the rendezvous of job {self._run_id} is closed")
        self._release()
        self._round += 1
        return self.open_shared_store

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        self._release()
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        return True

    def _release(self) -> None:
        if self.store_port is not None:
            self.store_port.close()
            self.store_port = None


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler of the backend in ``params``. Raise ``ValueError`` if that is not possible."""
    find_backend(params.backend, PYTHON)
    return rendezvous_handler_registry.create_handler(params)


def handler_of_command_line(
    backend: str,
    endpoint: str,
    run_id: str,
    nodes: tuple[int, int],
    local_addr: str | None,
    settings: Mapping[str, Any],
) -> RendezvousHandler:
    """Create a rendezvous handler with the options of the command line.

    Raises ``UsageError`` if an option or the creator is wrong. Passes on errors of the service that the
    handler needs: ``RendezvousError``, ``OSError`` and ``RuntimeError``, with which torch reports lost
    connections.
    """
    configs = {"timeout": _DEFAULT_TIMEOUT, **settings}
    parameters = RendezvousParameters(backend, endpoint, run_id, *nodes, local_addr, **configs)
    try:
        return get_rendezvous_handler(parameters)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"--rdzv-backend {backend}: {error}") from error
    except Exception as error:
        if is_kind(error, RendezvousError) or isinstance(error, (OSError, RuntimeError)):
            raise
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"--rdzv-backend: {backend!r} failed: {why}") from error


def find_backend(name: str, words: Words) -> None:
    """Look for an unregistered backend in the installed packages. Raise ``ValueError`` if that fails."""
    if rendezvous_handler_registry.is_registered(name) or _register_from_package(name, words):
        return
    from importlib import metadata

    installed = {entry.name for group in GROUPS for entry in metadata.entry_points(group=group)}
    others = sorted({*rendezvous_handler_registry.names(), *installed} - BACKENDS.keys())
    check_backend(name, words, others)


def _register_from_package(name: str, words: Words) -> bool:
    from importlib import metadata

    for group in GROUPS:
        for entry in metadata.entry_points(group=group, name=name):
            try:
                creator = entry.load()()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise UsageError(
                    f"{words.backend}: {name!r} cannot be loaded from {entry.value}: {why}"
                ) from error
            rendezvous_handler_registry.register(name, creator)
            return True
    return False


def _register_out_of_tree_handlers() -> None:
    """Register the rendezvous handlers of installed packages, as torch does. Warn if one cannot be loaded."""
    from importlib import metadata

    for name in {entry.name for group in GROUPS for entry in metadata.entry_points(group=group)}:
        if not rendezvous_handler_registry.is_registered(name):
            try:
                _register_from_package(name, PYTHON)
            except UsageError as error:
                _log.warning("%s", error)


def _create(params: RendezvousParameters) -> RendezvousHandler:
    rendezvous, notices = describe(
        params.backend,
        params.endpoint.strip(),
        params.run_id,
        (params.min_nodes, params.max_nodes),
        params.config,
        os.environ,
        local_addr=params.local_addr,
        words=PYTHON,
    )
    for notice in notices:
        _log.warning("%s", notice)
    if rendezvous is None:
        return OneNodeRendezvous(params)
    from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler

    return ElasticRendezvousHandler(rendezvous, params.backend)


def _create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    if not is_in_file(params.config):
        return _create(params)
    if path := params.endpoint.strip():
        # Check this file first. If it cannot be used, torch would retry for minutes.
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise UsageError(
                f"--rdzv-endpoint: got {path!r}, expected a file that all nodes can open: {error.strerror}"
            ) from error
    # Use torch's own rendezvous if the nodes meet through a file, as torchrun does.
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    # This class has the same interface as torch's class.
    theirs: Any = params
    backend, store = create_backend(theirs)
    handler: Any = create_handler(store, backend, theirs)
    return cast("RendezvousHandler", handler)


for _backend in BACKENDS:
    rendezvous_handler_registry.register(_backend, _create_c10d if _backend == "c10d" else _create)
