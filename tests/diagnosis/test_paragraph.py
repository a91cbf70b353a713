"""Descriptions of large and unusual jobs in a paragraph."""

from types import SimpleNamespace

import pytest

from diagnosis.recorded_evidence import recorded
from diagnosis.test_culprits import DONE, OUTSIDE, WAITING, WAITS, calls, rank
from elasticrs import _core
from elasticrs._engine.hangs import diagnose as diagnosing
from elasticrs._engine.hangs.diagnose import diagnose, failed, ranks_text
from elasticrs._engine.hangs.flight_record import NoRecord
from elasticrs._engine.job.phrases import spans
from elasticrs._engine.supervise import hang_diagnosis
from elasticrs._engine.supervise.attempt import Attempt
from elasticrs._engine.supervise.failed_attempt import why_expired
from elasticrs._engine.supervise.run.tracker import AttemptTracker
from elasticrs._engine.workers.plan import Plan, WorkerRanks


def large(size, absent, *, ranks_per_node=8, record=DONE, stacks=OUTSIDE):
    return [
        rank(
            number,
            record if number in absent else WAITS,
            stacks if number in absent else WAITING,
            node=f"node{number // ranks_per_node}",
        )
        for number in range(size)
    ]


def test_missing_ranks_of_one_node_are_named_with_their_node():
    assert diagnose(large(32, range(4, 8))).summary == (
        "28 of 32 ranks wait in all_reduce #2 of the default group (train.py:88); ranks 4-7 (node0) did not"
        " enter it: they are in __next__ (dataloader.py:741), called at train.py:88"
    )


def test_a_missing_rank_is_named_with_its_node():
    assert diagnose(large(4, [2], ranks_per_node=1)).summary == (
        "3 of 4 ranks wait in all_reduce #2 of the default group (train.py:88); rank 2 (node2) did not enter"
        " it: it is in __next__ (dataloader.py:741), called at train.py:88"
    )


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (NoRecord.EXITED, "; it waits for rank 1, of which there is no record (exited)"),
        (DONE, "; rank 1 did not enter it, and rank 0 probably waits for it"),
    ],
)
def test_a_single_waiting_rank_is_not_called_the_others(record, said):
    assert said in diagnose([rank(0, WAITS, WAITING), rank(1, record)]).summary


def test_the_node_is_not_named_in_a_single_node_job():
    assert "; rank 2 did not enter it: it is in" in diagnose(large(4, [2])).summary


def test_a_thousand_ranks_give_a_short_paragraph():
    summary = diagnose(large(1000, range(0, 1000, 3))).summary
    assert summary.startswith("666 of 1,000 ranks wait in all_reduce #2")
    assert "ranks 0, 3, 6, 9, 12, 15 and 328 more (125 nodes) did not enter it" in summary
    assert len(summary) < 300


def test_ranks_whose_call_is_named_are_not_counted_again():
    # The other ranks have completed the collective in which rank 1 made another call, and wait in the next
    # collective.
    evidence = [rank(number, calls("barrier") if number == 1 else WAITS, WAITING) for number in range(3)]
    summary = diagnose(evidence).summary
    assert "where 2 ranks called" in summary
    assert "more rank" not in summary


def test_each_culprit_gets_its_own_clause():
    groups = {str(number): [2 * number, 2 * number + 1] for number in range(4)}
    evidence = []
    for number in range(8):
        name = str(number // 2)
        entries = calls("all_reduce", group=(name, "tp")) if number % 2 == 0 else []
        evidence.append(
            rank(number, entries, OUTSIDE if number % 2 else WAITING, {name: groups[name]}, f"node{number}")
        )
    summary = diagnose(evidence).summary
    clauses = summary.split("; ")
    assert clauses[:2] == [
        'rank 0 (node0) waits in all_reduce #1 of group "tp" (ranks 0, 1) (train.py:88)',
        "rank 1 (node1) did not enter it: it is in __next__ (dataloader.py:741), called at train.py:88",
    ]
    assert clauses[6] == "1 more rank is suspect"


def test_different_code_locations_of_ranks_are_listed_and_counted():
    evidence = large(8, [1, 2, 3])
    for number in (2, 3):
        stacks = OUTSIDE.replace("dataloader", f"loader{number}")
        evidence[number] = evidence[number]._replace(stacks=stacks)
    assert diagnose(evidence).summary.endswith(
        "ranks 1-3 did not enter it: they are in __next__ (dataloader.py:741), called at train.py:88 (rank 1)"
        ", in __next__ (loader2.py:741), called at train.py:88 (rank 2), in 1 other place"
    )


def test_names_from_workers_are_escaped():
    evidence = [
        rank(0, calls("all_reduce", group=("0", "\x1b[2J")), node="node\n1"),
        rank(1, [], node="b"),
        rank(2, calls("barrier", group=("0", "\x1b[2J")), node="c\x07"),
    ]
    assert diagnose(evidence).summary.isprintable()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2, 8], "ranks 0-2, 8"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10 and 14 more"),
    ],
)
def test_ranks_are_written_as_ranges(ranks, text):
    assert ranks_text(ranks) == text


def test_spans_groups_consecutive_numbers():
    assert spans([]) == []
    assert spans([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]


def breaks(*_, **__):
    raise KeyError("a\ndefect")


@pytest.fixture
def attempt():
    ranks = [WorkerRanks("", rank, rank, 0, rank, 2, 2, 1, 2) for rank in range(2)]
    return Attempt(0, 0, Plan(ranks, "", 0))


def test_an_exception_in_the_comparison_of_the_records_becomes_the_summary(monkeypatch):
    monkeypatch.setattr(diagnosing, "match", breaks)
    found = diagnosing.telling([diagnosing.observe(each) for each in recorded("missing_rank")])
    assert (found.culprits, found.candidates) == ((), ())
    assert "KeyError" in found.summary
    assert "test_paragraph.py:" in found.summary
    assert "\n" not in found.summary


def test_an_exception_while_the_evidence_is_read_is_told_in_one_line(monkeypatch, attempt):
    told = []
    tracker = SimpleNamespace(_console=SimpleNamespace(say=told.append))
    monkeypatch.setattr(hang_diagnosis, "_facts", breaks)
    AttemptTracker._diagnose(tracker, attempt, lambda: hang_diagnosis.examine(attempt))
    assert told == [attempt.diagnosis.summary]
    assert "KeyError" in told[0]


def test_an_exception_in_the_text_about_a_hang_leaves_the_other_facts(monkeypatch, attempt):
    monkeypatch.setattr(hang_diagnosis, "hung", breaks)
    attempt.append(SimpleNamespace(local_rank=1, seen_ns=7), _core.WorkerHung)
    text = why_expired(attempt, 1)
    assert text.startswith("hung; the diagnosis failed")
    assert "KeyError" in text


def test_the_text_of_an_exception_is_limited():
    assert len(failed(ValueError("x" * 10_000)).summary) < 400
