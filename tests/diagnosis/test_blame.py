"""Blame for a hang, based on flight records and heartbeats together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.recorded_evidence import recorded
from diagnosis.test_simulated import SHAPES, simulated
from diagnosis.test_stacks import REDUCE, STEP
from elasticrs._engine.hangs.culprits import Basis, Blame, decide, decide_failure, out_of_line
from elasticrs._engine.hangs.diagnose import diagnose
from elasticrs._engine.hangs.flight_record import NoRecord

GROUNDS = ("stopped", "behind", "elsewhere", "apart", "oldest")


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize(("name", "guilty"), [("skipped", 2), ("missing_rank", 5), ("groups", 3)])
def test_conclusive_records_decide_whatever_the_heartbeats_say(name, guilty, ground):
    assert decide(diagnose(recorded(name)), 0, ground) == Blame((guilty,), True, Basis.RECORDS)


def test_no_rank_is_blamed_if_the_records_are_undecided():
    diagnosis = diagnose(recorded("two_against_two"))
    blame = decide(diagnosis, 1, "behind")
    assert (blame.ranks, blame.is_decided) == ((0, 1, 2, 3), False)
    assert blame.text == "undecided, candidates: ranks 0-3"
    # A stopped rank is blamed anyway, because the state of its process is proof.
    assert decide(diagnosis, 1, "stopped") == Blame((1,), True, Basis.HEARTBEATS)


def test_heartbeats_decide_without_records():
    assert decide(None, 3, "oldest") == Blame((3,), True, Basis.HEARTBEATS)


@pytest.mark.parametrize(
    ("ground", "suspects", "left", "blame"),
    [
        ("oldest", (), (2,), Blame((2,), False, Basis.EXIT)),
        ("behind", (3,), (2,), Blame((2, 3), False, Basis.EXIT)),
        ("oldest", (0, 1, 3), (), Blame((0, 1, 3), False, Basis.HEARTBEATS)),
        ("oldest", (3,), (), Blame((3,), True, Basis.HEARTBEATS)),
        ("stopped", (3,), (2,), Blame((3,), True, Basis.HEARTBEATS)),
    ],
)
def test_a_rank_that_has_exited_is_a_candidate_if_only_heartbeats_decide(ground, suspects, left, blame):
    assert decide(None, 3, ground, suspects=suspects, left=left) == blame
    # Records that name a rank decide, also if another rank has exited.
    assert decide(diagnose(recorded("skipped")), 3, ground, suspects=suspects, left=left).ranks == (2,)


@given(st.integers(0, 10**9), st.data())
def test_the_faulty_rank_is_blamed_or_a_candidate(seed, data):
    found = simulated(seed, SHAPES)
    if found is None:
        return
    run, rank = found
    silent = data.draw(st.integers(0, len(run.called) - 1))
    blame = decide(diagnose(run.evidence()), silent, data.draw(st.sampled_from(GROUNDS[1:])))
    assert rank in blame.ranks
    assert not blame.is_decided or blame.ranks == (rank,)


def aborted_by_gloo(run):
    """Return the ranks that gloo may abort in a simulated job. Gloo may abort a rank that expects less data
    than another rank of its group sends.
    """
    calls = {}
    for rank, called in enumerate(run.called):
        for group, number, (_, name, elements) in called:
            if (rank, group, number) not in run.complete and name in ("all_reduce", "all_gather"):
                calls.setdefault((group, number, name), {})[rank] = elements
    return sorted(
        rank for sizes in calls.values() for rank, elements in sizes.items() if elements < max(sizes.values())
    )


@given(st.integers(0, 10**9), st.data())
def test_the_rank_that_gloo_has_aborted_is_blamed_only_if_it_is_the_faulty_one(seed, data):
    run, faulty = simulated(seed, SHAPES) or (None, 0)
    aborted = [] if run is None else aborted_by_gloo(run)
    if not aborted:
        return
    rank = data.draw(st.sampled_from(aborted))
    evidence = run.evidence()
    evidence[rank] = evidence[rank]._replace(records=NoRecord.ABORTED, frames=(*REDUCE, *STEP))
    # A rank may be stopped before it has written its flight record.
    late = data.draw(st.sampled_from([None, *(each for each in range(len(evidence)) if each != rank)]))
    if late is not None:
        evidence[late] = evidence[late]._replace(records=NoRecord.LATE)
    blame = decide_failure(diagnose(evidence), rank, range(len(evidence)), may_be_innocent=True)
    assert blame is not None
    assert faulty in blame.ranks
    assert not blame.is_decided or blame.ranks == (faulty,)


def test_an_aborted_rank_is_a_candidate_if_there_are_no_records():
    undecided = Blame((0, 1, 2), False, Basis.RECORDS)
    assert decide_failure(None, 1, range(3), may_be_innocent=True) == undecided
    assert decide_failure(None, 1, range(3)) is None
    assert decide_failure(None, 0, range(1), may_be_innocent=True) == Blame((0,), True, Basis.RECORDS)


def test_the_only_rank_that_does_not_fit_into_the_order_of_all_is_out_of_line():
    # For each rank: numbers of collectives in tensor-parallel groups, data-parallel groups and the default
    # group.
    in_order = {0: (18, 8, 0), 2: (18, 9, 0), 3: (18, 9, 1)}
    assert out_of_line(in_order) is None
    assert out_of_line({**in_order, 1: (17, 9, 1)}) == 1
    # Two ranks contradict each other, and no other rank shows which of them is right.
    assert out_of_line({0: (2, 1), 1: (1, 2)}) is None
    assert out_of_line({0: (2, 1), 1: (1, 2), 2: (1, 2)}) == 0
