"""The rules of the protocol, each switched off: what the checker has to see. One entry patches one small
function of the shipped code."""

from elasticrs.coordination import CreatedAt, DeletePrefix
from elasticrs.rendezvous.elastic import (
    by_hand,
    connecting,
    formation,
    joining,
    leader,
    leaving,
    oversight,
    rounds,
    seating,
    succession,
    verdict,
)
from elasticrs.rendezvous.elastic.keys import agent_of
from elasticrs.rendezvous.elastic.messages import Outcome
from elasticrs.rendezvous.elastic.state import Member
from elasticrs.rendezvous.elastic.view import View

from .store import Store

RULES = {}


def rule(name, *owners):
    """Registers a replacement for a name, wherever it was imported, under the name of the function."""

    def register(function):
        RULES[function.__name__] = (owners, name, function)
        return function

    return register


@rule("may_rejoin", connecting)
def register_before_the_workers_are_gone(member):
    member.workers = None
    return True


@rule("holds", View)
def free_by_the_last_table(self, member):
    return member in self.rank_of and self.nodes[member].idle < self.round


@rule("holds", View)
def nobody_holds(self, member):
    return False


@rule("slow_members", formation)
def verdict_does_not_wait(view):
    return set()


@rule("is_explained", verdict)
def losses_are_charged(view):
    return False


@rule("is_explained", verdict)
def any_absence_explains(view):
    return bool(view.absent)


@rule("witnesses", verdict)
def verdict_on_a_stale_view(view):
    return []


_claim = by_hand.claim


@rule("claim", by_hand)
def anybody_may_have_a_rank(member, registration, node_rank):
    put = _claim(member, registration, node_rank).put
    return by_hand.Claim(CreatedAt(member.keys.job, member.link.job_revision), put)


@rule("may_be_lent", by_hand)
def a_lent_port_is_another_program_s(member, kind):
    return False


@rule("missing_ranks", oversight)
def finished_members_count_as_lost(view):
    return view.absent


@rule("_members", formation)
def every_incarnation_is_a_candidate(view, size):
    fit = [each for each in view.nodes if not view.holds(each) and each not in view.farewells]
    offered = [seating.Candidate(each, view.joined[each], None, view.nodes[each].name) for each in fit]
    return seating.seat([seat.member for seat in view.seats], offered, size)


@rule("_members", formation)
def survivors_lose_their_places(view, size):
    of_agent = {agent_of(each): each for each in view.candidates}
    newest = sorted(of_agent, key=lambda agent: -view.joined[of_agent[agent]])
    return [of_agent[agent] for agent in newest[:size]]


@rule("earlier_registrations", joining)
def registration_deletes_by_agent(member, incarnation):
    """A late registration takes a later one with it."""
    agent = member.agent.agent
    return [DeletePrefix(f"{kind}{agent}/") for kind in (member.keys.nodes, member.keys.slots)]


@rule("is_mine", rounds)
def slot_without_form(registration, head):
    slot = registration.slot
    return slot is not None and head.state == "RUNNING" and slot.round == head.round


@rule("is_mine", rounds)
def slot_without_head(registration, head):
    return registration.slot is not None and head.state == "RUNNING"


@rule("fresh_listener", connecting, rounds)
def the_listener_is_kept(member):
    member.listener.has_served = False
    return True


@rule("_earlier_cause", rounds)
def earlier_causes_are_kept_back(member, number):
    return None


@rule("first_cause", verdict)
def the_first_report_is_the_first_cause(view, head):
    return head.cause


@rule("leave_barrier", rounds)
def leaves_before_the_store_knows(member):
    if member.done is not None and member.done.is_over:
        member.exit(Outcome("succeeded"))


@rule("mismatch", joining)
def any_settings_will_do(member, job):
    return None


@rule("may_grow", oversight)
def grows_against_the_setting(member, view, head):
    return bool(view.waiting) and not view.done


@rule("predecessor_gone", succession)
def nobody_follows_the_leader(member, registration):
    registration.predecessor = None


@rule("say_idle", rounds)
def never_says_that_it_is_idle(member, registration, number):
    registration.idle = number


@rule("guards", leader, formation)
def leader_writes_without_guards(member, view):
    return []


@rule("stop", Member)
def stops_are_forgotten(self, why, *, fenced=False, hung=None):
    if self.workers is not None:
        self.workers.is_stopping = True


@rule("end_session", Store)
def leases_do_not_end(self, conn):
    conn.dead = True


@rule("is_charged", verdict)
def failures_are_free(view, head):
    return False


@rule("take_slot", rounds)
def slots_are_not_heard(member, registration, entry):
    return None


@rule("aborted", leaving)
def an_abort_is_tried_once(member, reply):
    return reply.entry(-1) if reply.ok else None


@rule("_give_up", connecting)
def a_lost_store_is_waited_for_without_end(member, outcome):
    return None
