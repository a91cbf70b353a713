"""Diagnosis of culprits in real gloo groups, from recorded evidence."""

import itertools
import random

import pytest

from diagnosis.recorded_evidence import RECORDED, recorded
from diagnosis.recording import SCENARIOS
from elasticrs._engine.hangs.culprits import Confidence, Reason
from elasticrs._engine.hangs.diagnose import diagnose

CERTAIN, LIKELY = Confidence.CERTAIN, Confidence.LIKELY

EXPECTED = {
    "missing_rank": [((5,), Reason.DID_NOT_ENTER, CERTAIN)],
    # The rank is in the program's code. It may be in `Work.wait`, which has no Python frame.
    "busy_rank": [((1,), Reason.DID_NOT_ENTER, LIKELY)],
    "skipped": [((2,), Reason.OTHER_CALL, CERTAIN)],
    "wrong_order": [((3,), Reason.OTHER_CALL, CERTAIN)],
    "wrong_size": [((2,), Reason.OTHER_CALL, CERTAIN)],
    "two_against_two": [],
    "groups": [((3,), Reason.DID_NOT_ENTER, CERTAIN)],
    # The rank that skipped a collective is found by comparing the numbers of collectives in all groups.
    "pairs": [((1,), Reason.OTHER_ORDER, LIKELY)],
    "two_missing": [((1, 2), Reason.DID_NOT_ENTER, CERTAIN)],
    "dead_rank": [((1,), Reason.NO_RECORD, CERTAIN)],
    "receiving": [((1,), Reason.DID_NOT_ENTER, CERTAIN)],
}
RECEIVING = "receiving"


def blamed(diagnosis):
    return [(culprit.ranks, culprit.reason, culprit.confidence) for culprit in diagnosis.culprits]


def test_every_scenario_has_a_recording_and_an_expected_result():
    assert set(EXPECTED) == set(SCENARIOS) == {path.stem for path in RECORDED.iterdir()}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_culprit_of_each_recorded_scenario_is_named(name):
    assert blamed(diagnose(recorded(name))) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_less_evidence_names_the_same_ranks_with_less_confidence(name):
    """Missing evidence does not change the culprits, with one exception: only the stacks show that a rank is
    receiving, because gloo does not record that.
    """
    for knows_groups, has_stacks in itertools.product((True, False), repeat=2):
        found = diagnose(recorded(name, knows_groups=knows_groups, has_stacks=has_stacks))
        if name == RECEIVING and not has_stacks:
            assert blamed(found) == [((0, 1), Reason.DID_NOT_ENTER, LIKELY)]
            continue
        assert [culprit.ranks for culprit in found.culprits] == [ranks for ranks, *_ in EXPECTED[name]]
        for culprit, (_, reason, confidence) in zip(found.culprits, EXPECTED[name], strict=True):
            assert culprit.reason is reason
            assert list(Confidence).index(culprit.confidence) >= list(Confidence).index(confidence)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_diagnosis_does_not_depend_on_the_order_of_the_ranks(name):
    expected = diagnose(recorded(name))
    for seed in range(5):
        evidence = recorded(name)
        random.Random(seed).shuffle(evidence)
        assert diagnose(evidence) == expected


def test_the_paragraph_names_the_code_location_of_the_ranks():
    summary = diagnose(recorded("missing_rank")).summary
    assert summary.startswith("7 of 8 ranks wait in all_reduce #3 of the default group (train.py:")
    assert "; rank 5 (node2) did not enter it: it is in wait (threading.py:" in summary
    assert "), called at train.py:" in summary


def test_the_paragraph_names_both_mismatched_calls():
    summary = diagnose(recorded("wrong_size", has_stacks=False)).summary
    assert summary == (
        "rank 2 (node1) is out of step at #2 of the default group: called all_reduce of 8 Float where 3 ranks"
        " called all_reduce of 4 Float"
    )


def test_the_paragraph_names_both_sides_of_a_tie():
    assert diagnose(recorded("two_against_two")).summary == (
        "ranks 0, 2 (node0, node1) called barrier and ranks 1, 3 (node0, node1) called all_reduce of 4 Float"
        " as #2 of the default group: the records do not show which is wrong"
    )


def test_a_chain_of_groups_leads_to_the_rank_that_is_stuck():
    found = diagnose(recorded("groups"))
    (culprit,) = found.culprits
    assert culprit.collective is not None
    assert (culprit.collective.description, culprit.collective.members) == ("tp", (2, 3))
    assert found.summary.endswith("; 2 more ranks wait in other collectives")


def test_a_rank_that_has_exited_is_named():
    summary = diagnose(recorded("dead_rank")).summary
    assert "; they wait for rank 1 (node0), of which there is no record (exited)" in summary
