"""Torch's rendezvous interfaces: errors, handler, parameters, registry.

Names, signatures and error texts are torch's (``torch.distributed.elastic.rendezvous.api``), so that handlers
written for it work here; the texts are compared by its tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias


class RendezvousError(Exception):
    """The rendezvous failed."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: the job has ended.

    Attributes:
        has_failed: true if the job is known to have failed.
    """

    has_failed = False


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous did not complete in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend cannot be reached."""


class RendezvousStateError(RendezvousError):
    """The state of the rendezvous is corrupt."""


class RendezvousGracefulExitError(RendezvousError):
    """A spare node may exit without that being a failure."""


_TORCHS = "torch.distributed.elastic.rendezvous.api"


def is_kind(error: BaseException, kind: type[RendezvousError]) -> bool:
    """True if an error is of this kind: ours, or torch's of the same name, which handlers of
    packages raise.
    """
    return isinstance(error, kind) or any(
        (each.__module__, each.__name__) == (_TORCHS, kind.__name__) for each in type(error).__mro__
    )


@dataclass
class RendezvousStoreInfo:
    """Where the workers' store listens.

    Args:
        master_addr: host of rank 0.
        master_port: its port.
    """

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"
    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Agree on an address: rank 0 publishes it in the store, all read it.

        Args:
            rank: of this node.
            store: with ``set`` and ``get`` of bytes.
            local_addr: address of this node; its fully qualified name when ``None``.
            server_port: the port; a free one when ``None``.
        """
        if rank == 0:
            import socket

            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, (local_addr or socket.getfqdn()).encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or _free_port()).encode())
        addr = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        port = int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode())
        return RendezvousStoreInfo(addr, port)


class RendezvousInfo:
    """What a completed rendezvous gives to a node.

    Args:
        store: shared by the nodes; of a node by itself, served from its first use on.
        rank: of this node.
        world_size: number of nodes.
        bootstrap_store_info: where the workers' store listens.
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
        """Where the workers' store listens."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """One node's part in the rendezvous of a job."""

    @abstractmethod
    def get_backend(self) -> str:
        """The name under which it is registered."""

    @property
    def use_agent_store(self) -> bool:
        """True if workers may use a store that an agent serves; otherwise rank 0 hosts one."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a round is complete.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousConnectionError: the backend cannot be reached.
            RendezvousStateError: its state is corrupt.
            RendezvousTimeoutError: too few nodes came in time.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """True if the job has ended; may lag behind."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes arrived after the round was complete."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The name of the job."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release what this node holds, and close the rendezvous.

        Returns:
            True if that worked.
        """


class RendezvousParameters:
    """What a handler is made from.

    Args:
        backend: the name of a registered backend.
        endpoint: ``HOST[:PORT]``.
        run_id: the name of the job.
        min_nodes: fewest nodes.
        max_nodes: most nodes.
        local_addr: address of this node.
        **kwargs: settings of the backend.

    Raises:
        ValueError: no backend, or bad numbers of nodes.
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
        """A setting, or ``default``."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """A setting as a truth value: ``1``, ``true``, ``t``, ``yes``, ``y`` and their opposites, in any
        case.

        Raises:
            ValueError: it is something else.
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
        """A setting as a whole number.

        Raises:
            ValueError: it is something else.
        """
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
    """Backends by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Add a backend; doing so twice with the same creator is fine.

        Args:
            backend: its name.
            creator: makes a handler.

        Raises:
            ValueError: no name, or another creator has it.
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
        """True if a backend of this name is registered."""
        return backend in self._registry

    def names(self) -> list[str]:
        """Names of all backends. Not in torch."""
        return list(self._registry)

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make a handler.

        Args:
            params: with the name of the backend.

        Raises:
            ValueError: no such backend.
            RuntimeError: the creator made a handler of another one.
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
"""The registry that launchers use."""


def _free_port() -> int:
    from elasticrs.workers.ports import ReservedPort

    reserved = ReservedPort()
    reserved.close()
    return reserved.number
