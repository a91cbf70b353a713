"""Hang diagnosis: the leader makes it from the evidence of all nodes, and every node prints it."""

import random

import pytest
from diagnosis.model import dump
from diagnosis.recorded_evidence import recorded
from diagnosis.test_culprits import calls
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.hangs.diagnose import RankEvidence, observe
from elasticrs._engine.hangs.flight_record import NoRecord
from elasticrs._engine.hangs.node_evidence import encode
from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.round_outcome import MAX_DIAGNOSIS
from rendezvous.cluster import running

NODES = 8
SAYS = "round 1 hung: 7 of 8 ranks wait in all_reduce #3 of the default group"
HUNG = {
    "node": "n",
    "rank": 5,
    "ground": "elsewhere",
    "silence": 61.5,
    "message": "hung: no heartbeat",
    "time_ns": 9,
}


def evidence_of(name, rank):
    """Return the encoded evidence of the node with this rank."""
    (facts,) = [observe(each._replace(node=f"n{rank}")) for each in recorded(name) if each.rank == rank]
    return encode([facts], max_bytes=32 << 10, max_steps=200)


EVIDENCE = [evidence_of("missing_rank", rank) for rank in range(NODES)]


def hang(agents, order, evidence=EVIDENCE, **more):
    """Let agent 5 report a hang. Then let the workers of all agents end in this order."""
    agents[5].send(m.WorkerFailed({**HUNG, **more}))
    for number in order:
        agents[number].send(m.GroupEnded(None, None, evidence[number]))


def told(agents):
    """Return what each agent printed about the hang. Check that each printed it once."""
    lines = [[text for text in agent.texts if text.startswith("round 1 hung: ")] for agent in agents]
    assert [len(each) for each in lines] == [1] * len(agents)
    return [line for (line,) in lines]


@given(st.permutations(range(NODES)))
@settings(max_examples=25, deadline=None)
def test_every_node_prints_the_same_diagnosis_in_any_order_of_reports(order):
    cluster, agents = running(NODES, max_restarts=1)
    hang(agents, order)
    assert cluster.head.state == "RUNNING"
    (line,) = set(told(agents))
    assert line.startswith(SAYS)
    assert "rank 5 (n5) did not enter it" in line
    assert all(agent.starts[-1].earlier.endswith(line.removeprefix("round 1 hung: ")) for agent in agents)


def test_the_leader_does_not_wait_for_missing_evidence():
    cluster, agents = running(NODES, max_restarts=1)
    hang(agents, range(NODES), [None, *EVIDENCE[1:]])
    assert cluster.head.state == "RUNNING", "the node without evidence is idle"
    assert "no record of rank 0 (a) (the node did not answer)" in told(agents)[0]


@pytest.mark.parametrize("bad", [b"", b"\0" * 99, b"x" * 99])
def test_damaged_evidence_counts_as_missing(bad):
    _, agents = running(NODES, max_restarts=1)
    hang(agents, range(NODES), [*EVIDENCE[:7], bad])
    assert "(the node did not answer)" in told(agents)[0]


def test_the_failure_cause_of_a_job_contains_the_hang_diagnosis():
    cluster, agents = running(NODES, max_restarts=0)
    hang(agents, range(NODES))
    assert cluster.head.state == "CLOSED"
    for agent in agents:
        assert agent.outcome.cause["diagnosis"].startswith("7 of 8 ranks wait in all_reduce #3")
        assert "blame" not in agent.outcome.cause["diagnosis"]


def test_conclusive_records_decide_even_if_no_node_has_found_the_blamed_rank_to_hang():
    cluster, agents = running(NODES, max_restarts=0)
    hang(agents, range(NODES), rank=3)
    assert cluster.head.state == "CLOSED"
    for agent in agents:
        cause = agent.outcome.cause
        assert (cause["rank"], cause["group_rank"], cause["node"]) == (5, 5, agents[5].name)


def test_a_rank_that_exited_with_code_0_on_another_node_is_blamed_for_a_hang():
    cluster, agents = running(NODES, max_restarts=0)
    agents[5].send(m.WorkersDone())
    agents[3].send(m.WorkerFailed({**HUNG, "rank": 3}))
    for number in range(NODES):
        if number != 5:
            agents[number].send(m.GroupEnded(None, None, EVIDENCE[number]))
    assert cluster.head.state == "CLOSED"
    for agent in agents:
        cause = agent.outcome.cause
        assert (cause["rank"], cause["node"], cause["exitcode"]) == (5, agents[5].name, 0)
        assert "of which there is no record (exited)" in cause["diagnosis"]


def test_the_leader_clears_a_rank_that_gloo_has_aborted():
    cluster, agents = running(4, max_restarts=0)
    records = [dump(calls("all_reduce", sizes=[[99 if rank == 2 else 4]])) for rank in range(4)]
    found = [RankEvidence(rank, f"n{rank}", (record,)) for rank, record in enumerate(records)]
    found[0] = found[0]._replace(records=NoRecord.ABORTED)
    evidence = [encode([observe(each)], max_bytes=32 << 10, max_steps=200) for each in found]
    aborted = {"node": "n0", "rank": 0, "exitcode": -6, "time_ns": 9, "message": "Signal 6 (SIGABRT)"}
    agents[0].send(m.WorkerFailed(aborted))
    for number in range(4):
        agents[number].send(m.GroupEnded(aborted if number == 0 else None, None, evidence[number]))
    assert cluster.head.state == "CLOSED"
    for agent in agents:
        assert (agent.outcome.cause["rank"], agent.outcome.cause["node"]) == (2, agents[2].name)


def test_an_undecided_diagnosis_names_the_candidates():
    cluster, agents = running(4, max_restarts=0)
    evidence = [evidence_of("two_against_two", rank) for rank in range(4)]
    agents[1].send(m.WorkerFailed({**HUNG, "rank": 1}))
    for number in range(4):
        agents[number].send(m.GroupEnded(None, None, evidence[number]))
    assert cluster.head.state == "CLOSED"
    assert {agent.outcome.cause["blamed"] for agent in agents} == {"undecided, candidates: ranks 0-3"}


@given(st.permutations(range(NODES)))
@settings(max_examples=25, deadline=None)
def test_a_hung_rank_blamed_by_flight_records_is_the_failure_cause(order):
    """Each node has a single rank, so the heartbeats show only which rank has been silent the longest."""
    cluster, agents = running(NODES, max_restarts=0)
    hung = [{**HUNG, "rank": rank, "ground": "oldest", "time_ns": 9 + rank} for rank in range(NODES)]
    agents[order[0]].send(m.WorkerFailed(hung[order[0]]))
    for number in order:
        agents[number].send(m.GroupEnded(hung[number], None, EVIDENCE[number]))
    assert cluster.head.state == "CLOSED"
    for agent in agents:
        assert agent.outcome.cause["rank"] == 5
        assert "blame" not in agent.outcome.cause["diagnosis"]


def test_hang_evidence_is_removed_when_the_next_round_starts():
    cluster, agents = running(NODES, max_restarts=2)
    hang(agents, range(NODES))
    assert cluster.head.round == 2
    assert not [key for key in cluster.store.entries if key.startswith(cluster.keys.evidences)]
    agents[2].fail()
    for agent in agents:
        if agent.member.workers is not None:
            agent.send(m.GroupEnded())
    assert cluster.head.round == 3
    assert "diagnosis" not in cluster.head.cause
    assert len(told(agents)) == NODES


def test_the_length_of_the_diagnosis_is_limited():
    names = "n" * 500
    _, agents = running(NODES, max_restarts=1)
    facts = [observe(each._replace(node=f"{names}{each.rank}")) for each in recorded("wrong_size")]
    evidence = [encode([each], max_bytes=32 << 10, max_steps=200) for each in facts]
    hang(agents, random.Random(3).sample(range(NODES), NODES), [*evidence, *[None] * 4])
    assert len(told(agents)[0]) <= MAX_DIAGNOSIS + len("round 1 hung: ")
