"""Diagnosis of culprits from hand-written evidence: NCCL, missing records, and facts that prove nothing."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.model import dump, entry
from diagnosis.test_stacks import LOADER, REDUCE, STEP, written
from elasticrs._engine.hangs.culprits import Confidence, Reason
from elasticrs._engine.hangs.diagnose import RankEvidence, diagnose, observe
from elasticrs._engine.hangs.flight_record import NoRecord
from elasticrs._engine.hangs.stacks import Frame
from elasticrs._engine.supervise.hang_diagnosis import RunningRanks, told_stacks

CERTAIN, LIKELY, POSSIBLE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE

WAITING, OUTSIDE = written((*REDUCE, *STEP)), written((LOADER, *STEP))
RECEIVING = written((REDUCE[0]._replace(function="recv"), *STEP))


def calls(*names, backend="gloo", waits=True, group=("0", "default_pg"), **others):
    """Return entries for these operations. If ``waits`` is true, the last one has not completed."""
    done = {"retired": True, "state": "scheduled" if backend == "gloo" else "completed"}
    last = len(names) - 1 if waits else len(names)
    return [
        entry(
            record_id=index,
            number=index + 1,
            name=f"{backend}:{name}",
            group=group,
            **{**(done if index < last else {}), **others},
        )
        for index, name in enumerate(names)
    ]


def rank(number, records, stacks=None, groups=None, node=None, has_raised=False):
    if not isinstance(records, NoRecord):
        records = (records if isinstance(records, bytes) else dump(records),)
    return RankEvidence(number, node or "node0", records, stacks, groups or {}, has_raised)


def blamed(evidence):
    return [(culprit.ranks, culprit.reason, culprit.confidence) for culprit in diagnose(evidence).culprits]


WAITS, DONE = calls("all_reduce", "all_reduce"), calls("all_reduce", waits=False)


@pytest.mark.parametrize("other", ["all_reduce", "barrier"])
def test_a_rank_that_gloo_has_aborted_is_blamed_if_the_others_made_the_same_calls(other):
    """On a busy machine, gloo marks a collective as retired some time after the next call."""
    aborted, waits = rank(1, NoRecord.ABORTED), calls("all_reduce", "all_reduce")
    late = [waits[1], waits[0]]
    late = [{**raw, "record_id": index, "collective_seq_id": index + 1} for index, raw in enumerate(late)]
    late[1]["profiling_name"] = f"gloo:{other}"
    evidence = [rank(0, waits), aborted, rank(2, late, has_raised=True), rank(3, waits)]
    is_same = other == "all_reduce"
    assert diagnose(evidence).blamed() == ({1} if is_same else {2})
    assert diagnose([*evidence[:3], rank(3, NoRecord.LATE)]).blamed() == set()


def test_no_rank_is_blamed_if_gloo_may_have_aborted_it_in_either_of_two_groups():
    groups = {"1": [0, 1, 2], "2": [1, 3, 4]}
    first, second = (calls("all_reduce", group=(name, "dp")) for name in groups)
    own = {number: {name: found for name, found in groups.items() if number in found} for number in range(5)}
    waiting = [rank(number, first if number < 3 else second, groups=own[number]) for number in (0, 2, 3, 4)]
    evidence = [*waiting, rank(1, NoRecord.ABORTED, groups=own[1])]
    assert diagnose(evidence).blamed() == set()
    assert 1 in diagnose(evidence).candidates


def test_a_rank_without_a_record_is_suspect_if_all_others_wait():
    others = [rank(number, WAITS) for number in range(3)]
    assert blamed([*others, rank(3, NoRecord.LATE)]) == [((3,), Reason.NO_RECORD, LIKELY)]
    assert blamed([*others, rank(3, NoRecord.EXITED)]) == [((3,), Reason.NO_RECORD, CERTAIN)]
    assert blamed([*others, rank(3, NoRecord.OFF)]) == [((3,), Reason.NO_RECORD, POSSIBLE)]
    assert blamed([*others, rank(3, NoRecord.OFF, OUTSIDE)]) == [((3,), Reason.NO_RECORD, LIKELY)]
    assert blamed([*others, rank(3, NoRecord.LATE, WAITING)]) == []
    assert blamed([*others, rank(3, b"{")]) == [((3,), Reason.NO_RECORD, LIKELY)]


def test_a_rank_with_a_record_is_blamed_rather_than_a_rank_without_one():
    evidence = [rank(0, WAITS), rank(1, WAITS), rank(2, DONE, OUTSIDE), rank(3, NoRecord.LOST)]
    assert blamed(evidence) == [((2,), Reason.DID_NOT_ENTER, LIKELY)]
    assert diagnose(evidence).summary.endswith("; no record of rank 3 (the node did not answer)")


def test_no_rank_is_blamed_if_most_records_are_missing():
    evidence = [rank(0, WAITS), *(rank(number, NoRecord.LATE) for number in range(1, 4))]
    assert blamed(evidence) == []
    assert diagnose(evidence).summary == (
        "rank 0 waits in all_reduce #2 of the default group; the evidence does not show which rank is"
        " missing; no record of ranks 1-3 (no answer in time)"
    )


def test_a_receiving_rank_is_blamed_only_if_no_other_rank_is_suspect():
    waiting = [rank(number, WAITS) for number in range(4)]
    both = [*waiting, rank(4, DONE, RECEIVING), rank(5, DONE, OUTSIDE)]
    assert blamed(both) == [((5,), Reason.DID_NOT_ENTER, CERTAIN)]
    assert blamed([*waiting, rank(4, DONE, RECEIVING)]) == [((4,), Reason.DID_NOT_ENTER, POSSIBLE)]


def test_a_majority_is_not_blamed_for_not_entering_a_collective():
    evidence = [rank(0, WAITS), *(rank(number, DONE, OUTSIDE) for number in range(1, 4))]
    assert blamed(evidence) == []
    assert diagnose(evidence).summary == (
        "rank 0 waits in all_reduce #2 of the default group; ranks 1-3 did not enter it"
        " (in __next__ (dataloader.py:741), called at train.py:88): the records do not show which is wrong"
    )


def test_one_of_two_ranks_is_blamed_for_not_entering_a_collective():
    assert blamed([rank(0, WAITS), rank(1, DONE, OUTSIDE)]) == [((1,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_no_rank_is_blamed_if_all_entered_the_collective():
    evidence = [rank(number, calls("all_reduce", backend="nccl", state="started")) for number in range(4)]
    assert blamed(evidence) == []
    assert diagnose(evidence).summary == (
        "4 of 4 ranks wait in all_reduce #1 of the default group; all ranks of the group entered it, so no"
        " rank is to blame"
    )


def test_a_rank_whose_nccl_collective_has_not_started_is_blamed():
    started = calls("all_reduce", backend="nccl", state="started")
    evidence = [*(rank(number, started) for number in range(3)), rank(3, calls("all_reduce", backend="nccl"))]
    assert blamed(evidence) == [((3,), Reason.NOT_STARTED, LIKELY)]


def test_group_members_come_from_the_nccl_record():
    config = {"7": {"name": "7", "desc": "dp", "ranks": "[0, 2, 3]"}}
    waits = dump(calls("all_reduce", backend="nccl", group=("7", "dp")), pg_config=config)
    other = dump([])
    evidence = [rank(0, waits), rank(1, other), rank(2, waits), rank(3, other, OUTSIDE)]
    assert blamed(evidence) == [((3,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_a_rank_outside_collectives_is_blamed_if_group_members_are_unknown():
    waits = calls("all_reduce", group=("7", "dp"))
    others = [rank(number, waits, WAITING) for number in range(3)]
    assert blamed([*others, rank(3, [], OUTSIDE)]) == [((3,), Reason.OUTSIDE, LIKELY)]
    assert blamed([*others, rank(3, [])]) == [((3,), Reason.OUTSIDE, POSSIBLE)]
    assert blamed([*others, rank(3, [], RECEIVING)]) == []


def test_no_rank_is_blamed_if_two_ranks_wait_for_each_other():
    groups = {"1": [0, 1], "2": [0, 1]}
    evidence = [
        rank(0, calls("all_reduce", group=("1", "tp")), groups=groups),
        rank(1, calls("all_reduce", group=("2", "dp")), groups=groups),
    ]
    assert blamed(evidence) == []
    assert diagnose(evidence).summary.endswith(
        '; rank 1 did not enter it and waits in all_reduce #1 of group "dp": '
        "the records do not show which is wrong"
    )


def test_groups_with_the_same_name_are_distinguished_by_their_members():
    waits = calls("all_reduce", group=("7", "tp"))
    evidence = [
        rank(0, calls("barrier", group=("7", "tp")), groups={"7": [0, 1]}),
        rank(1, calls("barrier", group=("7", "tp")), groups={"7": [0, 1]}),
        rank(2, waits, groups={"7": [2, 3]}),
        rank(3, [], OUTSIDE, groups={"7": [2, 3]}),
    ]
    assert blamed(evidence) == [((3,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_entries_of_an_earlier_group_with_the_same_name_are_ignored():
    """The diagnosis ignores the entries of an earlier group with the same name."""
    earlier = [{**raw, "pg_id": 0} for raw in calls("broadcast", *["all_reduce"] * 8, waits=False)]
    later = [{**raw, "pg_id": 5, "record_id": 9 + raw["record_id"]} for raw in WAITS]
    evidence = [rank(0, earlier + later), rank(1, WAITS), rank(2, earlier + later[:1], OUTSIDE)]
    assert blamed(evidence) == [((2,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_overwritten_entries_do_not_prove_that_a_rank_did_not_enter():
    truncated = [{**raw, "record_id": 5000} for raw in calls("all_reduce", group=("3", "tp"), waits=False)]
    evidence = [rank(0, calls("all_reduce")), rank(1, calls("all_reduce")), rank(2, truncated)]
    assert blamed(evidence) == [((2,), Reason.NO_RECORD, POSSIBLE)]
    assert "of which there is no record (overwritten by later calls)" in diagnose(evidence).summary
    assert blamed([*evidence[:2], rank(2, truncated, WAITING)]) == []


def test_an_outdated_record_is_not_used():
    """A record is outdated if it lacks a collective that cannot have completed without its rank."""
    later = calls("all_reduce", "all_reduce", "all_reduce")
    evidence = [rank(0, later), rank(1, later), rank(2, calls("all_reduce"))]
    assert blamed(evidence) == [((2,), Reason.NO_RECORD, POSSIBLE)]
    assert diagnose(evidence).no_record == {2: NoRecord.OUTDATED}


def test_stacks_of_several_nodes_name_who_waits_unless_the_ranks_go_on():
    later = calls("all_reduce", "all_reduce", "all_reduce")
    before = calls("all_reduce", "all_reduce", waits=False)

    def told(last):
        nodes = [[rank(0, later), rank(1, later)], [rank(2, last, node="node1")]]
        sent = [RunningRanks(list(map(observe, ranks)), [], len(ranks)).encoded(2, 3) for ranks in nodes]
        return told_stacks([RunningRanks.decoded(json.loads(json.dumps(each))) for each in sent], 3)

    assert told(before)["message"].startswith("2 of 3 ranks wait in all_reduce #3 ")
    assert (told(before)["ranks"], told(before)["world_size"]) == (3, 3)
    assert told(calls("all_reduce"))["message"] is None
    damaged = [{}, {"evidence": 7, "count": 1, "silent": []}, {"evidence": "!", "count": "x", "silent": [3]}]
    for fields in damaged:
        assert RunningRanks.decoded(fields).count == 0
    row = {"rank": 2, "pid": 7, "can_answer": True, "node": "n"}
    valid = RunningRanks([], [row], 1).encoded(2, 3)
    assert RunningRanks.decoded(valid) == RunningRanks([], [row], 1)
    rows = [
        {**row, **odd} for odd in ({"rank": []}, {"rank": "2"}, {"pid": None}, {"can_answer": 1}, {"node": 7})
    ]
    odd = [{"silent": [each]} for each in rows] + [
        {"count": each} for each in (math.inf, -1, "1", True, None)
    ]
    assert [RunningRanks.decoded({**valid, **each}).silent for each in odd] == [[]] * len(odd)


def test_a_completed_broadcast_does_not_prove_that_all_ranks_entered_it():
    root = calls("all_reduce", "broadcast", "all_reduce")
    evidence = [rank(0, root), rank(1, root), rank(2, DONE, OUTSIDE)]
    assert blamed(evidence) == [((2,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_a_failed_collective_does_not_count_as_completed():
    """gloo marks a failed collective as retired. The record of a rank that did not enter it is not considered
    outdated.
    """
    failed = calls("all_reduce", "all_reduce", waits=False)
    others = [rank(1, WAITS), rank(2, DONE, OUTSIDE)]
    assert blamed([rank(0, failed, has_raised=True), *others]) == [((2,), Reason.DID_NOT_ENTER, CERTAIN)]
    both = [rank(number, failed, has_raised=True) for number in range(2)]
    assert blamed([*both, others[1]]) == [((2,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_variants_of_the_same_operation_match():
    base = calls("_all_gather_base", "all_reduce", backend="nccl")
    listed = calls("all_gather", waits=False, backend="nccl")
    evidence = [rank(0, base), rank(1, base), rank(2, listed, OUTSIDE)]
    assert blamed(evidence) == [((2,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_a_completed_call_of_an_unknown_operation_blames_no_rank():
    """An unknown operation may be a variant of the one that the other ranks called, so no rank is blamed."""
    usual, other = calls("all_reduce", "barrier"), calls("new_all_reduce", "barrier")
    evidence = [*(rank(number, usual) for number in range(3)), rank(3, other)]
    assert blamed(evidence) == []


@pytest.mark.parametrize("name", ["gather", "scatter", "all_to_all"])
def test_different_sizes_in_gather_scatter_and_all_to_all_blame_no_rank(name):
    evidence = [
        rank(number, calls(name, input_sizes=[[number]], input_dtypes=["Float"])) for number in range(3)
    ]
    assert blamed(evidence) == []


def test_shapes_with_the_same_number_of_elements_match():
    shapes = ([4], [2, 2], [1, 4])
    evidence = [rank(number, calls("all_reduce", input_sizes=[shapes[number]])) for number in range(3)]
    assert blamed(evidence) == []


def test_a_rank_with_another_data_type_is_blamed():
    evidence = [rank(number, WAITS) for number in range(3)]
    evidence.append(rank(3, calls("all_reduce", "all_reduce", input_dtypes=["Double"])))
    assert blamed(evidence) == [((3,), Reason.OTHER_CALL, CERTAIN)]
    assert (
        "called all_reduce of 4 Double where 3 ranks called all_reduce of 4 Float"
        in diagnose(evidence).summary
    )


def test_a_majority_among_few_records_is_less_certain():
    evidence = [rank(number, WAITS) for number in range(2)] + [rank(2, calls("all_reduce", "barrier"))]
    evidence += [rank(number, NoRecord.LATE) for number in range(3, 6)]
    assert blamed(evidence) == [((2,), Reason.OTHER_CALL, LIKELY)]


def test_the_parts_of_a_coalesced_collective_count_as_one():
    """NCCL records each part of a coalesced collective, followed by an entry with the state of the whole."""
    parts = calls("all_reduce", "all_reduce", "coalesced", backend="nccl")
    parts = [{**raw, "collective_seq_id": 1} for raw in parts]
    parts[:2] = [{**raw, "state": "scheduled", "retired": False} for raw in parts[:2]]
    done = [*parts[:2], {**parts[2], "state": "completed", "retired": True}]
    assert blamed([rank(0, done), rank(1, done)]) == []
    assert diagnose([rank(0, parts), rank(1, parts)]).collectives[0].operation == "coalesced"


def point_to_point(*names, done=False):
    state = "completed" if done else "scheduled"
    return calls(*names, backend="nccl", is_p2p=True, state=state, retired=done)


def test_the_missing_peer_of_a_receive_is_blamed():
    evidence = [
        rank(0, point_to_point("recv 0<-1")),
        rank(1, point_to_point("recv 1<-2")),
        rank(2, [], OUTSIDE),
        rank(3, []),
    ]
    assert blamed(evidence) == [((2,), Reason.NO_PEER, LIKELY)]


def test_a_chain_of_receives_leads_from_a_collective_to_the_culprit():
    evidence = [
        rank(0, calls("barrier", backend="nccl")),
        rank(1, point_to_point("recv 1<-2")),
        rank(2, point_to_point("send 2->1", done=True), OUTSIDE),
        rank(3, calls("barrier", backend="nccl")),
        rank(4, calls("barrier", backend="nccl")),
    ]
    assert blamed(evidence) == [((2,), Reason.DID_NOT_ENTER, CERTAIN)]


def test_stacks_alone_identify_the_rank_outside_collectives():
    off = [rank(number, NoRecord.OFF, WAITING) for number in range(3)]
    assert blamed([*off, rank(3, NoRecord.OFF, OUTSIDE)]) == [((3,), Reason.OUTSIDE, LIKELY)]
    assert blamed([*off, rank(3, NoRecord.OFF)]) == []
    assert blamed([rank(0, NoRecord.OFF, WAITING), rank(1, NoRecord.OFF, OUTSIDE)]) == []
    summary = diagnose([*off, rank(3, NoRecord.OFF, OUTSIDE)]).summary
    assert summary.startswith("other ranks probably wait for rank 3: it is in __next__ (dataloader.py:741)")


def test_a_diagnosis_without_evidence_is_no_error():
    assert diagnose([]).culprits == ()
    assert diagnose([rank(0, NoRecord.NO_TORCH)]).summary == (
        "no rank waits in a collective that was recorded; no record of rank 0 (torch is not imported)"
    )


def test_a_rank_in_program_code_is_blamed_with_less_confidence():
    """A rank that is in the program's code may be waiting, because ``Work.wait`` has no Python frame."""
    evidence = [rank(0, WAITS), rank(1, DONE, written([Frame("/job/train.py", 5, "step")]))]
    assert blamed(evidence) == [((1,), Reason.DID_NOT_ENTER, LIKELY)]


SIZES = st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2) | st.just([[2**63 - 1] * 64])
ENTRIES = st.builds(
    entry,
    record_id=st.integers(0, 3),
    group=st.tuples(st.sampled_from(["0", "1", "\ud800"]), st.sampled_from(["default_pg", "tp", ""])),
    number=st.integers(0, 3) | st.just(2**62),
    name=st.sampled_from(["gloo:all_reduce", "nccl:barrier", "nccl:recv 0<-1", "send 0->9", ":", "new"]),
    sizes=SIZES,
    pg_id=st.integers(0, 2),
    state=st.sampled_from(["scheduled", "started", "completed"]),
    retired=st.booleans(),
    is_p2p=st.booleans(),
)
CONFIG = st.dictionaries(st.sampled_from("01"), st.lists(st.integers(0, 9), max_size=4), max_size=2)
GROUPS = st.dictionaries(st.sampled_from("01"), st.lists(st.integers(0, 9), max_size=4))
STACKS = st.none() | st.sampled_from([WAITING, OUTSIDE, RECEIVING, "", "nonsense"])


@st.composite
def arbitrary_evidence(draw):
    number = draw(st.integers(0, 7))
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in draw(CONFIG).items()}
    record = dump(draw(st.lists(ENTRIES, max_size=5)), pg_config=config)
    records = draw(st.sampled_from([*NoRecord, b"{}", record, record, record]))
    return rank(number, records, draw(STACKS), draw(GROUPS), draw(st.sampled_from("ab")), draw(st.booleans()))


@given(st.lists(arbitrary_evidence(), max_size=6, unique_by=lambda found: found.rank))
def test_any_evidence_gives_a_consistent_diagnosis(evidence):
    found = diagnose(evidence)
    named = [rank for culprit in found.culprits for rank in culprit.ranks]
    assert len(named) == len(set(named))
    assert all(len(culprit.ranks) > 0 for culprit in found.culprits)
    assert found.summary.isprintable()
