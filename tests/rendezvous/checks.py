"""Invariants that every schedule must keep, numbered as in ``docs/design/rendezvous.md``."""

from elasticrs._engine.nodes.protocol.machine import Phase
from elasticrs._engine.nodes.protocol.records import (
    MAX_HEAD,
    Head,
    Keys,
    Node,
    Slot,
    agent_of,
    decode,
    time_of,
)

from . import agents

KEYS = Keys("job")

COMMAND, OTHER_COMMAND = agents.command("train.py", "--lr=1"), agents.command("train.py", "--lr=2")
"""Command of most agents, and the command of agents that belong to another job."""


class ViolationError(Exception):
    """Raised when an invariant is violated."""


def require(holds, *what):
    if not holds:
        raise ViolationError(*what)


class Checks:
    """Checks the invariants at every write, worker start and exit."""

    def __init__(self, world):
        self.world = world
        self.head = None
        self.entry = None
        self.writer = None
        self.rounds = {}
        self.tables = {}
        self.restarts = {}
        self.finished_ranks = set()
        self.never_started = set()
        self.recorded = set()
        self.asked = False
        self.failures = {}
        self.losses = 0
        self.lossy = 0
        self.was_aborted = False
        self.excluded = set()
        self.keep()

    def keep(self):
        """Save the current state, because the store has written everything to disk."""
        self.kept = self.head, self.entry, self.writer, dict(self.rounds), set(self.recorded), self.lossy

    def undo(self):
        """Return to the saved state, because the store has lost the later writes."""
        self.head, self.entry, self.writer, rounds, recorded, self.lossy = self.kept
        self.rounds, self.recorded = dict(rounds), set(recorded)

    # --- writes ---

    def ended(self, conn):
        world = self.world
        still = not conn.is_refused and not conn.is_revoked and world.has_workers(conn.owner, conn)
        require(not still, "I-13 workers run on after their node was counted as lost", conn.name)

    def put(self, old, entry, conn):
        if entry.key.startswith(KEYS.dones):
            number, rank = entry.key[len(KEYS.dones) :].split("/")
            self.recorded.add((int(number), int(rank)))
        if entry.key != KEYS.head:
            return
        require(len(entry.value) <= MAX_HEAD, "a long head")
        head = Head.decode(entry.value)
        self.writer = next(
            (each for each in self.world.procs if conn is not None and each.conn is conn), None
        )
        before = None if old is None else self.head
        self.world.count(f"{head.state} {head.outcome or (head.end or {}).get('kind')}")
        getattr(self, "_" + head.state.lower())(before, head)
        self.head, self.entry = head, entry

    def _table(self, form):
        chunks = sorted(
            self.world.store.under(KEYS.table(form)), key=lambda each: int(each.key.split("/")[-1])
        )
        return [line[0] for chunk in chunks for line in decode(chunk.value)]

    def _running(self, before, head):
        config = self.world.config
        if before is not None:
            require(before.excluded_agent not in map(agent_of, self._table(head.form)), "I-15 excluded", head)
        require(before is None or before.state == "ENDED", "I-1 a round after", before)
        require(head.round == (before.round if before else 0) + 1, "I-1 the number of a round", head)
        table = self._table(head.form)
        self.rounds[head.round] = table
        agents = [agent_of(each) for each in table]
        require(len(set(agents)) == len(table) == head.size, "I-3 an agent twice", table)
        require(config["min_nodes"] <= len(table) <= config["max_nodes"], "I-3 the size of a round", table)
        for rank, member in enumerate(table):
            entry = self.world.store.get(KEYS.slot(member))
            if entry is None:
                require(
                    self.world.store.get(KEYS.node(member)) is None, "I-3 a member without a slot", member
                )
                continue
            slot = Slot.decode(entry.value)
            require(
                (slot.round, slot.form, slot.group_rank) == (head.round, head.form, rank), "I-3 slot", slot
            )
        if before is not None and before.is_judged:
            require(head.used == before.used, "I-5 a failure was charged twice", head)
        else:
            self._charge(before, head)
        if before is not None:
            self._places(self.rounds[before.round], agents)
        self.world.count("rounds")

    def _charge(self, before, head):
        """Check that the leader has charged the end of a round to the restart budget correctly."""
        used = before.used if before else 0
        require(head.used - used in (0, 1), "I-5 the budget's step", head)
        require(head.used <= self._max_restarts(), "I-5 the budget is overspent", head)
        if before is not None and before.end["kind"] == "failure" and head.used == used:
            require(self._is_explained(before.round), "I-5 a failure was free without a loss", before)
        if head.used > used:
            require(before.end["kind"] == "failure", "I-5 charged for", before.end)
            require(not before.cause["induced"], "I-5 the loss of a node was charged", before)
        if before is not None:
            self._verdict(before, head)

    def _places(self, last, agents):
        stay = [agent_of(each) for each in last if agent_of(each) in agents]
        require(
            [each for each in agents if each in stay] == stay,
            "I-3 survivors change their order",
            last,
            agents,
        )

    def _verdict(self, ended, judged):
        if ended.end["kind"] == "failure" or judged.used > ended.used:
            self._first_cause(ended, judged)
        if ended.end["kind"] == "lost" or (ended.end["kind"] == "failure" and judged.used == ended.used):
            self.lossy += 1

    def _is_explained(self, number):
        """Return true if a member was lost or is leaving, so that the failure need not cost a restart."""
        for rank, member in enumerate(self.rounds[number]):
            is_here = self.world.store.get(KEYS.node(member)) is not None
            if not is_here and (rank == 0 or (number, rank) not in self.done()):
                return True
            if self.world.store.get(KEYS.farewell(member)) is not None:
                return True
        return False

    def _first_cause(self, ended, judged):
        """Check that the leader knew of no earlier failure than the one that it blamed."""
        leader = self.writer.member.leader if self.writer is not None else None
        if leader is None:
            return
        known = time_of(judged.cause)
        for name, cause in self.failures.get(ended.round, {}).items():
            for entry in self.world.store.under(KEYS.node(f"{int(name[1:]):02x}/")):
                node = Node.decode(entry.value)
                if entry.mod_revision > leader.sent_at:
                    continue
                if entry.key[len(KEYS.nodes) :] in self.rounds[ended.round] and node.idle == ended.round:
                    require(known is not None and known <= cause["time_ns"], "I-8 first cause", cause, judged)

    def _ended(self, before, head):
        if head.is_judged:
            require(before.state == "ENDED" and not before.is_judged, "I-1 evaluated after", before)
            require((before.round, before.form) == (head.round, head.form), "I-2 one content per round", head)
            self._charge(before, head)
            self._exclusion(before, head)
            return
        require(before is not None and before.state == "RUNNING", "I-1 the end of", before)
        require((before.round, before.form) == (head.round, head.form), "I-2 one content per round", head)
        require(head.used == before.used, "I-5 an end changes the budget", head)
        is_for_nothing = self.world.kinds["calm"] and head.end["kind"] not in ("scale", "asked")
        require(not is_for_nothing, "I-14 a round ends though the store was only away", head)
        end = head.end
        if end["kind"] in ("lost", "left"):
            rank = self.rounds[head.round].index(end["member"])
            require((head.round, rank) not in self.done(), "I-6 a finished member counts as lost", head)
        if end["kind"] == "lost":
            require(self.world.store.get(KEYS.node(end["member"])) is None, "I-6 lost, but here", head)
        if end["kind"] == "asked":
            require(self.asked, "asked for by nobody", head)
        if end["kind"] == "scale":
            require(self.world.config["scale_up"], "ended for scale", head)

    def _exclusion(self, before, head):
        number = head.failures.excluded
        if head.excluded_agent is None:
            require(number == before.failures.excluded, "I-15 counted without an exclusion", head)
            return
        self.world.count("excluded")
        self.excluded.add(head.excluded_agent)
        require(
            number == before.failures.excluded + 1 <= self.world.config["max_excluded_nodes"], "I-15", head
        )
        members = [agent_of(each) for each in self.rounds[head.round]]
        require(head.excluded_agent in members, "I-15 a node that had no part in the failure", head)
        entries = self.world.store.under(KEYS.nodes)
        nodes = {agent_of(each.key[len(KEYS.nodes) :]) for each in entries}
        here = len(nodes - {head.excluded_agent})
        require(here >= self.world.config["min_nodes"], "I-15 too few nodes are left", head)

    def done(self):
        names = [each.key[len(KEYS.dones) :].split("/") for each in self.world.store.under(KEYS.dones)]
        return {(int(number), int(rank)) for number, rank in names}

    def _closed(self, before, head):
        require(before is None or before.state != "CLOSED", "I-1 closed is final", before, head)
        config = self.world.config
        if head.outcome == "succeeded":
            require(before.state == "RUNNING", "I-7 success after", before)
            ranks = range(len(self.rounds[head.round]))
            require(all((head.round, rank) in self.done() for rank in ranks), "I-7 success without all done")
            require(all((head.round, rank) in self.finished_ranks for rank in ranks), "I-7 not finished")
        elif head.outcome == "aborted":
            require(any(proc.leaving for proc in self.world.procs), "I-1 aborted by nobody")
        elif head.outcome == "failed":
            require(before.state == "ENDED" and not before.is_judged, "I-1 failed after", before)
            self._verdict(before, head)
            if "no restart is left" in head.reason:
                require(before.used == self._max_restarts(), "I-5 closed with budget left", head)
                require(not before.cause["induced"], "I-5 the job failed for the loss of a node", before)
            elif "max_node_losses" in head.reason:
                require(self.losses > config["max_node_losses"], "closed for losses", head)
            elif "in a row" in head.reason:
                require(self.lossy >= config["max_short_losses"], "closed for short rounds", head)
            elif "is unfit, and no other node" in head.reason:
                require(before.size == 1, "I-15 one unfit node of several ended the job", head)
            else:
                require(before.end["kind"] == "setup", "closed for what?", head)
        else:
            require(before is None or before.state == "ENDED", "I-1 time-out after", before)

    # --- workers ---

    def start(self, proc, action):
        require(proc.group is None, "I-4 workers are left of", proc.group and proc.group.round)
        job = decode(self.world.store.get(KEYS.job).value)
        require(
            job["max_restarts"] == proc.member.agent.policy.max_restarts, "I-11 settings differ", proc.name
        )
        command = list(proc.member.rendezvous.command.words)
        require(job["command"]["words"] == command, "I-16 another command", proc.name)
        others = [each for each in self.world.procs if each is not proc and each.group is not None]
        together = [each for each in others if each.group.round == action.round]
        commands = {each.member.rendezvous.command for each in (proc, *together)}
        require(len(commands) == 1, "I-16 two commands in one round", proc.name)
        for other in others:
            same = (other.group.round, other.group.rank) == (action.round, action.group_rank)
            require(not same, "I-3 a rank twice", proc.name, other.name)
        member = self.rounds[action.round][action.group_rank]
        require(agent_of(member) == proc.member.agent.agent, "I-3 a slot differs from the table", proc.name)
        require(action.serves_store == (action.group_rank == 0), "who serves the store")
        require(self.restarts.setdefault(action.round, action.restarts) == action.restarts, "I-2 restarts")
        place = (action.master_addr, action.master_port, action.ranks.world_size)
        require(self.tables.setdefault(action.round, place) == place, "I-2 two masters in a round")
        if self.world.kinds["static"]:
            require(action.group_rank == proc.member.rendezvous.node_rank, "I-12 not its own rank", proc.name)
            require(action.master_port == proc.member.rendezvous.master_port, "I-12 not the given port")
        elif action.serves_store:
            require(action.master_port == proc.port, "I-9 the port is not of this node's listener", proc.port)
            require(proc.port not in proc.served, "I-9 a listener serves two rounds", proc.port)

    def told(self, proc):
        """Check that a node that knows of a later round stops its workers."""
        head, group = proc.member.head, proc.group
        if head is not None and group is not None and not group.stopping:
            require(head.round <= group.round, "I-4 workers run on in a later round", proc.name, head)

    def is_member_missing(self, number):
        """Return true if workers that start now will miss a peer."""
        for rank, member in enumerate(self.rounds[number]):
            has_finished = (number, rank) in self.finished_ranks
            # Skip a node whose workers never started. Its agent reports that, and its later loss does not
            # affect the others.
            if (rank and has_finished) or (number, rank) in self.never_started:
                continue
            for proc in self.world.procs:
                if proc.member.agent.agent != agent_of(member):
                    continue
                # A signal stops running workers at once. If the node has no workers of this round, the signal
                # has no effect until the agent handles it.
                has_workers = proc.group is not None and proc.group.round == number
                is_leaving = proc.leaving if has_workers else proc.member.leaving is not None
                if not proc.alive or proc.is_lost or is_leaving or proc.member.phase is Phase.FENCED:
                    return True
                registered = proc.member.registered
                if registered is not None and registered.member != member:
                    return True
        return False

    def finished(self, group):
        self.finished_ranks.add((group.round, group.rank))

    def start_failed(self, group):
        self.never_started.add((group.round, group.rank))

    def failed(self, proc, group):
        cause = {
            "node": proc.name,
            "rank": group.rank,
            "time_ns": self.world.clock_of(proc),
            "induced": group.peer_lost,
        }
        group.failed_at = cause
        return cause

    def cause_of(self, proc, group):
        cause = group.failed_at
        if cause is not None:
            self.failures.setdefault(group.round, {})[proc.name] = cause
        return cause

    # --- exits ---

    def exit(self, proc, outcome):
        require(proc.group is None, "I-4 exit with workers", proc.name)
        head = self.head
        is_closed = head is not None and head.state == "CLOSED"
        kind = outcome.kind
        if kind == "succeeded":
            is_own = (proc.member.finished_round, proc.member.agent.agent) in {
                (number, agent_of(table[rank]))
                for number, rank in self.recorded
                for table in [self.rounds[number]]
            }
            require(is_own, "I-7 success of a node that has not finished", proc.name)
        elif kind in ("failed", "spare", "closed"):
            require(is_closed, f"I-7 {kind}, but the job goes on", proc.name)
        if kind == "failed":
            require(head.outcome == "failed", "I-7 failed", head)
            require(outcome.cause == head.cause, "I-8 nodes tell of different causes", outcome, head)
        if kind == "spare":
            require(head.outcome == "succeeded", "I-7 spare", head)
        if kind in ("left", "aborted", "stuck") and kind == "left":
            require(proc.leaving, "leaves without being asked", proc.name)
        if kind == "excluded":
            require(proc.member.agent.agent in self.excluded, "I-15 leaves, but was not excluded", proc.name)
        if kind == "refused":
            differs = self.world.is_other(proc)
            is_known = differs or self._first_was_other() or self._is_second(proc, outcome)
            is_known = is_known or self._is_beyond_the_only_node(proc)
            require(is_known, "refused without a reason", outcome)

    def _is_second(self, proc, outcome):
        """Return true if the agent was refused because another agent has or had its node rank."""
        node_rank = proc.member.rendezvous.node_rank
        others = [each.member.rendezvous.node_rank for each in self.world.procs if each is not proc]
        return outcome.message.startswith(f"node rank {node_rank} was given to two") and node_rank in others

    def _is_beyond_the_only_node(self, proc):
        """Return true if this agent can never take part, because the job has one node, and the agent of that
        node hosts the store and has created the job.
        """
        entry = self.world.store.get(KEYS.job)
        begun_by_host = entry is not None and decode(entry.value)["is_hosted"]
        return begun_by_host and self.world.config["max_nodes"] == 1 and not self.world.is_host(proc)

    def _max_restarts(self):
        """Return the job's restart limit, which is that of the first agent."""
        return decode(self.world.store.get(KEYS.job).value)["max_restarts"]

    def _first_was_other(self):
        entry = self.world.store.get(KEYS.job)
        if entry is None:
            return False
        is_other = decode(entry.value)["command"]["words"] != list(COMMAND.words)
        return is_other or self._max_restarts() != self.world.config["max_restarts"]

    # --- the end ---

    def quiescent(self):
        """Check the state of the job when only finishing workers and long timeouts are left."""
        world = self.world
        live = [proc for proc in world.procs if proc.alive]
        if not world.server_alive:
            running = [proc.name for proc in live if proc.group is not None]
            require(not running, "I-10 workers run on without the store", running)
            return
        head = self.head
        if head is not None and head.state == "CLOSED":
            require(
                not live, "I-10 agents are left after the close", [(p.name, p.member.phase) for p in live]
            )
            return
        if head is not None and head.excluded_agent is not None:
            left = [proc.name for proc in live if proc.member.agent.agent == head.excluded_agent]
            hosts = [proc.name for proc in live if proc.member.serves_only]
            require(set(left) <= set(hosts), "I-15 an excluded agent stays", left)
        fit = [proc for proc in live if not proc.leaving and not proc.member.serves_only]
        if len(fit) < world.config["min_nodes"] or self._first_was_other():
            return
        if world.kinds["static"] and len({proc.member.rendezvous.node_rank for proc in fit}) < len(fit):
            # Two agents have the same rank, so one of them waits forever.
            require(False, "I-12 two agents with one rank", self._shown(live))
        require(
            head is not None and head.state == "RUNNING", "I-10 no round with enough nodes", self._shown(live)
        )
        stale = [proc.name for proc in live if proc.group is not None and proc.group.round != head.round]
        require(not stale, "I-10 workers of a round that is over", stale)
        for rank, member in enumerate(self.rounds[head.round]):
            if (head.round, rank) in self.done():
                continue
            (proc,) = [each for each in world.procs if each.member.agent.agent == agent_of(member)]
            is_running = proc.alive and proc.group is not None and proc.group.round == head.round
            require(is_running, "I-10 a member does not run", member, self._shown(live))

    def _shown(self, procs):
        return [
            (proc.name, proc.member.phase, proc.member.link, proc.member.leader is not None) for proc in procs
        ]
