"""If a file system that holds imported modules does not respond, it delays a restart only briefly."""

import threading

import pytest
from helpers import procs
from helpers.said import says

from elasticrs._engine.workers.warm import import_report


@pytest.fixture
def own(tmp_path):
    """Return an imported file."""
    path = tmp_path / "own.py"
    path.write_text("VALUE = 1")
    return path


@pytest.fixture
def ready(own, tmp_path):
    """Return the record with which a nursery reports that it has imported the file."""
    seen = own.stat()
    stamps = {str(own): [seen.st_mtime_ns, seen.st_size]}
    return {"ready": {"seconds": 1, "prefixes": [str(tmp_path / "library")], "stamps": stamps}}


@pytest.fixture
def dead_disk(monkeypatch):
    """Return a function that makes all later file checks hang. They continue once the event that it returns
    is set.
    """
    answers = threading.Event()
    look = import_report.stamp

    def hang():
        monkeypatch.setattr(import_report, "stamp", lambda path: answers.wait() and look(path))
        return answers

    yield hang
    answers.set()


def test_an_edited_file_makes_the_nursery_outdated(warming, own, ready):
    warming.ends(ready, is_ready=True)
    assert warming.may_fork()
    assert (warming.renewed, warming.state.is_warm) == (0, True)
    own.write_text("VALUE = 'edited'")
    assert warming.may_fork()
    (line,) = warming.said
    assert f"{own} has changed" in line
    assert (warming.renewed, warming.state.is_warm) == (1, False)
    edited = own.stat()
    ready["ready"]["stamps"] = {str(own): [edited.st_mtime_ns, edited.st_size]}
    warming.ends(ready, is_ready=True)
    assert warming.may_fork()
    assert (warming.renewed, warming.state.is_warm) == (1, True)


def test_workers_start_cold_if_an_outdated_nursery_has_to_stay(warming, own, ready):
    warming.ends(ready, is_ready=True)
    own.write_text("VALUE = 'edited'")
    assert not warming.may_fork(is_idle=False)
    assert not warming.state.is_warm
    assert str(own) in warming.state.why_cold


def test_a_file_that_changes_during_each_import_is_not_imported_forever(warming, own, ready):
    ready["ready"]["stamps"] = {str(own): [import_report.TOUCHED, 1]}
    for renewed in range(3):
        assert warming.may_fork()
        assert warming.renewed == renewed
        warming.ends(ready, is_ready=True)
        assert warming.state.is_warm
    assert not warming.may_fork()
    assert (warming.renewed, warming.state.is_warm) == (2, False)
    assert str(own) in warming.state.why_cold


def test_an_edit_before_the_first_check_is_noticed(warming, own, ready):
    own.write_text("VALUE = 'edited'")
    warming.ends(ready, is_ready=True)
    assert warming.may_fork()
    assert warming.renewed == 1


def test_a_nursery_that_has_imported_nothing_is_never_outdated(warming, own, ready):
    warming.ends(ready, is_ready=True)
    warming.ends(hung=True, exitcode=-9)
    own.write_text("VALUE = 'edited'")
    assert warming.may_fork()
    assert len(warming.said) == 1


def test_a_hanging_change_check_keeps_the_nursery_in_use(warming, own, ready, dead_disk):
    warming.ends(ready, is_ready=True)
    answers = dead_disk()
    own.write_text("VALUE = 'edited'")
    # The second call does not wait for the check that still hangs, and does not print the message again.
    assert warming.may_fork()
    assert warming.may_fork()
    (line,) = warming.said
    says(line, "warm: ", "files", "0.5 s")
    answers.set()
    # No new check starts until the hanging one has finished.
    procs.wait_until(lambda: warming.may_fork() and warming.renewed)


def test_a_hanging_first_change_check_keeps_the_nursery_in_use(warming, ready, dead_disk):
    dead_disk()
    warming.ends(ready, is_ready=True)
    assert warming.state.is_warm
    assert warming.may_fork()
    (line,) = warming.said
    says(line, "warm: ", "files", "0.5 s")
