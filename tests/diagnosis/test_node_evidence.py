"""Encoding of the facts about each node's ranks, and the diagnosis from all nodes' facts."""

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.model import FAULTS, Run, job, mesh, program, with_fault
from diagnosis.recorded_evidence import recorded
from diagnosis.test_recorded import EXPECTED
from elasticrs._engine.hangs.diagnose import diagnose, diagnose_nodes, judge, observe
from elasticrs._engine.hangs.flight_record import (
    Call,
    GroupSteps,
    NoRecord,
    RankFacts,
    RankRecord,
    Step,
    Transfer,
)
from elasticrs._engine.hangs.node_evidence import (
    MAX_DECODED,
    MAX_STEPS,
    decode,
    encode,
)
from elasticrs._engine.hangs.stacks import Frame

LIMITS = {"max_bytes": 32 << 10, "max_steps": 200}
NAMES = st.text(max_size=6)
COUNTS = st.integers(0, 2**62)
CALLS = st.builds(
    Call, NAMES, st.none() | COUNTS, st.lists(st.sampled_from(["Float", "Half"]), max_size=2).map(tuple)
)
STEPS = st.dictionaries(
    st.integers(1, 40), st.builds(Step, CALLS, st.booleans(), st.booleans()), min_size=1, max_size=9
)
RECORDS = st.builds(
    RankRecord,
    st.dictionaries(st.tuples(NAMES, NAMES), st.builds(GroupSteps, NAMES, STEPS), max_size=3),
    st.dictionaries(NAMES, st.sets(st.integers(0, 99), min_size=1).map(sorted).map(tuple), max_size=2),
    st.lists(st.builds(Transfer, NAMES, NAMES, st.none() | COUNTS), max_size=2).map(tuple),
    st.booleans(),
    st.booleans(),
)
FRAMES = st.lists(st.builds(Frame, NAMES, COUNTS, NAMES), max_size=4).map(tuple)
FACTS = st.builds(RankFacts, COUNTS, st.just("node1"), RECORDS | st.sampled_from(NoRecord), FRAMES)


def by_node(facts, nproc):
    """Split the facts about all ranks into nodes with ``nproc`` ranks each."""
    return [(f"node{first // nproc}", facts[first : first + nproc]) for first in range(0, len(facts), nproc)]


def encoded(facts, nproc, **limits):
    return [
        (node, encode([each._replace(node=node) for each in own], **{**LIMITS, **limits}))
        for node, own in by_node(facts, nproc)
    ]


@given(st.lists(FACTS, min_size=1, max_size=4))
def test_encoded_facts_decode_to_the_same_facts(facts):
    assert decode(encode(facts, max_bytes=1 << 20, max_steps=50)) == facts


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_diagnosis_across_nodes_equals_that_on_a_single_node(name, nproc):
    evidence_of_all = recorded(name)
    nodes = encoded(list(map(observe, evidence_of_all)), nproc)
    expected = diagnose([each._replace(node=f"node{each.rank // nproc}") for each in evidence_of_all])
    found = diagnose_nodes(nodes, len(evidence_of_all))
    assert found.summary == expected.summary
    assert (found.culprits, found.no_record) == (expected.culprits, expected.no_record)


@given(st.integers(0, 2**32), st.sampled_from(FAULTS), st.sampled_from([1, 2, 3]))
@settings(max_examples=60)
def test_the_blamed_ranks_are_the_same_for_one_node_and_for_several(seed, fault, nproc):
    source = random.Random(seed)
    healthy = job(mesh(3, 4), program(source, 12))
    rank = source.randrange(12)
    ranks = Run(with_fault(healthy, rank, source.randrange(12), fault)).evidence()
    facts = list(map(observe, ranks))
    expected = judge(facts).culprits
    nodes = encoded(facts, nproc)
    found = diagnose_nodes(nodes, 12)
    assert (found.culprits if found is not None else ()) == expected
    # A node may report its ranks in any order.
    shuffled = [
        (node, encode(random.Random(seed).sample(own, len(own)), **LIMITS))
        for node, own in by_node(facts, nproc)
    ]
    again = diagnose_nodes(shuffled, 12)
    assert (again.culprits if again is not None else ()) == expected


def test_the_ranks_of_a_node_that_does_not_answer_have_no_record():
    facts = list(map(observe, recorded("missing_rank")))
    nodes = encoded(facts, 2)
    nodes[2] = ("node2", None)
    found = diagnose_nodes(nodes, 8)
    assert found.no_record == dict.fromkeys((4, 5), NoRecord.LOST)
    assert "ranks 4, 5 (node2), of which there is no record (the node did not answer)" in found.summary
    # If two neighbouring nodes do not answer, it is unknown which rank ran on which node.
    nodes[3] = ("node3", b"\0")
    found = diagnose_nodes(nodes, 8)
    assert found.no_record == dict.fromkeys((4, 5, 6, 7), NoRecord.LOST)
    assert "node2" not in found.summary


def test_no_diagnosis_is_made_without_any_record():
    assert diagnose_nodes([("node1", None), ("node2", None)], 4) is None
    assert diagnose_nodes([], 0) is None


def test_unknown_and_duplicate_ranks_are_ignored():
    facts = list(map(observe, recorded("missing_rank")))
    nodes = [*encoded(facts, 4), *encoded([facts[0]._replace(rank=900), facts[1]], 2)]
    assert diagnose_nodes(nodes, 8) == diagnose_nodes(nodes[:2], 8)


def long_record(steps, groups=1, waits_in=None):
    calls = [Call("all_reduce", 4 + number % 7, ("Float",)) for number in range(steps)]
    return RankRecord(
        {
            ("gloo", str(group)): GroupSteps(
                "dp",
                {seq: Step(call, seq != (waits_in or steps), False) for seq, call in enumerate(calls, 1)},
            )
            for group in range(groups)
        }
    )


def test_an_encoding_obeys_its_size_limit_and_keeps_the_latest_calls():
    facts = [
        RankFacts(rank, "node1", long_record(200, 4), (Frame("/train.py", 88, "step"),)) for rank in range(8)
    ]
    for max_bytes in (4096, 1024, 512):
        found = encode(facts, max_bytes=max_bytes, max_steps=200)
        assert len(found) <= max_bytes
        for each in decode(found):
            assert each.frames == facts[0].frames
            for group in each.record.groups.values():
                assert max(group.steps) == 200
                assert not group.steps[200].is_complete
    assert encode(facts, max_bytes=20, max_steps=200) is None


def test_the_first_incomplete_collective_is_kept():
    facts = [RankFacts(0, "node1", long_record(200, waits_in=3))]
    ((_, _, record, _),) = decode(encode(facts, max_bytes=4096, max_steps=2))
    assert sorted(record.groups["gloo", "0"].steps) == [3, 199, 200]


def test_equal_ranks_add_little_to_the_encoded_size():
    record = long_record(200, 3)
    sizes = [
        len(
            encode(
                [RankFacts(rank, "node1", record) for rank in range(count)], max_bytes=1 << 20, max_steps=200
            )
        )
        for count in (1, 16)
    ]
    assert sizes[1] < sizes[0] + 100


# --- invalid encodings ---


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data):
    assert decode(data) == []


VALID = (
    '{"version":2,"node":"a","ranks":[[0,0,0]],'
    '"records":[[[["gloo","0","d",[[1,2,0,1]]]],[["0",[[0,3,1]]]],[],false,false]],'
    '"stacks":[[["t.py",7,"f"]]],"calls":[["all_reduce",4,["Float"]]]}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version":2', '"version":1'),
        ('"version":2', '"version":null'),
        ('"node":"a"', '"node":1'),
        ('"node":"a",', ""),
        ("[[0,0,0]]", "[[0,1,0]]"),
        ("[[0,0,0]]", "[[0,0,1]]"),
        ("[[0,0,0]]", "[[-1,0,0]]"),
        ("[[0,0,0]]", "[[true,0,0]]"),
        ("[[0,0,0]]", '[[0,"gone",0]]'),
        ("[[0,0,0]]", "[[0,-1,0]]"),
        ("[[0,0,0]]", "[[0,0]]"),
        ("[[0,0,0]]", "{}"),
        ("[[1,2,0,1]]", "[]"),
        ("[[1,2,0,1]]", "[[1,2,1,1]]"),
        ("[[1,2,0,1]]", f"[[1,{MAX_STEPS + 1},0,1]]"),
        ("[[1,2,0,1]]", "[[1,9999999999999999999999,0,1]]"),
        ("[[1,2,0,1]]", '[["1",2,0,1]]'),
        ("[[0,3,1]]", "[[3,0,1]]"),
        ("[[0,3,1]]", "[[0,3,1],[3,4,1]]"),
        ("[[0,3,1]]", f"[[0,{MAX_DECODED},1]]"),
        ("[[0,3,1]]", "[[0,3,0]]"),
        ("[[0,3,1]]", "[[0,3]]"),
        ("[[0,3,1]]", "[[0,3,1.0]]"),
        ("[[1,2,0,1]]", "[[1,0,0,1]]"),
        ("[[1,2,0,1]]", "[[1,2,0,true]]"),
        ("[[1,2,0,1]]", "[[1,2,[],1]]"),
        ("false,false", "false,0"),
        ("false,false", "false"),
        ('["t.py",7,"f"]', '["t.py",7]'),
        ('["t.py",7,"f"]', '[9,7,"f"]'),
        ('["all_reduce",4,["Float"]]', '["all_reduce",4.5,["Float"]]'),
        ('["all_reduce",4,["Float"]]', '["all_reduce",4,"Float"]'),
        ('["all_reduce",4,["Float"]]', "null"),
        (VALID, "[]"),
        (VALID, "[" * 100_000),
        (VALID, VALID + " " * MAX_DECODED),
        ("1,2,0,1", "NaN,2,0,1"),
    ],
)
def test_a_document_with_a_wrong_value_is_refused(old, new):
    assert len(decode(zlib.compress(VALID.encode()))) == 1
    assert old in VALID
    assert decode(zlib.compress(VALID.replace(old, new).encode())) == []


def test_truncated_data_and_trailing_bytes_are_refused():
    whole = zlib.compress(VALID.encode())
    for data in (whole[:-1], whole + b"\0", b""):
        assert decode(data) == []
