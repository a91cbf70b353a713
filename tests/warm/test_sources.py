"""Edited files of preloaded modules and changed distributions are noticed."""

import os
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.workers.warm.import_report import TOUCHED, remember, stamp

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
    return remember({path: stamp(path) for path in (*files, *prefixes)}, prefixes, ["json", "torch.nn"])


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
        sources = remember(before, ["/lib"], [])
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
    found = remember(stamps, [str(tree / SITE)], ["torch"])
    assert found.changes() == {str(path): stamp(str(path))}
