"""Torch's rendezvous interfaces, with its names, signatures and error messages, which its tests compare."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias


class RendezvousError(Exception):
    """The rendezvous failed."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed because the job has finished, or has failed (``has_failed``)."""

    has_failed = False


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous did not complete in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend cannot be reached."""


class RendezvousStateError(RendezvousError):
    """The state of the rendezvous is corrupt."""


class RendezvousGracefulExitError(RendezvousError):
    """Raised on a spare node that is no longer needed and should exit. This exit is not a failure."""


_TORCHS = "torch.distributed.elastic.rendezvous.api"


def is_kind(error: BaseException, kind: type[RendezvousError]) -> bool:
    """Return true for an instance of ``kind`` or torch's class of that name, which handlers may raise."""
    return isinstance(error, kind) or any(
        (each.__module__, each.__name__) == (_TORCHS, kind.__name__) for each in type(error).__mro__
    )


@dataclass
class RendezvousStoreInfo:
    """Address of the workers' store, which is on the node with rank 0."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Agree on the address of the workers' store. Rank 0 publishes it in the shared store for all nodes.

        Args:
            rank: rank of this node.
            store: shared store, with the methods ``set`` and ``get`` for bytes.
            local_addr: address of this node; its fully qualified name if ``None``.
            server_port: port; if ``None``, rank 0 reserves a free one as long as the result exists.
        """
        held = None
        if rank == 0:
            import socket

            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, (local_addr or socket.getfqdn()).encode())
            if not server_port:
                from elasticrs._engine.workers.plan import StorePort

                held = StorePort(is_served=False)
                server_port = held.number
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port).encode())
        addr = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        port = int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode())
        found = RendezvousStoreInfo(addr, port)
        if held is not None:
            # Keep the port reserved as long as this object exists.
            weakref.finalize(found, held.close)
        return found


class RendezvousInfo:
    """What one node gets from a completed rendezvous.

    On a single node, the server of the store starts on first use.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo | None
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Any:
        """The store that the nodes share."""
        return self._store

    @property
    def rank(self) -> int:
        """Rank of this node."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of nodes."""
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """Address of the workers' store."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """Base class of rendezvous handlers. A handler takes part in a job's rendezvous for one node."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the name under which this handler's backend is registered."""

    @property
    def use_agent_store(self) -> bool:
        """True if an agent serves the workers' store; false if the worker with rank 0 serves it."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, and wait until it is complete.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousConnectionError: the backend cannot be reached.
            RendezvousStateError: the state of the rendezvous is corrupt.
            RendezvousTimeoutError: too few nodes joined in time.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return true if the job is known to have finished. The result may be slightly out of date."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that arrived too late for the current round."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the name of the job."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close the rendezvous, and release this node's resources. Return true if it was closed."""


class RendezvousParameters:
    """Parameters for creating a rendezvous handler.

    Args:
        backend: name of a registered backend.
        endpoint: endpoint of the backend, as ``HOST[:PORT]``.
        run_id: name of the job.
        min_nodes: minimum number of nodes.
        max_nodes: maximum number of nodes.
        local_addr: address of this node.
        **kwargs: settings of the backend.

    Raises:
        ValueError: the backend name is empty, or the numbers of nodes are invalid.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        if min_nodes < 1:
            raise ValueError(
                f"The minimum number of rendezvous nodes ({min_nodes}) must be greater than zero."
            )
        if max_nodes < min_nodes:
            raise ValueError(
                f"The maximum number of rendezvous nodes ({max_nodes}) must be greater than or "
                f"equal to the minimum number of rendezvous nodes ({min_nodes})."
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting, or ``default`` if it is not set."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a setting as a Boolean: true for ``1``, ``true``, ``t``, ``yes``, ``y``, and false for
        ``0``, ``false``, ``f``, ``no``, ``n``, in any case. Raise ``ValueError`` for other values.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        known = {"1": True, "true": True, "t": True, "yes": True, "y": True}
        known |= {"0": False, "false": False, "f": False, "no": False, "n": False}
        if isinstance(value, (int, str)):
            found = known.get(str(value).lower())
            if found is not None:
                return found
        raise ValueError(
            f"The rendezvous configuration option '{key}' does not represent a valid boolean value."
        )

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return a setting as an integer. Raise ``ValueError`` if it is not one."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError as error:
            raise ValueError(
                f"The rendezvous configuration option '{key}' does not represent a valid integer value."
            ) from error


RendezvousHandlerCreator: TypeAlias = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Registry of rendezvous backends, keyed by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a backend's creator.

        Raise ``ValueError`` if the name is empty or already has another creator.
        """
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        current = self._registry.setdefault(backend, creator)
        if current != creator:
            raise ValueError(
                f"The rendezvous backend '{backend}' cannot be registered with '{creator}' as it is already "
                f"registered with '{current}'."
            )

    def is_registered(self, backend: str) -> bool:
        """Return true if a backend with this name is registered."""
        return backend in self._registry

    def names(self) -> list[str]:
        """Return the names of all registered backends. Not available in torch."""
        return list(self._registry)

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create a handler.

        Raises:
            ValueError: no backend with this name is registered.
            RuntimeError: the creator returned a handler for another backend.
        """
        creator = self._registry.get(params.backend)
        if creator is None:
            raise ValueError(
                f"The rendezvous backend '{params.backend}' is not registered. Did you forget to call "
                "`register`?"
            )
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"The rendezvous backend '{handler.get_backend()}' does not match the requested backend "
                f"'{params.backend}'."
            )
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry()
"""Global registry of backends. Launchers look up backends in this registry."""
