"""A simulated coordination store: revisions, transactions, leases, watches; each client's events wait to be
delivered, changes and replies apart."""

from __future__ import annotations

from elasticrs._value import Value
from elasticrs.coordination import (
    MAX_OPERATIONS,
    Changes,
    CreatedAt,
    Delete,
    DeletePrefix,
    Exists,
    Get,
    HasValue,
    Missing,
    ModifiedAt,
    Predecessor,
    Put,
    Range,
    Reply,
    Txn,
    Unwatch,
)


class Entry(Value):
    """One key of the store, or what became of it."""

    key: str
    value: bytes | None
    create_revision: int
    mod_revision: int


class Conn:
    """One connection: one session, one lease."""

    __slots__ = ("changes", "dead", "name", "open", "replies", "requests", "watches")

    def __init__(self, name):
        self.name = name
        self.open = True
        """The client still has it."""
        self.dead = False
        """The store has ended the session."""
        self.requests = []
        self.replies = []
        self.changes = []
        self.watches = []


class Store:
    """The state of the store; ``on_put`` hears of every put before it counts."""

    def __init__(self, on_put):
        self.revision = 0
        self.entries = {}
        self.leases = {}
        self.conns = []
        self.on_put = on_put

    def get(self, key):
        return self.entries.get(key)

    def under(self, prefix):
        return [entry for key, entry in self.entries.items() if key.startswith(prefix)]

    def serve(self, conn):
        """Judge the oldest request of a connection."""
        request = conn.requests.pop(0)
        if isinstance(request, Txn):
            self._txn(conn, request)
        elif isinstance(request, Unwatch):
            conn.watches.remove((request.prefix, request.exact))
        else:
            conn.watches.append((request.prefix, request.exact))
            found = [self.get(request.prefix)] if request.exact else self.under(request.prefix)
            self._reply(conn, request.tag, True, [each for each in found if each is not None])

    def _reply(self, conn, tag, ok, results):
        if conn.open:
            conn.replies.append(Reply(tag, ok, self.revision, results))

    def _holds(self, compare):
        entry = self.entries.get(compare.key)
        match compare:
            case Exists():
                return entry is not None
            case Missing():
                return entry is None
            case HasValue():
                return entry is not None and entry.value == compare.value
            case CreatedAt():
                return (0 if entry is None else entry.create_revision) == compare.revision
            case ModifiedAt():
                return (0 if entry is None else entry.mod_revision) == compare.revision

    def _txn(self, conn, request):
        for steps in (request.compares, request.then, request.otherwise):
            assert len(steps) <= MAX_OPERATIONS
        ok = all(self._holds(compare) for compare in request.compares)
        ops = request.then if ok else request.otherwise
        if conn.dead and any(isinstance(op, Put) and op.leased for op in ops):
            return
        self._reply(conn, request.tag, ok, self.apply(ops, conn))

    def apply(self, ops, conn):
        """Carry out operations as one revision."""
        revision = self.revision + 1
        changes, results = [], []
        for op in ops:
            match op:
                case Put():
                    old = self.entries.get(op.key)
                    entry = Entry(op.key, op.value, old.create_revision if old else revision, revision)
                    self.on_put(old, entry, conn)
                    self.entries[op.key] = entry
                    if op.leased:
                        self.leases[op.key] = conn
                    changes.append(entry)
                    results.append(1)
                case Delete() | DeletePrefix():
                    named = (
                        [op.key] if isinstance(op, Delete) else [each.key for each in self.under(op.prefix)]
                    )
                    gone = [key for key in named if self.entries.pop(key, None) is not None]
                    for key in gone:
                        self.leases.pop(key, None)
                        changes.append(Entry(key, None, 0, revision))
                    results.append(len(gone))
                case Get():
                    results.append(self.entries.get(op.key))
                case Range():
                    results.append(self.under(op.prefix)[: op.limit])
                case Predecessor():
                    results.append(self._predecessor(op.prefix, op.key))
        if changes:
            self.revision = revision
            for each in self.conns:
                self._tell(each, changes)
        return results

    def _predecessor(self, prefix, key):
        own = self.entries[key].create_revision
        before = [each for each in self.under(prefix) if each.create_revision < own]
        return max(before, key=lambda each: each.create_revision, default=None)

    def _tell(self, conn, changes):
        if not conn.open or not conn.watches:
            return
        seen = [
            change
            for change in changes
            if any(
                change.key == prefix if exact else change.key.startswith(prefix)
                for prefix, exact in conn.watches
            )
        ]
        if seen:
            conn.changes.append(Changes(self.revision, seen))

    def end_session(self, conn):
        """Its lease is over."""
        conn.dead = True
        keys = [key for key, owner in self.leases.items() if owner is conn]
        if keys:
            self.apply([Delete(key) for key in keys], None)

    def has_lease(self, conn):
        return conn in self.leases.values()
