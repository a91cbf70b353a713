"""The agent reads and prints the report of the process that imports modules, and notices edited files and
changed distributions before each attempt.
"""

import json
import os
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from helpers import procs
from helpers.said import says
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.workers.warm import import_report
from elasticrs._engine.workers.warm.import_report import (
    TOUCHED,
    LeftOut,
    Ready,
    Report,
    Sources,
    Warming,
    stamp,
)


class Reports:
    """An agent's state of warm starts. The test sends the reports that a nursery would send.

    Attributes:
        said: the messages printed so far.
        renewed: number of nurseries that were stopped so that the next one imports again.
    """

    def __init__(self):
        self.said = []
        self.renewed = 0
        self.state = Warming(self.said.append, 120.0)

    def ends(self, *records, **event):
        """Report these records, and the end of the importing process."""
        os.write(self.state.report, b"".join(json.dumps(record).encode() + b"\n" for record in records))
        usual = {"is_ready": False, "hung": False, "exitcode": None}
        self.state.ended(SimpleNamespace(**{**usual, **event}))

    def may_fork(self, is_idle=True):
        """Return true if workers may be forked. ``is_idle`` is false if the supervisor keeps its nursery."""

        def renew():
            self.renewed += is_idle
            return is_idle

        return self.state.may_fork(SimpleNamespace(renew_nursery=renew))


@pytest.fixture
def warming():
    made = Reports()
    yield made
    made.state.close()


# --- the report ---

READY = {
    "seconds": 4.25,
    "prefixes": ["/lib"],
    "stamps": {"/a.py": [7, 8], "/b.py": []},
}
TOLD = [
    {"importing": "json"},
    {"imported": "json", "seconds": 0.02},
    {"importing": "deep_speedup"},
    {"left_out": "deep_speedup", "why": "a thread", "traceback": None},
    {"importing": "broken"},
    {
        "left_out": "broken",
        "why": "it raises KeyError at import",
        "traceback": "Trace:\n  File\nKeyError: 'X'\n",
    },
    {"importing": "ends"},
    {"ended": 3},
    {"importing": "json"},
    {"imported": "json", "seconds": 1},
    {"importing": "torch:nn"},
    {"imported": "torch:nn", "seconds": 3.21},
    {"ready": READY},
]


def lines(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_an_import_report_is_read_from_its_records():
    found = import_report.read(lines(TOLD))
    assert [each.name for each in found.left_out] == ["deep_speedup", "broken", "ends"]
    assert found.left_out[:2] == (
        LeftOut("deep_speedup", "a thread", []),
        LeftOut("broken", "it raises KeyError at import", ["Trace:", "  File", "KeyError: 'X'"]),
    )
    assert "exit code 3" in found.left_out[2].why
    ready = Ready(4.25, ("/lib",), {"/a.py": (7, 8), "/b.py": None})
    assert found == Report({"json": 1.0, "torch.nn": 3.21}, found.left_out, None, ready)


@given(st.integers(0, len(lines(TOLD))))
def test_an_incomplete_last_line_is_ignored(size):
    data = lines(TOLD)
    whole = data[:size].count(b"\n")
    assert import_report.read(data[:size]) == import_report.read(lines(TOLD[:whole]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*READY, "x")), inner),
    max_leaves=5,
)
NAMES = ("failed", *(name for record in TOLD for name in record))
RECORDS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3)


@given(st.lists(RECORDS, max_size=5), st.binary(max_size=20))
def test_arbitrary_report_content_gives_only_printable_text(records, junk):
    found = import_report.read(lines(records) + junk)
    if found.ready is not None:
        Sources(found.ready.stamps, found.ready.prefixes, found.imported).changes()
    shown = [line for one in found.left_out for line in (one.name, one.why, *one.traceback)]
    assert all(line.isprintable() for line in (*shown, found.importing or "", *found.imported))


def test_an_import_report_is_printed_as_messages(warming):
    def told(records, **event):
        warming.said.clear()
        warming.ends(*records, **event)
        return warming.said

    assert told(TOLD, is_ready=True) == [
        "warm: deep_speedup was left out: a thread",
        "warm: broken was left out: it raises KeyError at import",
        *("  Trace:", "    File", "  KeyError: 'X'"),
        "warm: ends was left out: it ends the process at import (exit code 3)",
    ]
    assert warming.state.is_warm
    assert warming.state.found.ready == Ready(4.25, ("/lib",), {"/a.py": (7, 8), "/b.py": None})
    # Each of the following calls simulates a new importing process.
    cold = "warm: workers start cold: "
    assert told(TOLD[8:11], hung=True) == [f"{cold}the import of torch.nn did not end within 120 s"]
    assert not warming.state.is_warm
    assert told(TOLD[:1], exitcode=-9) == [f"{cold}the import of json died by SIGKILL"]
    assert told([], exitcode=3) == [f"{cold}its start exited with code 3"]
    failed = {"failed": "OSError: no", "traceback": "Trace:\nOSError: no"}
    assert told([failed], exitcode=1) == [f"{cold}OSError: no", "  Trace:", "  OSError: no"]


# --- changes of files ---

SITE = "lib/python3/site-packages"
STAMP = "elasticrs._engine.workers.warm.import_report.stamp"


@pytest.fixture
def tree(tmp_path):
    """Create an interpreter's library with an installed package, and a user's own code outside it."""
    for name in (
        "lib/python3/json/__init__.py",
        f"{SITE}/torch/__init__.py",
        f"{SITE}/torch-2.0.dist-info/RECORD",
        f"{SITE}/other-1.0.dist-info/RECORD",
        "src/own/__init__.py",
        "src/own/model.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n")
    return tmp_path


FILES = (
    "lib/python3/json/__init__.py",
    f"{SITE}/torch/__init__.py",
    "src/own/__init__.py",
    "src/own/model.py",
)


def look_at(tree):
    files = [str(tree / name) for name in FILES]
    prefixes = [str(tree / name) for name in ("lib/python3", SITE, "lib/no-such-folder")]
    return Sources({path: stamp(path) for path in (*files, *prefixes)}, prefixes, ["json", "torch.nn"])


def later(path):
    """Increase the modification time, because two changes in quick succession may get the same time."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))


def test_own_files_installed_files_and_distributions_are_recorded(tree):
    found = look_at(tree)
    names = [
        [os.path.relpath(path, tree) for path in stamps]
        for stamps in (found.own, found.installed, found.signs)
    ]
    assert names[:2] == [[*FILES[2:]], [*FILES[:2]]]
    record = f"{SITE}/torch-2.0.dist-info/RECORD"
    assert set(names[2]) == {"lib/python3", SITE, "lib/no-such-folder", record}


def test_in_place_edits_of_installed_files_are_not_reported(tree):
    sources = look_at(tree)
    (tree / "src/other.py").write_text("pass\n")
    (tree / SITE / "torch/__init__.py").write_text("edited in place\n")
    assert sources.changes() == {}


def test_edited_and_removed_user_files_are_reported(tree):
    sources, path = look_at(tree), tree / "src/own/model.py"
    before = path.stat()
    path.write_text("edited\n")
    assert [*sources.changes()] == [str(path)]
    path.write_text("pass\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sources.changes() == {}
    path.unlink()
    assert [*sources.changes()] == [str(path)]


@pytest.mark.parametrize("restores_time", [False, True])
def test_files_of_a_changed_distribution_are_reported(tree, restores_time):
    site = tree / SITE
    before = site.stat()
    sources, path = look_at(tree), site / "torch/__init__.py"
    (site / "torch-2.0.dist-info").rename(site / "torch-2.1.dist-info")
    path.write_text("another release\n")
    if restores_time:
        os.utime(site, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        later(site)
    assert [*sources.changes()] == [str(path)]


def test_adding_a_distribution_reports_no_change(tree, monkeypatch):
    sources, site = look_at(tree), tree / SITE
    torch, looked = str(site / "torch/__init__.py"), []

    def look(path):
        looked.append(path)
        return stamp(path)

    monkeypatch.setattr(STAMP, look)
    for number, name in enumerate(("third-1.0.dist-info", "fourth-1.0.dist-info", "__pycache__"), 1):
        (site / name).mkdir()
        later(site)
        assert sources.changes() == {}
        # This call does not compare the files, because the folder has not changed again.
        assert sources.changes() == {}
        assert looked.count(torch) == number
    (site / "torch/__init__.py").unlink()
    later(site)
    assert sources.changes() == {torch: None}


STAMPS = st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3))
PATHS = ("/a", "/b", "/lib/c", "/lib/d", "/lib")


@given(st.fixed_dictionaries(dict.fromkeys(PATHS, STAMPS)), st.dictionaries(st.sampled_from(PATHS), STAMPS))
def test_all_files_that_differ_are_reported(before, changes):
    now = {**before, **changes}
    with patch(STAMP, before.__getitem__):
        sources = Sources(before, ["/lib"], [])
    with patch(STAMP, now.get):
        found = sources.changes()
    # Files are compared in the order in which they were recorded, the user's files first.
    own = [path for path in before if path in PATHS[:2]]
    installed = [path for path in before if path in PATHS[2:4]]
    compared = [*own, *installed] if now["/lib"] != before["/lib"] else own
    assert [*found.items()] == [(path, now[path]) for path in compared if now[path] != before[path]]


def test_an_installed_file_that_changed_during_the_import_is_reported(tree):
    path = tree / SITE / "torch/__init__.py"
    stamps = {str(path): (TOUCHED, path.stat().st_size), str(tree / SITE): stamp(str(tree / SITE))}
    found = Sources(stamps, [str(tree / SITE)], ["torch"])
    assert found.changes() == {str(path): stamp(str(path))}


# --- the decision whether workers may be forked ---


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
    ready["ready"]["stamps"] = {str(own): [TOUCHED, 1]}
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
