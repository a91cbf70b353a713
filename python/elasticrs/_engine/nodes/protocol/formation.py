"""Tasks of the leader: end rounds, evaluate them, form new ones, and close the job.

- **LEADER-1** A leader decides only when its last write is answered and visible in its view of the store.
- **LEADER-2** Every write of a leader requires that the leader is still registered, and that the head (the
  state of the job) is unchanged (:meth:`.Leader.guards`).
- Group ranks: new nodes are sorted by order hint, then by name in natural order, then by agent. Nodes of the
  previous round keep their places and new nodes fill the gaps, so a replacement moves no other node.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from elasticrs._engine.job.phrases import counted, duration, ranks_text
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.protocol import round_outcome
from elasticrs._engine.nodes.protocol.joining import fence
from elasticrs._engine.nodes.protocol.leader_view import View
from elasticrs._engine.nodes.protocol.member import Leader, Phase, Purpose
from elasticrs._engine.nodes.protocol.messages import Announce
from elasticrs._engine.nodes.protocol.records import (
    Head,
    Slot,
    agent_of,
    encode,
    master_addr,
    workers_keys,
    workers_of,
)
from elasticrs._engine.nodes.protocol.round_outcome import MAX_NAMED, named, nodes
from elasticrs._engine.nodes.protocol.rounds import GONE
from elasticrs._engine.nodes.transport.addresses import is_loopback_name
from elasticrs._engine.nodes.transport.coordination import Delete, DeletePrefix, Missing, Put
from elasticrs._engine.workers.plan import NodeShare, node_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elasticrs._engine.nodes.protocol.member import Link, Member
    from elasticrs._engine.nodes.protocol.records import Node
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous, ThisAgent
    from elasticrs._engine.nodes.transport.coordination import Changes, Operation, Reply

MEMBERS_PER_TXN = 99
"""Number of members whose slots are written in one transaction, which then has 100 operations."""

MAX_COMPARED = 50
"""Maximum number of registrations that an exclusion requires, because a write has at most 125 conditions."""

FIRST_NEWS, LATER_NEWS = 1.0, 30.0
"""Seconds until the first message to the user that nodes are missing, and between later messages."""


MISTAKE_DELAY = 10.0
"""Seconds to wait for other machines before a message names the mistake that probably stops them."""


def slow_members(view: View) -> set[str]:
    return view.slow


def between_rounds(leader: Leader) -> None:
    member, view = leader.member, leader.view
    settings, head = member.settings, view.head
    alive: list[str] = []
    if head is not None and not head.is_judged:
        settle = settings.settle + 2 * member.more_lease + member.agent.health_timeout
        if slow_members(view) and not leader.has_passed("settle", settle):
            return
        judged = _judged(leader, head)
        alive, head = judged.alive, judged.head
        if judged.reason is not None:
            leader.close(head.replaced(outcome="failed", reason=judged.reason), alive)
            return
        if head.delay > 0 or head.note:
            # Write the verdict on the ended round before the next round starts. Then all nodes can announce
            # the restart delay, an excluded node can leave, and a new leader does not blame a node that was
            # lost only during the delay.
            if head.excluded_agent is not None:
                alive = [*alive, *_enough(view, head.excluded_agent, member.rendezvous.min_nodes)]
            leader.write([member.put_head(head)], *leader.here(alive))
            return
    if head is not None and head.delay > 0 and not leader.has_passed("delay", head.delay):
        return
    if _is_time(leader):
        _form(leader, head, alive)
        return
    _tell_of_refusal(leader)
    is_short = len(view.candidates) < member.rendezvous.min_nodes
    if is_short and leader.has_passed("join", settings.join_timeout):
        last = view.head or Head("ENDED", 0)
        leader.close(last.replaced(outcome="timeout", reason=_too_few(leader)))
    elif is_short:
        _tell_what_is_missing(leader)
    elif leader.is_news("more", view.round):
        _tell_of_more(leader)


def _enough(view: View, excluded: str, count: int) -> list[str]:
    """Return up to ``count`` members that must still be registered to give the next round enough nodes."""
    others = sorted(member for member in view.candidates if agent_of(member) != excluded)
    return others[: min(count, MAX_COMPARED)]


def _tell_what_is_missing(leader: Leader) -> None:
    member, view = leader.member, leader.view
    if leader.has_passed("waiting", FIRST_NEWS):
        _tell_of_waiting(leader)
    if leader.has_passed("mistake", MISTAKE_DELAY) and leader.is_news("mistake"):
        joined = [view.nodes[each] for each in view.candidates]
        text = likely_mistake(member.rendezvous, member.agent, joined)
        if text is not None:
            member.do(Announce(text))


def _tell_of_waiting(leader: Leader) -> None:
    member = leader.member
    leader.forget("waiting")
    leader.has_passed("waiting", LATER_NEWS)
    if leader.is_news("waiting", len(leader.view.candidates)):
        limit = member.settings.join_timeout
        member.do(Announce(f"waiting for nodes: {_who_has_joined(leader)} (join_timeout: {limit:g} s)"))


def _who_has_joined(leader: Leader) -> str:
    rendezvous, count = leader.member.rendezvous, len(leader.view.candidates)
    who = f": {_joined(leader.view, rendezvous)}" if count else ""
    return f"{count} of at least {rendezvous.min_nodes} have joined{who}"


def _joined(view: View, rendezvous: Rendezvous, most: int = MAX_NAMED) -> str:
    nodes = [view.nodes[each] for each in view.candidates]
    if rendezvous.is_static:
        return f"node {ranks_text(sorted(node.hint or 0 for node in nodes), most)}"
    return named(sorted(node.name for node in nodes), most)


def waits_for(member: Member) -> tuple[str, str] | None:
    """Return a text about what this node waits for before it starts its workers, and the name of the timer
    that limits the wait. Return ``None`` if this node does not wait: its workers run, the job has ended, or
    the node is leaving. Only the leader's text says how many nodes are missing.
    """
    joining, head, leader = member.joining, member.head, member.leader
    if member.phase is Phase.CONNECTING:
        why = f" ({joining.trouble})" if joining.trouble else ""
        timer = "store_lost" if joining.was_registered else "connect"
        return f"a connection to {member.rendezvous.store}{why}", timer
    if member.phase is not Phase.IDLE or (head is not None and head.state in ("RUNNING", "CLOSED")):
        return None
    least = member.rendezvous.min_nodes
    if leader is None:
        delay = (
            f"the restart delay of {duration(head.delay)}, then " if head is not None and head.delay else ""
        )
        return f"{delay}at least {nodes(least)}", "give_up"
    view, number = leader.view, leader.view.round
    if head is not None and not head.is_judged and view.slow:
        slow = named(sorted(view.nodes[each].shown for each in view.slow))
        return f"the end of all workers on {slow}", f"settle/{number}"
    if head is not None and leader.timers.get(f"delay/{number}") is False:
        return "the end of the restart delay", f"delay/{number}"
    count = len(view.candidates)
    if count < least:
        return f"{counted(least - count, 'more node')}; {_who_has_joined(leader)}", f"join/{number}"
    more, who = member.rendezvous.max_nodes - count, _joined(view, member.rendezvous)
    name = "last_call" if number == 0 else "restart_call"
    return f"up to {counted(more, 'more node')}; {count} have joined: {who}", f"{name}/{number}"


def _tell_of_refusal(leader: Leader) -> None:
    member, view = leader.member, leader.view
    if view.refusal is not None and leader.is_news("refusal", view.round):
        member.do(Announce(f"a node that would have joined was refused: {view.refusal}"))


def likely_mistake(rendezvous: Rendezvous, agent: ThisAgent, joined: Sequence[Node]) -> str | None:
    """Return a message with the user's probable mistake, if no other machine has joined the store here."""
    is_hosted_here = agent.why_hosts is not None and not is_loopback_name(rendezvous.host)
    if not is_hosted_here or any(node.host != agent.host for node in joined):
        return None
    if rendezvous.settings.is_host:
        todo = "is_host=1 is for one node only; the others need is_host=0, or neither"
    elif rendezvous.port == 0:
        todo = "the others cannot know the port; give one: --rdzv-endpoint HOST:PORT"
    else:
        todo = (
            "start the same command on all nodes; if that is done, and "
            f"{rendezvous.host} is another node, the names in /etc/hosts or DNS are wrong here"
        )
    return (
        f"no other machine has reached the rendezvous store {rendezvous.endpoint}. This node hosts it"
        f" ({agent.why_hosts}): {todo}"
    )


def crowd(view: View) -> tuple[str, str] | None:
    """Return a node with several agents in the round, and a waiting node with none, if there are such nodes.
    The user has then probably started a launcher in each task of a scheduler instead of one on each node.
    """
    seated = [view.nodes[seat.member] for seat in view.seats if seat.member in view.nodes]
    hosts = Counter(node.host for node in seated)
    twice = next((node for node in seated if hosts[node.host] > 1), None)
    waiting = sorted(view.nodes[each].shown for each in view.waiting if view.nodes[each].host not in hosts)
    return (twice.shown, waiting[0]) if twice is not None and waiting else None


def tell_of_crowd(leader: Leader) -> None:
    member, view = leader.member, leader.view
    # Look for such nodes again only if the number of waiting nodes has changed, because that takes time.
    if "crowd" in leader.told or not leader.is_news("spares", len(view.waiting)):
        return
    found = crowd(view)
    if found is None or not leader.is_news("crowd"):
        return
    text = f"several agents of node {found[0]} take part, while node {found[1]} waits as a spare"
    member.do(Announce(f"{text}: start one launcher for each node (srun --ntasks-per-node=1)"))


def _tell_of_more(leader: Leader) -> None:
    member, view = leader.member, leader.view
    settings, count, most = member.settings, len(view.candidates), member.rendezvous.max_nodes
    is_first = view.head is None or view.head.round == 0
    limit, name = settings.restart_call_timeout, "restart_call_timeout"
    if is_first:
        limit, name = settings.last_call_timeout, "last_call_timeout"
    if limit < FIRST_NEWS:
        return
    who = _joined(view, member.rendezvous, 2)
    member.do(Announce(f"{count} of at most {most} nodes have joined: {who}; {name}: {limit:g} s"))


def _judged(leader: Leader, head: Head) -> round_outcome.RoundVerdict:
    """Return the verdict on the finished round. It is cached, because otherwise it would be computed for each
    replacement node that arrives, which takes time proportional to the number of members. Until the next
    round, members only stop or leave, so each of the sets ``slow``, ``missing`` and ``absent`` only grows or
    only shrinks. Their sizes therefore show whether the cached verdict is outdated.
    """
    member, view = leader.member, leader.view
    sizes = len(view.slow), len(view.missing), len(view.absent)
    was_short = member.age.was_short
    can_spare = len(view.candidates) > member.rendezvous.min_nodes
    rests_on = (view.head_revision, was_short, sizes, can_spare, frozenset(view.farewells))
    if leader.judged is None or leader.judged[0] != rests_on:
        judged = round_outcome.judge(
            *(view, head, member.settings, member.agent.policy, was_short, member.now),
            min_nodes=member.rendezvous.min_nodes,
        )
        leader.judged = rests_on, judged
    return leader.judged[1]


def _is_time(leader: Leader) -> bool:
    member, view = leader.member, leader.view
    settings, count = member.settings, len(view.candidates)
    if count >= member.rendezvous.max_nodes:
        return True
    if count < member.rendezvous.min_nodes:
        leader.forget("last_call")
        return False
    if view.head is None or view.head.round == 0:
        return leader.has_passed("last_call", settings.last_call_timeout)
    if count < view.head.size and settings.restart_call_timeout > 0:
        return leader.has_passed("restart_call", settings.restart_call_timeout)
    return True


def _shown(view: View, rendezvous: Rendezvous) -> list[str]:
    if rendezvous.is_static:
        ranked = sorted(
            (view.nodes[each] for each in view.candidates), key=lambda node: (node.hint or 0, node.name)
        )
        return [f"node rank {node.hint} is {node.shown}" for node in ranked]
    return sorted(view.nodes[each].shown for each in view.candidates)


def _too_few(leader: Leader) -> str:
    member, view = leader.member, leader.view
    rendezvous, count = member.rendezvous, len(view.candidates)
    limit = f"{member.settings.join_timeout:g} s (join_timeout)"
    text = f"only {count} of at least {nodes(rendezvous.min_nodes)} joined within {limit}"
    if count:
        text += f": {named(_shown(view, rendezvous))}"
    if rendezvous.is_static:
        taken = {view.nodes[each].hint for each in view.candidates}
        free = [str(rank) for rank in range(rendezvous.max_nodes) if rank not in taken]
        text += f"; no node has node rank {named(free)}"
    lost = view.seat_names(sorted(view.missing))
    if lost:
        text += f"; lost in round {view.round}: {named(lost)}"
    return text


def _form(leader: Leader, ended: Head | None, alive: list[str]) -> None:
    """Propose the next round. Without waiting for replies, send its slots (the ranks of each member), its
    table of members, and last its head (the new state of the job). A condition of these transactions that has
    become false stays false. So if one of them is rejected, so is the last, which writes the head. Members
    ignore slots of a proposal that the head does not name.
    """
    member, view = leader.member, leader.view
    members = _members(view, member.rendezvous.max_nodes)
    assert member.link is not None
    leader.count += 1
    form = f"{member.link.create_revision}.{leader.count}"
    number = view.round + 1
    shares = [view.nodes[each] for each in members]
    ranks = node_ranks([NodeShare(node.role, node.nproc) for node in shares])
    guard = leader.guards()
    keys = member.keys
    for first in range(0, len(members), MEMBERS_PER_TXN):
        part = range(first, min(first + MEMBERS_PER_TXN, len(members)))
        slots = [
            Slot(number, form, r, ranks[r].first_rank, ranks[r].first_role_rank, ranks[r].role_world_size)
            for r in part
        ]
        lines = [(members[r], shares[r].name, shares[r].local_addr or shares[r].address) for r in part]
        puts = [Put(keys.slot(members[slot.group_rank]), slot.encode(), False) for slot in slots]
        puts.append(Put(f"{keys.table(form)}{first // MEMBERS_PER_TXN}", encode(lines), False))
        member.txn(Purpose.NOTHING, guard, puts)
    old = ended or Head("ENDED", 0)
    head = old.replaced(
        state="RUNNING",
        round=number,
        form=form,
        size=len(members),
        world_size=ranks[0].world_size,
        master=(master_addr(shares), shares[0].port),
    )
    ops: list[Operation] = [member.put_head(head), Delete(keys.refusal)]
    ops += [DeletePrefix(keys.dones), DeletePrefix(keys.evidences)]
    ops += [DeletePrefix(keys.table(each)) for each in view.forms if each != form][:10]
    stale = [each for each in view.slots if each not in view.nodes]
    ops += [Delete(keys.slot(each)) for each in stale[: 100 - len(ops)]]
    gone = [each for each in view.farewells if each not in view.nodes]
    ops += [Delete(keys.farewell(each)) for each in gone[: 120 - len(ops)]]
    # After a round, print the number of waiting nodes again, even if it has not changed.
    leader.told.pop("waiting", None)
    leader.write(ops, *leader.here(alive))


def _members(view: View, size: int) -> list[str]:
    of_agent = {agent_of(each): each for each in view.candidates}
    offered = []
    for agent, each in of_agent.items():
        node = view.nodes[each]
        offered.append(Candidate(agent, view.joined[each], node.hint, node.name))
    previous = [agent_of(seat.member) for seat in view.seats]
    return [of_agent[agent] for agent in assign_seats(previous, offered, size)]


def snapshot(member: Member, link: Link, reply: Reply) -> None:
    """Begin to lead the job. ``reply`` is the snapshot of all keys that the job has in the store."""
    leader = link.leader = Leader(member, View(member.keys, reply.revision, reply.entries()))
    early, link.early = link.early or (), None
    for event in early:
        if event.revision > reply.revision:
            leader.view.apply(event.revision, event.changes)
    _seen(leader)


def changed(leader: Leader, event: Changes) -> None:
    if event.revision > leader.view.revision:
        leader.view.apply(event.revision, event.changes)
        leader.stalled = False
    _seen(leader)


def _seen(leader: Leader) -> None:
    member, view = leader.member, leader.view
    link = member.registered
    if link is None or link.member not in view.nodes:
        fence(member, GONE)
        return
    for text in list(view.damaged.values())[leader.told.get("damaged", 0) :]:
        member.do(Announce(f"{text}; it is ignored"))
    leader.told["damaged"] = len(view.damaged)
    lead(leader)


def timer_fired(leader: Leader, name: str) -> None:
    if name in leader.timers:
        leader.timers[name] = True
        lead(leader)


def written(link: Link, reply: Reply) -> None:
    if link.leader is not None and link.leader.answered(reply):
        lead(link.leader)


# --- deciding ---


def lead(leader: Leader) -> None:
    """Choose and execute the leader's next action. Called after every event that can change the choice."""
    member, view = leader.member, leader.view
    # Wait until this agent has received the head (job state) also as a member, not only as the leader.
    if member.link is None or not leader.is_free() or view.head_revision != member.link.head_revision:
        return
    if view.head_revision != leader.of_head:
        leader.forget_timers()
        leader.of_head = view.head_revision
    head = view.head
    if head is not None and head.state != "CLOSED" and len(view.seats) != head.size:
        # Without an intact list of members, no agent can tell which nodes are lost and which have finished.
        table = f"the table {member.keys.table(head.form)} of round {head.round} is damaged"
        leader.close(head.replaced(outcome="failed", reason=table))
    elif head is None or head.state == "ENDED":
        between_rounds(leader)
    elif head.state == "RUNNING":
        _running(leader, head)


# --- while a round is running ---


def missing_ranks(view: View) -> set[int]:
    return view.missing


def may_grow(member: Member, view: View, head: Head) -> bool:
    is_wanted = head.size < member.rendezvous.max_nodes and bool(view.waiting)
    return member.settings.scale_up and is_wanted and not view.done


def _forget_workers(member: Member, view: View, gone: set[int]) -> None:
    """Delete the keys of lost agents' workers. All of them were killed before the agents' sessions ended."""
    keys = workers_keys(member.rendezvous, member.agent.job, member.joining.job_revision)
    for seat in (view.seats[rank] for rank in gone):
        if seat.member not in view.farewells:
            workers = workers_of(agent_of(seat.member))
            member.txn(Purpose.NOTHING, [], keys.forget_members(workers))


def _running(leader: Leader, head: Head) -> None:
    member, view = leader.member, leader.view
    gone = missing_ranks(view)
    if gone:
        rank = min(gone)
        seat = view.seats[rank]
        kind = "left" if seat.member in view.farewells else "lost"
        (name,) = view.seat_names([rank])
        end = {"kind": kind, "node": name, "group_rank": rank, "member": seat.member}
        ended = head.replaced(state="ENDED", end=end, cause=None)
        not_done = Missing(member.keys.done(head.round, rank))
        if member.agent.keeps_workers:
            _forget_workers(member, view, gone)
        leader.write([member.put_head(ended)], not_done)
    elif len(view.done) == len(view.seats):
        leader.close(head.replaced(outcome="succeeded", reason=None, end=None, cause=None))
    elif may_grow(member, view, head):
        if leader.has_passed("scale", member.settings.scale_up_delay):
            ended = head.replaced(state="ENDED", end={"kind": "scale"}, cause=None)
            leader.write([member.put_head(ended)])
    else:
        leader.forget("scale")
        if view.waiting:
            tell_of_crowd(leader)


class Candidate(Value):
    """Agent that can take part in the next round. ``joined`` is its registration's create revision."""

    agent: str
    joined: int
    hint: int | None
    name: str


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key that compares digits as numbers, so that ``node2`` sorts before ``node10``."""
    return tuple(
        (False, int(run), run) if is_number else (True, 0, run)
        for is_number, run in ((flag, "".join(each)) for flag, each in groupby(name, str.isdecimal))
    )


def assign_seats(previous: Sequence[str], candidates: Iterable[Candidate], size: int) -> list[str]:
    """Return at most ``size`` agents for the next round, by group rank. Agents of the ``previous`` round (by
    group rank) take precedence. New agents are selected in the order in which they joined.
    """
    offered = {each.agent: each for each in candidates}
    stay = [agent for agent in previous if agent in offered][:size]
    staying, before = set(stay), set(previous)
    newcomers = sorted(
        (each for agent, each in offered.items() if agent not in before),
        key=lambda each: (each.joined, each.agent),
    )[: size - len(stay)]
    newcomers.sort(key=lambda each: (each.hint is None, each.hint or 0, natural(each.name), each.agent))
    fill = iter([each.agent for each in newcomers])
    seats = [agent if agent in staying else next(fill, None) for agent in previous]
    return [agent for agent in seats if agent is not None] + list(fill)
