"""A simulated coordination store with revisions, transactions, leases and watches. Events for a client are
queued, replies and changes separately. In a simulated etcd, each watch has a queue.

A session outlives its connection. One of our own store is taken up again by its client: the watches from a
fresh look at what is there, then every request whose answer has not come, once more. A store that keeps its
state may die: what it has not written to disk is lost, and nobody was told of it.
"""

from __future__ import annotations

from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.transport.coordination import (
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
    Watch,
)


class Entry(Value):
    """A key of the store, or its deletion if ``value`` is ``None``."""

    key: str
    value: bytes | None
    create_revision: int
    mod_revision: int


def is_one_change_per_key(operations):
    """Return true if no key is put twice, or both put and deleted."""
    put = [op.key for op in operations if isinstance(op, Put)]
    deleted = [op.key for op in operations if isinstance(op, Delete)]
    under = tuple(op.prefix for op in operations if isinstance(op, DeletePrefix))
    return len({*put, *deleted}) == len(put) + len(deleted) and not any(key.startswith(under) for key in put)


def is_new(change):
    """Return true if this change created the key."""
    return change.value is not None and change.create_revision == change.mod_revision


class TakeUp(Value):
    """Request with which a client resumes a watch on a new connection."""

    prefix: str
    exact: bool


class Conn:
    """A session with its lease and, if it is connected, its connection."""

    def __init__(self, name, is_etcd=False, owner=None):
        self.name = name
        self.owner = owner
        self.is_etcd = is_etcd
        self.open = True
        """The client still has the session."""
        self.dead = False
        """The store has ended it."""
        self.is_revoked = False
        """The client has ended its lease; else that ends a while after the client has given it up."""
        self.is_refused = False
        """The store has refused to go on: it ends the lease whatever still runs."""
        self.is_stalled = False
        """Nothing comes through for a while."""
        self.connection = 0
        """Its number."""
        self.forgotten = []
        """Earlier sessions whose end the store has not seen."""
        self.requests = []
        """On the way to the store."""
        self.sent = []
        """Requests whose answer the client does not have."""
        self.replies = []
        self.watches = {}
        """The changes that wait to be delivered, by prefix and whether that is a whole key."""
        self.queues = [] if is_etcd else [[]]
        """The same, each once, and those of watches that have ended."""
        self.known = {}
        """By watch: the modify revisions that the client knows of, by key."""
        self.heard = []
        self.has = -1, False

    def send(self, request):
        if self.is_here:
            self.requests.append(request)
        if not self.is_etcd:
            self.sent.append(request)
        if isinstance(request, Unwatch):
            self.known.pop((request.prefix, request.exact), None)

    @property
    def is_here(self):
        """True if the client is connected. A client of etcd always seems to be, because it does not report an
        outage.
        """
        return self.is_etcd or not self.is_stalled

    def watch(self, *covered):
        if self.is_etcd:
            self.queues.append([])
        self.watches[covered] = self.queues[-1]

    def is_told(self, queue, key):
        """Return true if changes of this key go to this queue."""
        return any(told is queue and covers(watch, key) for watch, told in self.watches.items())

    def forget(self):
        """Close the session, and drop all events that are still to be delivered."""
        self.open = False
        self.replies.clear()
        self.watches.clear()
        self.queues.clear()

    # --- client side ---

    def received(self, event):
        """Handle an event that the client received."""
        if self.is_etcd:
            return
        if isinstance(event, Changes):
            self.heard.append(event)
            for watch, known in self.known.items():
                learn(watch, known, event)
            return
        place = next((i for i, each in enumerate(self.sent) if getattr(each, "tag", None) == event.tag), None)
        if place is None:
            return
        # Requests are answered in order, so all requests before this one are done.
        request = self.sent[place]
        del self.sent[: place + 1]
        if isinstance(request, Watch) and Unwatch(request.prefix, request.exact) not in self.sent:
            watch = request.prefix, request.exact
            known = self.known[watch] = {entry.key: entry.mod_revision for entry in event.entries()}
            for later in self.heard:
                # In the simulation, a reply can arrive after later changes.
                if later.revision > event.revision:
                    learn(watch, known, later)

    def lose(self, last, has_reply, are_carried_out):
        """Simulate a lost connection.

        Args:
            last: the revision up to which the client has been told everything.
            has_reply: also of the answers at that revision.
            are_carried_out: requests that are on the way still get there.
        """
        # The client keeps the events that it received on an earlier connection.
        self.has = max(self.has, (last, has_reply))
        last, has_reply = self.has
        self.is_stalled = True
        self.connection += 1
        self.watches.clear()
        (queue,) = self.queues
        queue[:] = [each for each in queue if each.revision <= last]
        self.replies[:] = [each for each in self.replies if each.revision < last + has_reply]
        for each in self.replies:
            self.received(each)
        if not are_carried_out:
            self.requests.clear()

    def resume(self):
        """Reconnect. The client resumes its watches, and repeats the requests that have no reply yet."""
        self.is_stalled = False
        self.forgotten.append(self.connection - 1)
        self.requests = [*(TakeUp(*watch) for watch in self.known), *self.sent]

    def news(self, watch, found, revision):
        """Return the changes that bring the client's view of the watch to this revision."""
        known = dict(self.known[watch])
        for event in self.queues[0]:
            learn(watch, known, event)
        here = {entry.key for entry in found}
        gone = [Entry(key, None, 0, revision) for key in known if key not in here]
        return [*(each for each in found if known.get(each.key) != each.mod_revision), *gone]


def learn(watch, known, event):
    for change in event.changes:
        if covers(watch, change.key):
            known[change.key] = change.mod_revision
        if change.value is None:
            known.pop(change.key, None)


def covers(watch, key):
    prefix, is_exact = watch
    return key == prefix if is_exact else key.startswith(prefix)


class Store:
    """The state of the store. ``on_put`` is called before each put, and ``on_end`` when a session ends.

    With ``is_kept``, whatever it would tell waits until it is on disk.
    """

    def __init__(self, on_put, on_end=lambda _: None, is_kept=False):
        self.revision = 0
        self.entries = {}
        self.leases = {}
        self.conns = []
        self.on_put, self.on_end = on_put, on_end
        self.is_kept = is_kept
        self.held = []
        """What nobody has been told yet: what tells it, and with what."""
        self.ended = []
        """Sessions that have ended, which is not on disk."""
        self.on_disk = 0, {}, {}

    def get(self, key):
        return self.entries.get(key)

    def under(self, prefix):
        return [entry for key, entry in self.entries.items() if key.startswith(prefix)]

    def serve(self, conn):
        """Handle the oldest request of a connection."""
        request = conn.requests.pop(0)
        if isinstance(request, Txn):
            self._txn(conn, request)
        elif not conn.open or not conn.is_here:
            return
        elif isinstance(request, Unwatch):
            conn.watches.pop((request.prefix, request.exact), None)
        elif isinstance(request, TakeUp):
            self._take_up(conn, (request.prefix, request.exact))
        else:
            conn.watch(request.prefix, request.exact)
            self._reply(conn, conn.connection, Reply(request.tag, True, self.revision, self._found(request)))

    def _found(self, watch):
        found = [self.get(watch.prefix)] if watch.exact else self.under(watch.prefix)
        return [each for each in found if each is not None]

    def _take_up(self, conn, watch):
        if watch not in conn.known:
            return
        conn.watch(*watch)
        found = [each for key, each in self.entries.items() if covers(watch, key)]
        news = conn.news(watch, found, self.revision)
        if news and self.tells_news():
            conn.queues[0].append(Changes(self.revision, news))

    def tells_news(self):
        """Return true, because a client that resumes a watch receives the changes that it missed."""
        return True

    def _reply(self, conn, connection, reply):
        if conn.open and conn.is_here and conn.connection == connection:
            conn.replies.append(reply)

    # --- the disk ---

    def tell(self, what, *of):
        """Call ``what`` with these arguments once the state is on disk, because it notifies a client."""
        self.held.append((what, of))
        if not self.waits_for_disk():
            self.sync(is_on_disk=not self.is_kept)

    def waits_for_disk(self):
        return self.is_kept

    def sync(self, is_on_disk=True):
        """Write the state to disk, and send all notifications that were waiting for that."""
        held, self.held = self.held, []
        if is_on_disk and self.is_kept:
            self.ended = []
            self.on_disk = self.revision, dict(self.entries), dict(self.leases)
        for what, of in held:
            what(*of)

    def die(self):
        """Crash: drop everything that is not on disk."""
        self.held = []
        self.revision, entries, leases = self.on_disk
        self.entries, self.leases = dict(entries), dict(leases)
        for conn in self.ended:
            conn.dead = False
            if conn not in self.conns:
                self.conns.append(conn)
        self.ended = []

    # --- transactions ---

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
        connection = conn.connection if conn.is_here else None
        results = self.apply(ops, conn)
        self.tell(self._reply, conn, connection, Reply(request.tag, ok, self.revision, results))

    def apply(self, ops, conn):
        """Apply these operations as one revision."""
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
            self.tell(self._tell_all, revision, changes)
        return results

    def _predecessor(self, prefix, key):
        own = self.entries[key].create_revision
        before = [each for each in self.under(prefix) if each.create_revision < own]
        return max(before, key=lambda each: each.create_revision, default=None)

    def _tell_all(self, revision, changes):
        for conn in self.conns:
            for queue in conn.queues:
                told = [change for change in changes if conn.is_told(queue, change.key)]
                if told:
                    queue.append(Changes(revision, told))

    def resync(self, queue):
        """Replace the pending changes, which were compacted, by the last change of each key."""
        first, last = {}, {}
        for change in (change for told in queue for change in told.changes):
            first.setdefault(change.key, change)
            last[change.key] = change
        # No client was notified of a key that came and went.
        seen = [change for key, change in last.items() if change.value is not None or not is_new(first[key])]
        ended = [Entry(each.key, None, 0, self.revision) if each.value is None else each for each in seen]
        queue[:] = [Changes(self.revision, ended)] if ended else []

    def end_session(self, conn):
        """Expire the session's lease."""
        self.on_end(conn)
        conn.dead = True
        if self.is_kept:
            self.ended.append(conn)
        keys = [key for key, owner in self.leases.items() if owner is conn]
        if keys:
            self.apply([Delete(key) for key in keys], None)

    def is_current(self, conn, connection):
        """Return true if the session ends with this connection, because no newer connection has
        replaced it.
        """
        return connection == conn.connection

    def breaks(self, conn):
        """Do nothing: a session does not end with its connection."""

    def has_ended(self, conn):
        """Return true if the session that the client wants to resume has ended."""
        return conn.dead

    def loaded(self, conn):
        """Called for each session when the store has restarted. The session's lease starts anew."""
