"""The coordination store as its clients see it: what they ask, what they hear, the session for both.

A :class:`Session` is one lease. It may lose its connection and find another one, or a store that was away,
as long as the lease lasts; that is only late. Whoever writes one for another store than ours has to give:

- transactions of at most :data:`MAX_OPERATIONS` compares and as many operations, each one revision; none
  names a key twice among what it puts and deletes;
- leased keys, which end with the session, or some seconds after it; no key is put now with a lease, now
  without;
- watches of keys and prefixes, from a snapshot or a revision on: each revision whole and in order, as far as
  the watch covers it. Several watches need no order among each other, nor with replies. A session never has
  two that cover the same key, but one may be asked for again. A watch whose past the store has forgotten,
  or that was taken up on another connection, tells, as one revision, what has become of its keys;
- requests carried out in their order, and replies in that order; an :class:`Unwatch` holds for all that the
  store does from then on. Those whose answer was lost with a connection may be carried out again, in their
  order: whoever asks bears that, and a request that is refused because it has been carried out before;
- leases that last: the store ends none before the session has told of the loss, and a little longer;
- :class:`ConnectionLost` as the last event of a session, whatever ended it.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticrs._value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol, TypeAlias

    class Entry(Protocol):
        """A key and its value, or what became of it."""

        @property
        def key(self) -> str: ...
        @property
        def value(self) -> bytes | None:
            """``None`` in a change that deleted the key."""

        @property
        def create_revision(self) -> int:
            """The revision that made the key."""

        @property
        def mod_revision(self) -> int:
            """The revision of its last put, or of its deletion."""

    Result: TypeAlias = "int | Entry | Sequence[Entry] | None"

    class Session(Protocol):
        """The way to a store, and the lease that ends with it."""

        @property
        def fd(self) -> int:
            """Readable while :meth:`take` has something."""

        def take(self) -> list[StoreEvent]:
            """What has happened since the last call, first :class:`Connected` or a loss; never blocks."""

        def wait(self, timeout: float | None) -> bool:
            """Block until :meth:`take` has something; false: the time is over, or nothing can come."""

        def send(self, request: Request) -> None:
            """Send a request; requests are carried out in their order."""

        def clock(self) -> tuple[int, int] | None:
            """The store's wall clock minus ours and its error in ns; ``None`` while nothing is known."""

        def close(self) -> None:
            """End the session and its lease at once. No event follows. Idempotent."""


MAX_OPERATIONS = 125
"""Compares, and operations, of a transaction of the rendezvous: etcd takes 128 by default, of which its
client needs three.
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
    """The key came into being at this revision; 0: it is not there."""

    revision: int


class ModifiedAt(Compare):
    """The last put of the key was this revision; 0: it is not there."""

    revision: int


class HasValue(Compare):
    """The key is there with this value."""

    value: bytes


class Operation(Value):
    """A step of a transaction; its result is in the :class:`Reply`."""


class Put(Operation):
    """Set a key; the result is 1.

    With ``leased`` the key ends with this session.
    """

    key: str
    value: bytes
    leased: bool


class Delete(Operation):
    """Delete a key; the result is 1, or 0 when it was not there."""

    key: str


class DeletePrefix(Operation):
    """Delete all keys that begin like this; the result is how many they were."""

    prefix: str


class Get(Operation):
    """Read a key; the result is an entry, or ``None``."""

    key: str


class Range(Operation):
    """Read the first keys that begin like this, at most ``limit`` (0: all); the result is a list of
    entries.
    """

    prefix: str
    limit: int


class Predecessor(Operation):
    """Read the youngest of the keys that begin like this and are older than ``key``; as :class:`Get`."""

    prefix: str
    key: str


# --- requests ---


class Txn(Value):
    """A transaction; answered by a :class:`Reply` with the same tag.

    ``then`` is carried out when all of the compares hold, ``otherwise`` when one does not.
    """

    tag: int
    compares: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


class Watch(Value):
    """Be told of every change: a :class:`Reply`, then :class:`Changes`.

    Args:
        tag: any number.
        prefix: how the keys begin.
        exact: it is one whole key.
        snapshot: the reply has what is there at its revision; the watch goes on right after it.
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
        revision: of the store.
        local_address: our end of the connection.
        ttl: seconds without a sign of life after which the store ends the lease; 0: as was asked for.
    """

    revision: int
    local_address: str
    ttl: float = 0.0


class Reply(Value):
    """The answer to a request.

    Args:
        tag: of the request.
        ok: the compares held, so ``then`` was carried out.
        revision: the store's when it judged.
        results: one for each operation; for a watch, the entries.
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
        """Return what was there when a watch began."""
        return [entry for index in range(len(self.results)) if (entry := self.entry(index)) is not None]


class Changes(Value):
    """One revision of the store, as far as one watch covers it, or all of this session together, in the order
    of the transaction.
    """

    revision: int
    changes: Sequence[Entry]


class Notice(Value):
    """The store does not answer, or answers again: a line for the user, and nothing that has happened to the
    session.
    """

    message: str


class ConnectionLost(Value):
    """There is no session, or no longer; nothing of it is told after this event.

    Args:
        kind: ``refused``, ``unreachable``, ``timeout``, ``resolve``, ``version``, ``token``, ``not_ours``,
            ``run``, ``closed``, ``silent``, ``slow``, ``protocol``, ``limit``, ``gone`` or ``other``; of etcd
            also ``tls`` and ``denied``, of the rendezvous ``cannot_host``.
        message: one line for the user.
    """

    kind: str
    message: str


if TYPE_CHECKING:
    Request: TypeAlias = Txn | Watch | Unwatch
    StoreEvent: TypeAlias = Connected | Reply | Changes | Notice | ConnectionLost
