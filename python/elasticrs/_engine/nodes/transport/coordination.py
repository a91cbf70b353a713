"""Client interface of the coordination store: requests, events, and the session that carries them.

A :class:`.NativeSession` holds a single lease. While the lease lasts, it may reconnect, or wait for a store
that is down. Requests are then only delayed. A session for another store must provide:

- transactions with up to :data:`MAX_OPERATIONS` compares and up to as many operations. Each transaction is
  one revision, and puts or deletes a key at most once;
- leased keys, which are deleted when the session ends, or some seconds later. All puts of a key are leased,
  or none is;
- watches of keys and prefixes, which begin with a snapshot or at the next revision. Each revision arrives
  complete, and revisions arrive in order. The order between several watches, or between watches and replies,
  is not specified. Two different watches never cover the same key. Changes that a resumed watch has missed
  arrive as a single revision;
- requests that are executed in order, and replies in that order; an :class:`Unwatch` takes effect for all
  later changes. Requests whose replies were lost may be executed again, in order, and may then be rejected;
- leases that outlast the session: the store ends the lease only after the session has reported its loss;
- :class:`ConnectionLost` as the last event of a session, whatever ended it.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticrs import _core
from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar, TypeAlias

    Entry: TypeAlias = _core.Entry | _core.Change
    """A key and its current value, or a change to a key. The value is ``None`` if the key was deleted."""

    Result: TypeAlias = int | Entry | Sequence[Entry] | None

MAX_OPERATIONS = 125
"""Maximum number of compares, and of operations, in a transaction. Etcd allows 128, of which elasticrs's
client uses up to three itself.
"""


# --- parts of a transaction ---


class Compare(Value):
    """Condition of a transaction. ``native`` makes the object of the Rust extension from the fields."""

    native: ClassVar[Callable[..., _core.Compare]]
    key: str


class Exists(Compare):
    native = _core.Compare.exists


class Missing(Compare):
    native = _core.Compare.missing


class CreatedAt(Compare):
    """Condition that the key was created at this revision. With revision 0, the key must not exist."""

    native = _core.Compare.created_at
    revision: int


class ModifiedAt(Compare):
    """Condition that the key was last put at this revision. With revision 0, the key must not exist."""

    native = _core.Compare.modified_at
    revision: int


class HasValue(Compare):
    native = _core.Compare.has_value
    value: bytes


class Operation(Value):
    """Operation of a transaction. Its result is in the :class:`Reply`."""

    native: ClassVar[Callable[..., _core.Op]]


class Put(Operation):
    """Set a key. If ``leased`` is true, the store deletes the key when this session ends. The result is 1."""

    native = _core.Op.put
    key: str
    value: bytes
    leased: bool


class Delete(Operation):
    """Delete a key. The result is 1, or 0 if the key did not exist."""

    native = _core.Op.delete
    key: str


class DeletePrefix(Operation):
    """Delete all keys with this prefix. The result is the number of deleted keys."""

    native = _core.Op.delete_prefix
    prefix: str


class Get(Operation):
    """Read a key. The result is an entry, or ``None`` if the key does not exist."""

    native = _core.Op.get
    key: str


class Range(Operation):
    """Read the first ``limit`` keys with this prefix (0: all keys). The result is a list of entries."""

    native = _core.Op.range
    prefix: str
    limit: int


class Predecessor(Operation):
    """Read the newest key with this prefix that is older than ``key``. The result is an entry or ``None``."""

    native = _core.Op.predecessor
    prefix: str
    key: str


# --- requests ---


class Txn(Value):
    """Transaction that executes ``then`` if all compares hold, or else ``otherwise``. A reply follows."""

    tag: int
    compares: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


class Watch(Value):
    """Watch a prefix, or an ``exact`` key. A :class:`Reply` follows, then :class:`Changes` after its
    revision. With ``snapshot``, the reply contains the existing entries.
    """

    tag: int
    prefix: str
    exact: bool
    snapshot: bool = True


class Unwatch(Value):
    prefix: str
    exact: bool


# --- events ---


class Connected(Value):
    """The session has started. ``ttl`` is the granted lease time in seconds; 0 if it is as requested."""

    revision: int
    local_address: str
    ttl: float = 0.0


class Reply(Value):
    """Reply to a request. ``ok`` is true if all compares held. The results of a watch are entries."""

    tag: int
    ok: bool
    revision: int
    results: Sequence[Result] = ()

    def entry(self, index: int) -> Entry | None:
        """Return the result of a :class:`Get` or a :class:`Predecessor`."""
        found = self.results[index]
        assert not isinstance(found, (int, Sequence))
        return found

    def entries(self) -> list[Entry]:
        """Return the entries that existed when the watch started."""
        return [entry for index in range(len(self.results)) if (entry := self.entry(index)) is not None]


class Changes(Value):
    """Changes of one revision, in order. Some stores split them into one event per watch."""

    revision: int
    changes: Sequence[Entry]


class Notice(Value):
    """Message to the user that the store has stopped or resumed responding. The session continues."""

    message: str


class ConnectionLost(Value):
    """The session could not be opened, or was lost. No event of this session follows. ``kind`` is
    ``refused``, ``unreachable``, ``timeout``, ``resolve``, ``version``, ``token``, ``not_ours``, ``run``,
    ``closed``, ``silent``, ``slow``, ``protocol``, ``limit``, ``gone``, ``other``, ``tls`` or ``denied``
    (etcd), or ``cannot_host`` (rendezvous).
    """

    kind: str
    message: str


if TYPE_CHECKING:
    Request: TypeAlias = Txn | Watch | Unwatch
    StoreEvent: TypeAlias = Connected | Reply | Changes | Notice | ConnectionLost


Server = _core.CoordinationServer
Client = _core.CoordinationClient
raise_descriptor_limit = _core.raise_descriptor_limit
scoped_token = _core.scoped_token


class NativeSession:
    """Session of a client of the built-in store or of etcd. ``fd`` is readable while there are events."""

    __slots__ = ("_client", "clock", "close", "fd", "wait")

    def __init__(self, client: Client) -> None:
        self._client, self.fd = client, client.fd
        self.wait, self.clock, self.close = client.wait, client.clock, client.close

    @property
    def met(self) -> tuple[bytes, int] | None:
        """Name of the last store, and its highest revision. A later client needs both to detect that it has
        reached a different store. ``None`` before the first connection, and for etcd.
        """
        return self._client.met

    def take(self) -> list[StoreEvent]:
        return [_event(event) for event in self._client.take()]

    def send(self, request: Request) -> None:
        if isinstance(request, Txn):
            self._client.txn(
                request.tag, _compares(request.compares), _ops(request.then), _ops(request.otherwise)
            )
        elif isinstance(request, Watch):
            self._client.watch(request.tag, request.prefix, exact=request.exact, snapshot=request.snapshot)
        else:
            self._client.unwatch(request.prefix, exact=request.exact)


def _compares(compares: Sequence[Compare]) -> list[_core.Compare]:
    return [each.native(*each.values()) for each in compares]


def _ops(operations: Sequence[Operation]) -> list[_core.Op]:
    return [each.native(*each.values()) for each in operations]


def _event(event: _core.StoreEvent) -> StoreEvent:
    """Convert a native event. Native entries already have the attributes of :class:`~.Entry`."""
    if isinstance(event, _core.Reply):
        return Reply(event.tag, event.ok, event.revision, event.results)
    if isinstance(event, _core.Changes):
        return Changes(event.revision, event.changes)
    if isinstance(event, _core.Connected):
        return Connected(event.revision, event.local_address, event.ttl)
    if isinstance(event, _core.StoreNotice):
        return Notice(event.message)
    return ConnectionLost(event.kind, event.message)
