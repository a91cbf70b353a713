"""The rules of the protocol, each switched off: what the checker has to see. One entry patches one small
function of the shipped code."""

from elasticrs.rendezvous.elastic import (
    by_hand,
    formation,
    joining,
    leaving,
    oversight,
    rounds,
    seating,
    verdict,
)
from elasticrs.rendezvous.elastic import leader as leads
from elasticrs.rendezvous.elastic.keys import agent_of
from elasticrs.rendezvous.elastic.messages import Outcome
from elasticrs.rendezvous.elastic.records import encode
from elasticrs.rendezvous.elastic.state import Member, Phase
from elasticrs.rendezvous.elastic.view import View

from .store import Store

RULES = {}


def rule(name, *owners):
    """Registers a replacement for a name, wherever it was imported, under the name of the function."""

    def register(function):
        RULES[function.__name__] = (owners, name, function)
        return function

    return register


@rule("may_rejoin", joining)
def register_before_the_workers_are_gone(member):
    member.held = None
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


@rule("claim", by_hand)
def anybody_may_have_a_rank(member, node_rank):
    key = member.keys.rank(node_rank)
    value = encode([member.settings.agent, member.member, member.settings.node])
    compare = ("create", member.keys.job, member.job_revision)
    return by_hand.Claim(compare, ("put", key, value, True), ("get", key))


@rule("may_be_lent", by_hand)
def a_lent_port_is_another_program_s(member, kind):
    return False


@rule("missing_ranks", oversight)
def finished_members_count_as_lost(view):
    return view.absent


@rule("_members", formation)
def every_incarnation_is_a_candidate(view, settings):
    fit = [each for each in view.nodes if not view.holds(each) and each not in view.farewells]
    offered = [seating.Candidate(each, view.joined[each], None, view.nodes[each].name) for each in fit]
    return seating.seat([seat.member for seat in view.seats], offered, settings.max_nodes)


@rule("_members", formation)
def survivors_lose_their_places(view, settings):
    of_agent = {agent_of(each): each for each in view.candidates}
    newest = sorted(of_agent, key=lambda agent: -view.joined[of_agent[agent]])
    return [of_agent[agent] for agent in newest[: settings.max_nodes]]


@rule("earlier_registrations", joining)
def registration_deletes_by_agent(member, incarnation):
    """A late registration takes a later one with it."""
    agent = member.settings.agent
    return [
        ("delete_prefix", f"{member.keys.nodes}{agent}/"),
        ("delete_prefix", f"{member.keys.slots}{agent}/"),
    ]


@rule("_is_mine", rounds)
def slot_without_form(member):
    head, slot = member.head, member.slot
    return head is not None and head.state == "RUNNING" and slot is not None and slot.round == head.round


@rule("_is_mine", rounds)
def slot_without_head(member):
    return member.head is not None and member.head.state == "RUNNING" and member.slot is not None


@rule("fresh_listener", joining)
def the_listener_is_kept(member):
    member.port_used = False
    return True


@rule("_earlier_cause", rounds)
def earlier_causes_are_kept_back(member, number):
    return None


@rule("first_cause", verdict)
def the_first_report_is_the_first_cause(view, head):
    return head.cause


@rule("leave_barrier", rounds)
def leaves_before_the_store_knows(member):
    if member.phase is Phase.DONE and member.barrier_over:
        member.exit(Outcome("succeeded"))


@rule("mismatch", joining)
def any_settings_will_do(settings, shown, job):
    return None


@rule("may_grow", oversight)
def grows_against_the_setting(member, view, head):
    return bool(view.waiting) and not view.done


@rule("predecessor_gone", joining)
def nobody_follows_the_leader(member):
    member.predecessor = None


@rule("say_idle", rounds)
def never_says_that_it_is_idle(member, number):
    member.idle = number


@rule("guards", leads, oversight, formation)
def leader_writes_without_guards(member, view):
    return []


@rule("stop", Member)
def stops_are_forgotten(self, why, *, fenced=False, hung=None):
    self.stopping = True


@rule("end_session", Store)
def leases_do_not_end(self, conn):
    conn.dead = True


@rule("is_charged", verdict)
def failures_are_free(view, head):
    return False


@rule("take_slot", rounds)
def slots_are_not_heard(member, entry):
    return None


@rule("_aborted", leaving)
def an_abort_is_tried_once(member, reply):
    if reply.ok:
        rounds.take_head(member, reply.results[-1])


@rule("_give_up", joining)
def a_lost_store_is_waited_for_without_end(member, outcome):
    return None
