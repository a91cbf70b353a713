"""The leader's view: its local copy of all keys of the job in the store. The time to apply the change of one
key does not depend on the number of agents.

- **VIEW-1** The view contains every key of the job as of :attr:`View.revision`.
- **VIEW-2** The derived sets (:attr:`View.slow`, :attr:`View.candidates`, …) always match their definitions.
  Each change updates them for the affected members; they are recomputed from scratch only for a new round.
- **VIEW-3** If a record in the store is damaged, the view keeps what it knew before. Damage never makes a
  member with workers look idle, finished or lost.
"""

from __future__ import annotations

from elasticrs._engine.job.phrases import distinct_names
from elasticrs._engine.nodes.protocol.records import (
    DamagedError,
    Head,
    Node,
    Slot,
    agent_of,
    check_done,
    damage,
    incarnation_of,
    is_member,
    number_of,
    table_of,
    text_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticrs._engine.nodes.protocol.records import Keys, Seat
    from elasticrs._engine.nodes.transport.coordination import Entry

MAX_DAMAGED = 8
"""Maximum number of damaged keys that are reported to the user."""

UNREADABLE = Node("?", "", "", "", 0, 0)
"""Placeholder for a registration that was damaged from the start. Its node may have workers."""


class View:
    """The leader's view of the store. A *member* is one registration of an agent. The *head* is the state of
    the job, and names the current round.

    Attributes:
        joined: create revisions of the registrations, by member.
        slots: round of each member's last slot (the ranks that it got); ``None`` if the slot is damaged.
        seats, rank_of: members of the current round by group rank, and group ranks by member.
        absent: group ranks whose registration no longer exists.
        missing: those of ``absent`` whose workers had not finished.
        slow: registered members of the current round that may still have workers.
        candidates: members that could take part in the next round: the latest registration of each agent that
            is neither leaving nor excluded, and has no workers.
        waiting: candidates that are not members of the current round.
        causes: members that report a failure on their node, or that their node is unfit.
        refusal: why another node was last refused since the current round started.
    """

    def __init__(self, keys: Keys, revision: int, entries: Iterable[Entry]) -> None:
        self._keys = keys
        self._agents: dict[str, list[int]] = {}
        self._dones: set[tuple[int, int]] = set()
        self._evidences: dict[tuple[int, int], bytes] = {}
        self._tables: dict[str, dict[int, list[Seat]]] = {}
        self.revision = revision
        self.head: Head | None = None
        self.head_revision = 0
        self.nodes: dict[str, Node] = {}
        self.joined: dict[str, int] = {}
        self.slots: dict[str, int | None] = {}
        self.seats: list[Seat] = []
        self.rank_of: dict[str, int] = {}
        self.done: set[int] = set()
        self.absent: set[int] = set()
        self.missing: set[int] = set()
        self.slow: set[str] = set()
        self.candidates: set[str] = set()
        self.waiting: set[str] = set()
        self.farewells: set[str] = set()
        self.causes: set[str] = set()
        self.refusal: str | None = None
        self.damaged: dict[str, str] = {}
        for entry in entries:
            self._take(entry)
        self._new_round()

    @property
    def round(self) -> int:
        return self.head.round if self.head else 0

    @property
    def _excluded_agent(self) -> str | None:
        return None if self.head is None else self.head.excluded_agent

    @property
    def forms(self) -> list[str]:
        return list(self._tables)

    def apply(self, revision: int, changes: Iterable[Entry]) -> None:
        before = self.round, self.head.form if self.head else ""
        touched = [member for change in changes for member in self._take(change)]
        self.revision = revision
        if (self.round, self.head.form if self.head else "") != before:
            self._new_round()
            return
        for member in touched:
            self._refresh(member)

    def evidence_of(self, group_rank: int) -> bytes | None:
        return self._evidences.get((self.round, group_rank))

    @property
    def has_evidence(self) -> bool:
        return any(number == self.round for number, _ in self._evidences)

    def holds(self, member: str) -> bool:
        """Return true if a member may have workers: since the round for which it last got ranks (its slot),
        it has not reported that none are left. The member's own slot decides, because the current round may
        have been formed without this member.
        """
        given = self.slots.get(member, 0)
        if given is None:
            given = self.round
        return 0 < given <= self.round and self.nodes[member].idle < given

    def is_excluded(self, member: str) -> bool:
        return bool(self.nodes[member].serves_only) or agent_of(member) == self._excluded_agent

    # --- reading keys ---

    def _take(self, entry: Entry) -> Iterable[str]:
        """Apply the change of one key. Return the members whose derived state may be affected."""
        kind, _, name = entry.key[len(self._keys.prefix) :].partition("/")
        try:
            if kind == "nodes" and is_member(name):
                return self._take_node(name, entry)
            if kind == "slot":
                self._take_slot(name, entry)
            elif kind == "evidence" and (key := _round_and_rank(name)) is not None:
                if entry.value is None:
                    self._evidences.pop(key, None)
                else:
                    self._evidences[key] = entry.value
            elif kind == "head":
                return self._take_head(entry)
            elif kind == "table":
                self._take_table(name, entry)
            elif kind == "done" and (key := _round_and_rank(name)) is not None:
                self._take_done(key, entry)
            elif kind == "refused":
                self.refusal = None if entry.value is None else text_of(entry.value)
            elif kind == "left":
                (self.farewells.discard if entry.value is None else self.farewells.add)(name)
        except DamagedError as error:
            self._note(entry, error)
        return (name,) if kind in ("slot", "left") else ()

    def _note(self, entry: Entry, error: DamagedError) -> None:
        if len(self.damaged) < MAX_DAMAGED:
            self.damaged.setdefault(entry.key, damage(entry.key, error))

    def _take_head(self, entry: Entry) -> Iterable[str]:
        before = self._excluded_agent
        self.head = None if entry.value is None else Head.read(entry)
        self.head_revision = entry.mod_revision
        agents = () if self._excluded_agent == before else (before, self._excluded_agent)
        return [f"{agent}/{each}" for agent in agents if agent for each in self._agents.get(agent, ())]

    def _take_slot(self, member: str, entry: Entry) -> None:
        self.slots.pop(member, None)
        if entry.value is not None:
            self.slots[member] = None  # The slot counts as damaged until it is decoded.
            self.slots[member] = Slot.decode(entry.value).round

    def _node(self, member: str, entry: Entry) -> Node:
        try:
            return Node.decode(entry.value or b"")
        except DamagedError as error:
            self._note(entry, error)
            return self.nodes.get(member, UNREADABLE)

    def _take_node(self, member: str, entry: Entry) -> Iterable[str]:
        siblings = self._agents.setdefault(agent_of(member), [])
        incarnation = incarnation_of(member)
        if entry.value is None:
            self.nodes.pop(member, None)
            self.joined.pop(member, None)
            self.causes.discard(member)
            if incarnation in siblings:
                siblings.remove(incarnation)
            if not siblings:
                del self._agents[agent_of(member)]
        else:
            self.nodes[member] = node = self._node(member, entry)
            has_reported = node.cause is not None or node.unfit is not None
            (self.causes.add if has_reported else self.causes.discard)(member)
            self.joined[member] = entry.create_revision
            if incarnation not in siblings:
                siblings.append(incarnation)
        if len(siblings) > 1 or (siblings and entry.value is None):
            return [f"{agent_of(member)}/{each}" for each in {*siblings, incarnation}]
        return (member,)

    def _take_table(self, name: str, entry: Entry) -> None:
        form, _, part = name.rpartition("/")
        index = number_of(part)
        if index is None:
            return
        chunks = self._tables.setdefault(form, {})
        if entry.value is None:
            chunks.pop(index, None)
            if not chunks:
                del self._tables[form]
        elif index not in chunks:
            # Read each part of a table only once, because a leader never changes a part after writing it.
            chunks[index] = table_of(entry.value)

    def _take_done(self, key: tuple[int, int], entry: Entry) -> None:
        if entry.value is not None and key not in self._dones:
            check_done(entry.value)
        (self._dones.discard if entry.value is None else self._dones.add)(key)
        number, rank = key
        if number != self.round or rank >= len(self.seats):
            return
        if entry.value is not None:
            self.done.add(rank)
            self.missing.discard(rank)
        else:
            self.done.discard(rank)
            self.missing |= self.absent & {rank}

    def seat_names(self, ranks: Iterable[int]) -> list[str]:
        """Return the names by which users choose these nodes, given by their group ranks in this round."""
        names = distinct_names({rank: seat.name for rank, seat in enumerate(self.seats)})
        return [names[rank] for rank in ranks]

    # --- derived sets ---

    def _new_round(self) -> None:
        number, form = self.round, self.head.form if self.head else ""
        chunks = self._tables.get(form, {})
        self.seats = [seat for index in sorted(chunks) for seat in chunks[index]]
        self.rank_of = {seat.member: rank for rank, seat in enumerate(self.seats)}
        self.done = {rank for round_, rank in self._dones if round_ == number and rank < len(self.seats)}
        for derived in (self.absent, self.missing, self.slow, self.candidates, self.waiting):
            derived.clear()
        for member in (*self.nodes, *self.rank_of):
            self._refresh(member)

    def _refresh(self, member: str) -> None:
        rank = self.rank_of.get(member)
        if member not in self.nodes:
            self.slow.discard(member)
            self.candidates.discard(member)
            self.waiting.discard(member)
            if rank is not None:
                self.absent.add(rank)
                if rank not in self.done:
                    self.missing.add(rank)
            return
        holds = self.holds(member)
        if rank is not None:
            self.absent.discard(rank)
            self.missing.discard(rank)
            (self.slow.add if holds else self.slow.discard)(member)
        siblings = self._agents[agent_of(member)]
        latest = len(siblings) == 1 or max(siblings) == incarnation_of(member)
        is_known = self.nodes[member] is not UNREADABLE
        stays = member not in self.farewells and not self.is_excluded(member)
        fit = not holds and latest and is_known and stays
        (self.candidates.add if fit else self.candidates.discard)(member)
        (self.waiting.add if fit and rank is None else self.waiting.discard)(member)


def _round_and_rank(name: str) -> tuple[int, int] | None:
    number, _, rank = name.partition("/")
    key = number_of(number), number_of(rank)
    return None if key[0] is None or key[1] is None else (key[0], key[1])
