"""If a file system that holds imported modules does not respond, it delays a restart only briefly."""

import json
import os
import threading
from types import SimpleNamespace

import pytest
from helpers import procs
from helpers.said import says

from elasticrs.agent.warming import Warming
from elasticrs.workers.warm import sources

NOTHING_BESIDE = SimpleNamespace(take_over=lambda: False)


@pytest.fixture
def nursery(tmp_path):
    """Provide the agent's state of warm starts, a function that makes the nursery ready, an imported file,
    and the messages printed so far.
    """
    said = []
    warming = Warming(said.append, 120.0)
    own = tmp_path / "own.py"
    own.write_text("VALUE = 1")
    seen = own.stat()
    ready = {
        "seconds": 1,
        "prefixes": [str(tmp_path / "library")],
        "stamps": {str(own): [seen.st_mtime_ns, seen.st_size]},
    }

    def is_ready():
        os.write(warming.report, json.dumps({"ready": ready}).encode() + b"\n")
        warming.ended(SimpleNamespace(is_ready=True, hung=False, exitcode=None, is_beside=False))

    yield warming, is_ready, own, said
    warming.close()


@pytest.fixture
def dead_disk(monkeypatch):
    """Return a function that makes all later file checks hang. They continue once the event that it returns
    is set.
    """
    answers = threading.Event()
    look = sources.stamp

    def hang():
        monkeypatch.setattr(sources, "stamp", lambda path: answers.wait() and look(path))
        return answers

    yield hang
    answers.set()


def test_an_edited_file_is_noticed(nursery):
    warming, is_ready, own, said = nursery
    is_ready()
    assert warming.may_fork(NOTHING_BESIDE)
    own.write_text("VALUE = 'edited'")
    assert not warming.may_fork(NOTHING_BESIDE)
    assert len(said) == 1
    assert f"{own} has changed" in said[0]
    assert not warming.is_warm
    assert str(own) in warming.why_cold


def test_a_nursery_that_has_imported_nothing_is_never_outdated(nursery):
    warming, is_ready, own, said = nursery
    is_ready()
    warming.ended(SimpleNamespace(is_ready=False, hung=True, exitcode=-9, is_beside=False))
    own.write_text("VALUE = 'edited'")
    assert warming.may_fork(NOTHING_BESIDE)
    assert len(said) == 1


def test_a_check_that_hangs_keeps_the_nursery(nursery, dead_disk):
    warming, is_ready, own, said = nursery
    is_ready()
    answers = dead_disk()
    own.write_text("VALUE = 'edited'")
    # The second call does not wait for the check that still hangs, and does not print the message again.
    assert warming.may_fork(NOTHING_BESIDE)
    assert warming.may_fork(NOTHING_BESIDE)
    (line,) = said
    says(line, "warm: ", "files", "0.5 s")
    answers.set()
    # No new check starts until the hanging one has finished.
    procs.wait_until(lambda: not warming.may_fork(NOTHING_BESIDE))


def test_a_first_check_that_hangs_keeps_the_nursery(nursery, dead_disk):
    warming, is_ready, _, said = nursery
    dead_disk()
    is_ready()
    assert warming.is_warm
    assert warming.may_fork(NOTHING_BESIDE)
    (line,) = said
    says(line, "warm: ", "files", "0.5 s")
