"""The coordination store from the client's point of view: requests, events, and the session that carries
them.

A :class:`Session` holds a single lease. While the lease lasts, the session may lose its connection and
reconnect, or wait for a store that is down; that only delays requests. A session for another store must
provide:

- transactions of at most :data:`MAX_OPERATIONS` compares and as many operations. Each transaction is one
  revision, and puts or deletes a key at most once;
- leased keys, which are deleted when the session ends, or some seconds later; a key is put either always with
  a lease or always without;
- watches of keys and prefixes, from a snapshot or a revision on. Each revision arrives complete and in order,
  as far as the watch covers it. The order between several watches, or between watches and replies, is not
  specified. A session never has two watches that cover the same key, but a watch may be requested again. If
  the store has forgotten the past of a watch, or if the watch was resumed on another connection, the changes
  since then arrive as a single revision;
- requests that are executed in order, and replies in that order; an :class:`Unwatch` takes effect for
  everything that the store does afterwards. Requests whose replies were lost with a connection may be
  executed again, in order. The caller must tolerate that, and must tolerate a request that is rejected
  because it was already executed;
- leases that outlast the session: the store ends a lease only after the session has reported its loss, and
  slightly later;
- :class:`ConnectionLost` as the last event of a session, whatever ended it.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticrs.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, TypeAlias

    class Entry(Protocol):
        """A key with its value, or a change of a key."""

        @property
        def key(self) -> str: ...
        @property
        def value(self) -> bytes | None:
            """The value; ``None`` in a change that deleted the key."""

        @property
        def create_revision(self) -> int:
            """The revision that made the key."""

        @property
        def mod_revision(self) -> int:
            """The revision of the last put of the key, or of its deletion."""

    Result: TypeAlias = "int | Entry | Sequence[Entry] | None"

    class Session(Protocol):
        """A connection to a store, and a lease that ends with the session."""

        @property
        def fd(self) -> int:
            """Readable while :meth:`take` has something."""

        def take(self) -> list[StoreEvent]:
            """Return the events since the last call; never blocks. The first event is :class:`Connected` or a
            loss.
            """

        def wait(self, timeout: float | None) -> bool:
            """Block until :meth:`take` has something to return. Return false if the time is over or nothing
            can arrive anymore.
            """

        def send(self, request: Request) -> None:
            """Send a request. The store executes requests in order."""

        def clock(self) -> tuple[int, int] | None:
            """Return the store's wall clock minus ours, and the error of that difference, in nanoseconds;
            ``None`` if they are still unknown.
            """

        def close(self) -> None:
            """Close the session and end its lease at once. No event follows. Idempotent."""


MAX_OPERATIONS = 125
"""Maximum number of compares, and of operations, in a transaction of the rendezvous. The default limit of
etcd is 128, of which its client needs three.
"""


# --- what a transaction is made of ---


class Compare(Value):
    """A condition on a key."""

    key: str


class Exists(Compare):
    """The key is there."""


class Missing(Compare):
    """The key is not there."""


class CreatedAt(Compare):
    """The key was created at this revision; 0 if the key does not exist."""

    revision: int


class ModifiedAt(Compare):
    """The key was last put at this revision; 0 if the key does not exist."""

    revision: int


class HasValue(Compare):
    """The key is there with this value."""

    value: bytes


class Operation(Value):
    """An operation of a transaction. Its result is in the :class:`Reply`."""


class Put(Operation):
    """Set a key; the result is 1.

    With ``leased``, the key is deleted when this session ends.
    """

    key: str
    value: bytes
    leased: bool


class Delete(Operation):
    """Delete a key; the result is 1, or 0 when it was not there."""

    key: str


class DeletePrefix(Operation):
    """Delete all keys with this prefix. The result is the number of deleted keys."""

    prefix: str


class Get(Operation):
    """Read a key; the result is an entry, or ``None``."""

    key: str


class Range(Operation):
    """Read the first keys with this prefix, at most ``limit`` (0 for all). The result is a list of
    entries.
    """

    prefix: str
    limit: int


class Predecessor(Operation):
    """Read the newest key with this prefix that is older than ``key``. The result is that of :class:`Get`."""

    prefix: str
    key: str


# --- requests ---


class Txn(Value):
    """A transaction. The store answers with a :class:`Reply` with the same tag.

    ``then`` is executed if all compares hold, ``otherwise`` if any compare does not.
    """

    tag: int
    compares: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


class Watch(Value):
    """Watch keys for changes. The store answers with a :class:`Reply`, followed by :class:`Changes`.

    Args:
        tag: number that identifies the request.
        prefix: prefix of the keys.
        exact: true if ``prefix`` is a complete key.
        snapshot: true if the reply contains the existing entries at its revision. The watch then continues
            after that revision.
    """

    tag: int
    prefix: str
    exact: bool
    snapshot: bool = True


class Unwatch(Value):
    """End a watch."""

    prefix: str
    exact: bool


# --- events ---


class Connected(Value):
    """The session has begun.

    Args:
        revision: revision of the store.
        local_address: our end of the connection.
        ttl: seconds without a keep-alive after which the store ends the lease; 0 if it is the requested time.
    """

    revision: int
    local_address: str
    ttl: float = 0.0


class Reply(Value):
    """The answer to a request.

    Args:
        tag: tag of the request.
        ok: true if the compares held, so that ``then`` was executed.
        revision: revision of the store when it evaluated the request.
        results: results of the operations; for a watch, the entries.
    """

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
        """Return the existing entries at the start of a watch."""
        return [entry for index in range(len(self.results)) if (entry := self.entry(index)) is not None]


class Changes(Value):
    """Changes of one revision, in the order of the transaction. An event covers either one watch or all
    watches of the session.
    """

    revision: int
    changes: Sequence[Entry]


class Notice(Value):
    """A line for the user: the store does not answer, or answers again. The session itself has not
    changed.
    """

    message: str


class ConnectionLost(Value):
    """The session could not be opened or was lost. No further event of this session follows.

    Args:
        kind: ``refused``, ``unreachable``, ``timeout``, ``resolve``, ``version``, ``token``, ``not_ours``,
            ``run``, ``closed``, ``silent``, ``slow``, ``protocol``, ``limit``, ``gone`` or ``other``. With
            etcd also ``tls`` and ``denied``, with the rendezvous also ``cannot_host``.
        message: one line for the user.
    """

    kind: str
    message: str


if TYPE_CHECKING:
    Request: TypeAlias = Txn | Watch | Unwatch
    StoreEvent: TypeAlias = Connected | Reply | Changes | Notice | ConnectionLost
