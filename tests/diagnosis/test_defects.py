"""An exception in the code of the diagnosis never hides the failure that is being diagnosed."""

from types import SimpleNamespace

import pytest

from elasticrs._engine.hangs import diagnose
from elasticrs._engine.hangs.values import failed
from elasticrs._engine.job.ranks import WorkerRanks
from elasticrs._engine.supervise.attempts import hangs
from elasticrs._engine.supervise.attempts.attempt import Attempt, Overdue
from elasticrs._engine.supervise.failures import hang_diagnosis
from elasticrs._engine.supervise.run.tracker import AttemptTracker
from elasticrs._engine.workers.plan import Plan


def breaks(*_, **__):
    raise KeyError("a\ndefect")


@pytest.fixture
def attempt():
    ranks = [WorkerRanks("", rank, rank, 0, rank, 2, 2, 1, 2) for rank in range(2)]
    return Attempt(0, 0, Plan(ranks, "", 0))


def test_an_exception_in_the_comparison_of_the_records_becomes_the_summary(monkeypatch):
    from diagnosis.recorded_evidence import recorded

    monkeypatch.setattr(diagnose, "match", breaks)
    found = diagnose.telling([diagnose.observe(each) for each in recorded("missing_rank")])
    assert (found.ranks, found.culprits, found.candidates) == (8, (), ())
    assert "KeyError" in found.summary
    assert "test_defects.py:" in found.summary
    assert "\n" not in found.summary


def test_an_exception_while_the_evidence_is_read_is_told_in_one_line(monkeypatch, attempt):
    told = []
    tracker = SimpleNamespace(_console=SimpleNamespace(say=told.append))
    monkeypatch.setattr(hang_diagnosis, "_facts", breaks)
    AttemptTracker._diagnose(tracker, attempt, lambda: hang_diagnosis.examine(attempt))
    assert told == [attempt.diagnosis.summary]
    assert "KeyError" in told[0]


def test_an_exception_in_the_text_about_a_hang_leaves_the_other_facts(monkeypatch, attempt):
    monkeypatch.setattr(hangs, "hung", breaks)
    attempt.expired[1] = Overdue(7, hung=SimpleNamespace())
    text = attempt.why_expired(1)
    assert text.startswith("hung; the diagnosis failed")
    assert "KeyError" in text


def test_the_text_of_an_exception_is_limited():
    assert len(failed(ValueError("x" * 10_000)).summary) < 400
