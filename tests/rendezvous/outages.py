"""Outages of a store: broken and lost connections, and a store that dies and comes back with its state.

The lease of a session outlives its connection. The client takes the session up again, or gives it up before
its lease can end, so that nothing of its workers is left by then.
"""

from elasticrs._engine.nodes.transport.coordination import Txn


class Outages:
    """The part of a simulated world that handles connections, leases and the death of the store."""

    returns = False
    """A store that is away comes back."""

    def _outages(self, add, faults):
        store = self.store
        away = 0.5 if faults else 5
        if self.server_alive:
            if store.held:
                add((4, self.sync))
            if faults and (self.kinds["kept"] or (self.kinds["server_dies"] and not self.kinds["calm"])):
                add((0.25 if self.kinds["kept"] else 0.1, self.store_dies))
        elif self.returns:
            add((away, self.store_returns))
        for conn in store.conns:
            if self.server_alive:
                self._outages_of(conn, add)
        for proc in self.procs:
            conn = proc.conn
            if not proc.alive or conn is None or proc.paused:
                continue
            if conn.is_stalled and not proc.is_lost:
                is_over = conn.dead or not (self.server_alive or self.returns)
                if is_over or not self.kinds["calm"]:
                    add((5 if is_over else 0.1 if faults else 0.5, self.give_up, proc))
                if self.server_alive:
                    add((away, self.go_on, proc))
            elif faults and self.server_alive and not conn.dead:
                add((0.8 if self.kinds["flaky"] else 0.15, self.fault_stall, conn))

    def _outages_of(self, conn, add):
        is_through = conn.open and conn.is_here
        if conn.requests and not (conn.open and conn.is_etcd and conn.is_stalled):
            add((6 if is_through else 1.5, self.serve, conn))
        if conn.forgotten:
            add((2, self.end_of_forgotten, conn))
        if not conn.dead and self.may_end(conn):
            add((2 if conn.is_revoked or conn.is_refused else 0.5, self.expire, conn))

    # --- leases ---

    def may_end(self, conn):
        """Return true if the lease may expire. Clients give up a lease early enough that their workers are
        gone by then.
        """
        proc = conn.owner
        if conn.open:
            # An agent on a paused host does not notice that its lease expires.
            return proc.paused and conn.is_stalled and not conn.is_etcd
        return conn.is_revoked or conn.is_refused or not self.has_workers(proc, conn)

    def has_workers(self, proc, conn):
        return proc.group is not None and proc.group.conn is conn and not proc.paused

    def expire(self, conn):
        self.log.append(("expire", conn.name))
        if conn.open:
            self.checks.losses += 1
        self.store.end_session(conn)
        self.store.conns = [each for each in self.store.conns if not each.dead or each.requests or each.open]

    def has_dead_lease(self):
        """Return true if a node whose lease is about to expire is still visible to the others."""
        return any(
            not conn.open or conn.dead or (conn.is_stalled and conn.owner.paused)
            for conn in self.store.leases.values()
        )

    def sweep(self, proc):
        """Remove the workers of a killed agent."""
        proc.group = None

    def give_up(self, proc):
        """Give up the session, because its lease is about to expire."""
        self.count("given_up")
        self.checks.losses += 1
        self.lose_connection(proc, "silent")

    # --- connections ---

    def serve(self, conn):
        if not isinstance(conn.requests[0], Txn):
            self.sync()
        self.store.serve(conn)

    def fault_stall(self, conn):
        self.count("stall")
        if conn.is_etcd:
            self.log.append((conn.name, "stall"))
            conn.is_stalled = True
        else:
            self.break_off(conn)

    def break_off(self, conn):
        """Break a connection. Choose at random how much the client and the store have received."""
        told = {event.revision for queue in (*conn.queues, conn.replies) for event in queue}
        revisions = [-1, *sorted(told)]
        last = revisions[int(self.random() * len(revisions))]
        conn.lose(last, self.random() < 0.5, self.random() < 0.5)
        self.log.append((conn.name, "breaks", last))
        self.store.breaks(conn)

    def go_on(self, proc):
        """Let the agent reach the store again."""
        conn = proc.conn
        self.log.append((conn.name, "goes on"))
        if conn.is_etcd:
            conn.is_stalled = False
            if self.random() < 0.4:
                self.count("compacted")
                self.log.append((conn.name, "compacted"))
                for queue in conn.queues:
                    self.store.resync(queue)
        elif self.store.has_ended(conn):
            self.count("gone")
            self.checks.losses += 1
            self.lose_connection(proc, "gone")
        else:
            self.count("resumed")
            conn.resume()

    def end_of_forgotten(self, conn):
        """Let the store notice the end of a connection that the client has already replaced."""
        if self.store.is_current(conn, conn.forgotten.pop(0)):
            self.expire(conn)

    # --- the store ---

    def sync(self):
        self.store.sync()
        self.checks.keep()

    def store_dies(self):
        self.kill_server()
        self.returns = self.kinds["kept"] and (self.kinds["calm"] or self.random() < 0.85)

    def kill_server(self):
        if not self.server_alive:
            return
        self.server_alive = False
        self.count("server_died")
        self.log.append(("the store dies",))
        for conn in self.store.conns:
            conn.requests.clear()
            conn.forgotten.clear()
            if not conn.open or conn.is_stalled:
                continue
            if conn.is_etcd:
                conn.is_stalled = True
            else:
                self.break_off(conn)
                conn.requests.clear()
        if self.kinds["kept"]:
            self.store.die()
            self.checks.undo()

    def store_returns(self):
        self.count("server_returned")
        self.log.append(("the store returns",))
        self.server_alive = True
        for conn in list(self.store.conns):
            if not conn.dead:
                self.store.loaded(conn)
