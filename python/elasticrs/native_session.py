"""A session with our own store: the one place where the native client's terms are known."""

from __future__ import annotations

from elasticrs import _core
from elasticrs.coordination import Changes, Connected, ConnectionLost, Reply, Txn, Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.coordination import Compare, Operation, Request, StoreEvent


class NativeSession:
    """A session with our own store.

    Args:
        client: of the native part; it belongs to the session.
    """

    __slots__ = ("_client", "fd")

    def __init__(self, client: _core.CoordinationClient) -> None:
        self._client = client
        self.fd = client.fd

    def take(self) -> list[StoreEvent]:
        """See :class:`~elasticrs.coordination.Session`."""
        return [_event(event) for event in self._client.take()]

    def wait(self, timeout: float | None) -> bool:
        """See :class:`~elasticrs.coordination.Session`."""
        return self._client.wait(timeout)

    def send(self, request: Request) -> None:
        """See :class:`~elasticrs.coordination.Session`.

        Raises:
            ValueError: it is too large.
        """
        if isinstance(request, Txn):
            self._client.txn(
                request.tag, _steps(request.compares), _steps(request.then), _steps(request.otherwise)
            )
        elif isinstance(request, Watch):
            self._client.watch(request.tag, request.prefix, exact=request.exact, snapshot=request.snapshot)
        else:
            self._client.unwatch(request.prefix, exact=request.exact)

    def clock(self) -> tuple[int, int] | None:
        """See :class:`~elasticrs.coordination.Session`."""
        return self._client.clock()

    def close(self) -> None:
        """See :class:`~elasticrs.coordination.Session`."""
        self._client.close()


def _steps(steps: Sequence[Compare] | Sequence[Operation]) -> list[tuple[str | bytes | int, ...]]:
    return [(step.word, *step.fields().values()) for step in steps]


def _event(event: _core.StoreEvent) -> StoreEvent:
    """An event without its native shell; entries have the same attributes, and stay what they are."""
    if isinstance(event, _core.Reply):
        return Reply(event.tag, event.ok, event.revision, event.results)
    if isinstance(event, _core.Changes):
        return Changes(event.revision, event.changes)
    if isinstance(event, _core.Connected):
        return Connected(event.revision, event.local_address)
    return ConnectionLost(event.kind, event.message)
