"""Records of NCCL 2.28.9 with torch 2.11 on a GPU. One job has finished its collectives. In the other, the
last two collectives wait behind an endless kernel.
"""

import json
from pathlib import Path

import pytest

from elasticrs._engine.hangs.culprits import Confidence, Reason
from elasticrs._engine.hangs.diagnose import RankEvidence, diagnose
from elasticrs._engine.hangs.flight_record import parse

RECORDS = Path(__file__).resolve().parent / "nccl"
NCCL, GLOO = "_dump_nccl_trace_json", "_dump_fr_trace_json"


def record(name, dump=NCCL, ranks=None):
    """Return a record. If ``ranks`` is given, these ranks replace the members of its groups."""
    document = json.loads((RECORDS / f"{name}.json").read_text())[dump]
    for group in document["pg_config"].values() if ranks else ():
        group["ranks"] = str(ranks)
    return json.dumps(document).encode()


def calls(name, dump=NCCL):
    """Return the calls of a record in two groups: whether they have completed and started on the device."""
    return {
        key: [
            (seq, step.call.operation, step.is_complete, step.is_started) for seq, step in group.steps.items()
        ]
        for key, group in parse([record(name, dump)]).groups.items()
    }


def test_a_finished_collective_has_completed():
    found = parse([record("done")])
    assert {key: group.description for key, group in found.groups.items()} == {
        ("nccl", "0"): "default_pg",
        ("nccl", "1"): "dp",
    }
    assert calls("done") == {
        ("nccl", "0"): [(1, "all_reduce", True, True), (2, "all_gather", True, True)],
        ("nccl", "1"): [(1, "all_reduce", True, True), (2, "broadcast", True, True)],
    }
    assert found.members == {"0": (0,), "1": (0,)}


def test_a_collective_behind_an_endless_kernel_has_not_started():
    waiting = {key: [call for call in found if not call[2]] for key, found in calls("stuck").items()}
    assert waiting == {
        ("nccl", "1"): [(3, "all_reduce", False, False)],
        ("nccl", "0"): [(3, "all_reduce", False, False)],
    }


def test_completed_gloo_collectives_seem_not_to_have_started():
    ((key, found),) = calls("stuck", GLOO).items()
    assert key[0] == "gloo"
    assert {call[2:] for call in found} == {(True, False)}


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
