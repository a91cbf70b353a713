"""Functions that each break a rule of the protocol, so that the checker must find a violation.

An entry replaces one small function of the shipped code, wherever that is used.
"""

import contextlib
import sys
from unittest import mock

from elasticrs._engine.nodes.protocol import formation, joining, round_outcome, rounds
from elasticrs._engine.nodes.protocol.leader_view import View
from elasticrs._engine.nodes.protocol.member import Leader, Member
from elasticrs._engine.nodes.protocol.messages import Outcome
from elasticrs._engine.nodes.protocol.records import agent_of
from elasticrs._engine.nodes.transport.coordination import CreatedAt, Delete

from .store import Conn, Store
from .world import World

RULES = {}
"""By name: the function that keeps a rule, and what breaks it."""


def instead_of(rule):
    """Register the decorated function as one that breaks ``rule``, under its own name."""

    def register(function):
        RULES[function.__name__] = rule, function
        return function

    return register


@contextlib.contextmanager
def rule_off(name):
    """Replace the function that keeps a rule by the one that breaks it."""
    rule, replacement = RULES[name]
    owner, _, _ = rule.__qualname__.rpartition(".")
    if owner:
        owners = [getattr(sys.modules[rule.__module__], owner)]
    else:
        modules = [module for name, module in sys.modules.items() if name.startswith("elasticrs.")]
        owners = [module for module in modules if vars(module).get(rule.__name__) is rule]
        assert owners, f"no module has {rule.__qualname__}"
    with contextlib.ExitStack() as stack:
        for each in owners:
            stack.enter_context(mock.patch.object(each, rule.__name__, replacement))
        yield


ANSWERS = {
    "nobody_holds": (View.holds, False),
    "verdict_does_not_wait": (formation.slow_members, set()),
    "losses_are_charged": (round_outcome.is_explained, False),
    "verdict_on_a_stale_view": (round_outcome.witnesses, []),
    "a_lent_port_is_another_program_s": (joining.may_be_lent, False),
    "earlier_causes_are_kept_back": (rounds._earlier_cause, None),
    "any_settings_will_do": (joining.mismatch, None),
    "any_command_will_do": (joining.other_command, None),
    "a_leader_keeps_its_own_watches": (rounds.end_own_watches, None),
    "a_slot_counts_before_it_is_known": (rounds.is_slot_known, True),
    "an_end_that_is_not_told_stops_nobody": (rounds.stop_earlier, None),
    "leader_writes_without_guards": (Leader.guards, []),
    "failures_are_free": (round_outcome.is_charged, False),
    "slots_are_not_heard": (rounds.take_slot, None),
    "a_lost_store_is_waited_for_without_end": (joining._give_up, None),
    "the_end_of_an_old_connection_ends_the_session": (Store.is_current, True),
    "a_session_that_has_ended_goes_on": (Store.has_ended, False),
    "told_before_it_is_on_disk": (Store.waits_for_disk, False),
    "what_came_while_away_is_not_told": (Store.tells_news, False),
    "refused_by_itself": (joining.own_registration, None),
    "a_spare_that_is_lost_makes_the_job_too_small": (formation._enough, []),
    "an_excluded_agent_stays": (rounds._excluded, None),
    "an_excluded_agent_is_a_candidate": (View.is_excluded, False),
}
"""By name: the function that keeps a rule, and an answer of it that breaks the rule."""

RULES |= {name: (rule, lambda *_, answer=answer, **__: answer) for name, (rule, answer) in ANSWERS.items()}


@instead_of(joining.may_rejoin)
def register_before_the_workers_are_gone(member):
    member.workers = None
    return True


@instead_of(View.holds)
def free_by_the_last_table(self, member):
    return member in self.rank_of and self.nodes[member].idle < self.round


@instead_of(round_outcome.is_explained)
def any_absence_explains(view):
    return bool(view.absent)


_claim = joining.claim_rank
_decide = round_outcome.decide
_registered = joining.registered
_resume = Conn.resume


@instead_of(joining.claim_rank)
def anybody_may_have_a_rank(member, registration, node_rank):
    _, put = _claim(member, registration, node_rank)
    return CreatedAt(member.keys.job, member.joining.job_revision), put


@instead_of(formation.missing_ranks)
def finished_members_count_as_lost(view):
    return view.absent


@instead_of(formation._members)
def every_incarnation_is_a_candidate(view, size):
    fit = [each for each in view.nodes if not view.holds(each) and each not in view.farewells]
    offered = [formation.Candidate(each, view.joined[each], None, view.nodes[each].name) for each in fit]
    return formation.assign_seats([seat.member for seat in view.seats], offered, size)


@instead_of(formation._members)
def survivors_lose_their_places(view, size):
    of_agent = {agent_of(each): each for each in view.candidates}
    newest = sorted(of_agent, key=lambda agent: -view.joined[of_agent[agent]])
    return [of_agent[agent] for agent in newest[:size]]


@instead_of(joining.earlier_registrations)
def registration_deletes_by_agent(member, incarnation):
    """Let a late registration delete a newer one of the same agent."""
    others = [f"{member.agent.agent}/{each}" for each in range(1, incarnation + 9) if each != incarnation]
    return [Delete(key(name)) for name in others for key in (member.keys.node, member.keys.slot)]


@instead_of(rounds.is_mine)
def slot_without_form(registration, head):
    slot = registration.slot
    return slot is not None and head.state == "RUNNING" and slot.round == head.round


@instead_of(rounds.is_mine)
def slot_without_head(registration, head):
    return registration.slot is not None and head.state == "RUNNING"


@instead_of(joining.fresh_listener)
def the_listener_is_kept(member):
    member.listener.has_served = False
    return True


@instead_of(round_outcome.first_cause)
def the_first_report_is_the_first_cause(view, head):
    return head.cause


@instead_of(rounds.leave_barrier)
def leaves_before_the_store_knows(member):
    if member.done is not None and member.done.is_over:
        member.exit(Outcome("succeeded"))


@instead_of(formation.may_grow)
def grows_against_the_setting(member, view, head):
    return bool(view.waiting) and not view.done


@instead_of(rounds.predecessor_gone)
def nobody_follows_the_leader(member, registration):
    registration.predecessor = None


@instead_of(rounds.say_idle)
def never_says_that_it_is_idle(member, registration, number):
    registration.idle = number


@instead_of(Member.stop)
def stops_are_forgotten(self, why, **_facts):
    if self.workers is not None:
        self.workers.is_stopping = True


@instead_of(Store.end_session)
def leases_do_not_end(self, conn):
    conn.dead = True


@instead_of(joining.aborted)
def an_abort_is_tried_once(member, reply):
    return reply.entry(-1) if reply.ok else None


# --- store outages ---


@instead_of(World.may_end)
def leases_end_before_the_client_gives_up(self, conn):
    return conn.is_stalled or not conn.open


@instead_of(Store.breaks)
def a_broken_connection_ends_the_session(self, conn):
    if not conn.is_etcd:
        self.end_session(conn)


@instead_of(Store.loaded)
def leases_go_on_while_the_store_is_away(self, conn):
    self.end_session(conn)


@instead_of(Conn.resume)
def requests_are_not_sent_again(self):
    self.sent.clear()
    _resume(self)


@instead_of(joining.registered)
def registered_when_it_was_last_put(member, registration, own):
    _registered(member, registration, own.replaced(create_revision=own.mod_revision))


# --- exclusion ---


@instead_of(round_outcome.decide)
def exclusions_are_not_counted(policy, history, evidence):
    decision = _decide(policy, history, evidence)
    return decision.replaced(history=decision.history.replaced(excluded=0))


UNFIT = frozenset(
    (
        "a_spare_that_is_lost_makes_the_job_too_small",
        "an_excluded_agent_stays",
        "an_excluded_agent_is_a_candidate",
        "exclusions_are_not_counted",
    )
)
"""Rules that matter only where nodes are unfit."""
