"""Server, client and session of the built-in coordination store."""

from __future__ import annotations

from elasticrs import _core
from elasticrs._engine.nodes.transport import coordination

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs._engine.nodes.transport.coordination import Compare, Operation, Request, StoreEvent


Server = _core.CoordinationServer
Client = _core.CoordinationClient
raise_descriptor_limit = _core.raise_descriptor_limit
scoped_token = _core.scoped_token


class NativeSession:
    """Session that owns a client of the built-in store or of etcd. It has a connection, and a lease that
    expires when the session ends. Its ``fd`` is readable while :meth:`take` has events to return.
    """

    __slots__ = ("_client", "fd")

    def __init__(self, client: Client) -> None:
        self._client = client
        self.fd = client.fd

    @property
    def met(self) -> tuple[bytes, int] | None:
        """Name of the store to which the client last connected, and the highest revision seen there. A later
        client needs both to detect a different store. ``None`` before the first connection, and for etcd.
        """
        return self._client.met

    def take(self) -> list[StoreEvent]:
        """Return the events since the last call, without blocking. The first event of a session is
        :class:`.Connected` or
        :class:`.ConnectionLost`.
        """
        return [_event(event) for event in self._client.take()]

    def wait(self, timeout: float | None) -> bool:
        """Block until :meth:`take` has events to return. Return false on a timeout, or if no more events can
        arrive.
        """
        return self._client.wait(timeout)

    def send(self, request: Request) -> None:
        """Send a request. The store executes requests in order.

        Raises:
            ValueError: the request is too large.
        """
        if isinstance(request, coordination.Txn):
            self._client.txn(
                request.tag, _steps(request.compares), _steps(request.then), _steps(request.otherwise)
            )
        elif isinstance(request, coordination.Watch):
            self._client.watch(request.tag, request.prefix, exact=request.exact, snapshot=request.snapshot)
        else:
            self._client.unwatch(request.prefix, exact=request.exact)

    def clock(self) -> tuple[int, int] | None:
        """Return how far the store's wall clock is ahead of the local wall clock, and the maximum error of
        this value, both in nanoseconds. ``None`` if this is not known yet.
        """
        return self._client.clock()

    def close(self) -> None:
        """Close the session and end its lease immediately. Closing produces no event. Idempotent."""
        self._client.close()


_WORDS: dict[type[Compare | Operation], str] = {
    coordination.Exists: "exists",
    coordination.Missing: "missing",
    coordination.CreatedAt: "create",
    coordination.ModifiedAt: "mod",
    coordination.HasValue: "value",
    coordination.Put: "put",
    coordination.Delete: "delete",
    coordination.DeletePrefix: "delete_prefix",
    coordination.Get: "get",
    coordination.Range: "range",
    coordination.Predecessor: "predecessor",
}


def _steps(steps: Sequence[Compare] | Sequence[Operation]) -> list[tuple[str | bytes | int, ...]]:
    return [(_WORDS[type(step)], *step.values()) for step in steps]


def _event(event: _core.StoreEvent) -> StoreEvent:
    """Convert a native event. Entries need no conversion, because native entries already have the attributes
    of :class:`~.coordination.Entry`.
    """
    if isinstance(event, _core.Reply):
        return coordination.Reply(event.tag, event.ok, event.revision, event.results)
    if isinstance(event, _core.Changes):
        return coordination.Changes(event.revision, event.changes)
    if isinstance(event, _core.Connected):
        return coordination.Connected(event.revision, event.local_address, event.ttl)
    if isinstance(event, _core.StoreNotice):
        return coordination.Notice(event.message)
    return coordination.ConnectionLost(event.kind, event.message)
