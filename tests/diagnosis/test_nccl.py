"""Records of NCCL 2.28.9 with torch 2.11 on a GPU. One job has finished its collectives. In the other, the
last two collectives wait behind an endless kernel.
"""

import json
from pathlib import Path

import pytest

from elasticrs._engine.hangs.diagnose import diagnose
from elasticrs._engine.hangs.flight_record import State, parse
from elasticrs._engine.hangs.values import Confidence, RankEvidence, Reason

RECORDS = Path(__file__).resolve().parent / "nccl"
NCCL, GLOO = "_dump_nccl_trace_json", "_dump_fr_trace_json"


def record(name, dump=NCCL, ranks=None):
    """Return a record. If ``ranks`` is given, these ranks replace the members of its groups."""
    document = json.loads((RECORDS / f"{name}.json").read_text())[dump]
    for group in document["pg_config"].values() if ranks else ():
        group["ranks"] = str(ranks)
    return json.dumps(document).encode()


def test_the_state_of_a_finished_collective_is_completed():
    found = parse(record("done"))
    entries = [
        (each.group_name, each.group_description, each.collective_seq_id, each.operation)
        for each in found.entries
    ]
    assert entries == [
        ("0", "default_pg", 1, "all_reduce"),
        ("1", "dp", 1, "all_reduce"),
        ("1", "dp", 2, "broadcast"),
        ("0", "default_pg", 2, "all_gather"),
    ]
    assert {(each.backend, each.state, each.retired) for each in found.entries} == {
        ("nccl", State.COMPLETED, True)
    }
    assert all(each.is_complete for each in found.entries)
    assert found.members == {"0": (0,), "1": (0,)}


def test_the_state_of_a_collective_behind_an_endless_kernel_is_scheduled():
    waiting = [each for each in parse(record("stuck")).entries if not each.is_complete]
    assert [(each.group_name, each.collective_seq_id, each.operation) for each in waiting] == [
        ("1", 3, "all_reduce"),
        ("0", 3, "all_reduce"),
    ]
    assert {(each.backend, each.state, each.retired) for each in waiting} == {
        ("nccl", State.SCHEDULED, False)
    }


def test_completed_gloo_entries_stay_in_state_scheduled():
    entries = parse(record("stuck", GLOO)).entries
    assert {(each.backend, each.state, each.retired) for each in entries} == {("gloo", State.SCHEDULED, True)}
    assert all(each.is_complete for each in entries)


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_rank_is_blamed_if_all_entered_the_collective(ranks):
    members = list(range(ranks))
    found = diagnose(
        RankEvidence(rank, "node1", (record("stuck", GLOO), record("stuck", ranks=members)))
        for rank in members
    )
    assert not found.culprits
    assert "all ranks of the group entered it, so no rank is to blame" in found.summary
    assert {(each.backend, each.seq) for each in found.collectives} == {("nccl", 3)}


def test_the_rank_that_has_not_enqueued_a_collective_is_named():
    members = [0, 1, 2, 3]
    found = diagnose(
        RankEvidence(rank, "node1", (record("done" if rank == 2 else "stuck", ranks=members),))
        for rank in members
    )
    (culprit,) = found.culprits
    assert (culprit.ranks, culprit.reason, culprit.confidence) == (
        (2,),
        Reason.DID_NOT_ENTER,
        Confidence.CERTAIN,
    )
    assert "3 of 4 ranks wait in all_reduce #3 of" in found.summary
