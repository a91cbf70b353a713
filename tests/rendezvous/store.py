"""A simulated coordination store: revisions, transactions, leases, watches; each client's events wait to be
delivered, replies and changes apart, those of an etcd's watches apart from each other, too."""

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


def is_one_change_per_key(operations):
    """No key is put twice, or put and deleted."""
    put = [op.key for op in operations if isinstance(op, Put)]
    deleted = [op.key for op in operations if isinstance(op, Delete)]
    under = tuple(op.prefix for op in operations if isinstance(op, DeletePrefix))
    return len({*put, *deleted}) == len(put) + len(deleted) and not any(key.startswith(under) for key in put)


def is_new(change):
    """The key was not there before."""
    return change.value is not None and change.create_revision == change.mod_revision


class Conn:
    """One connection: one session, one lease."""

    __slots__ = (
        *("dead", "is_etcd", "is_revoked", "is_stalled", "name", "open"),
        *("queues", "replies", "requests", "watches"),
    )

    def __init__(self, name, is_etcd=False):
        self.name = name
        self.is_etcd = is_etcd
        self.open = True
        """The client still has it."""
        self.dead = False
        """The store has ended the session."""
        self.is_revoked = False
        """The client has ended its lease; else that ends a while after the connection."""
        self.is_stalled = False
        """Nothing comes through for a while."""
        self.requests = []
        self.replies = []
        self.watches = {}
        """The changes that wait to be delivered, by prefix and whether that is a whole key."""
        self.queues = [] if is_etcd else [[]]
        """The same, each once, and those of watches that have ended."""

    def watch(self, *covered):
        if self.is_etcd:
            self.queues.append([])
        self.watches[covered] = self.queues[-1]

    def is_told(self, queue, key):
        """Whether changes of this key go there."""
        return any(
            told is queue and (key == prefix if is_exact else key.startswith(prefix))
            for (prefix, is_exact), told in self.watches.items()
        )

    def forget(self):
        """Nothing that waits is delivered."""
        self.open = False
        self.replies.clear()
        self.watches.clear()
        self.queues.clear()


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
        elif not conn.open:
            return
        elif isinstance(request, Unwatch):
            del conn.watches[request.prefix, request.exact]
        else:
            conn.watch(request.prefix, request.exact)
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
        assert is_one_change_per_key(request.then), "etcd refuses it"
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
        for queue in conn.queues:
            told = [change for change in changes if conn.is_told(queue, change.key)]
            if told:
                queue.append(Changes(self.revision, told))

    def resync(self, queue):
        """What waits there has been compacted: only what has become of it is told."""
        first, last = {}, {}
        for change in (change for told in queue for change in told.changes):
            first.setdefault(change.key, change)
            last[change.key] = change
        # Of a key that came and went, nobody was told.
        seen = [change for key, change in last.items() if change.value is not None or not is_new(first[key])]
        ended = [Entry(each.key, None, 0, self.revision) if each.value is None else each for each in seen]
        queue[:] = [Changes(self.revision, ended)] if ended else []

    def end_session(self, conn):
        """Its lease is over."""
        conn.dead = True
        keys = [key for key, owner in self.leases.items() if owner is conn]
        if keys:
            self.apply([Delete(key) for key in keys], None)

    def has_lease(self, conn):
        return conn in self.leases.values()
