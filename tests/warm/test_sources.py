"""An edited file of a preloaded module is noticed, and so is a changed distribution."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs.warm.sources import remember

SITE = "lib/python3/site-packages"


@pytest.fixture
def tree(tmp_path):
    """An interpreter with an installed package, and code of the user's beside it."""
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


def look_at(tree):
    files = ["lib/python3/json/__init__.py", f"{SITE}/torch/__init__.py", "src/own/__init__.py"]
    files += ["src/own/model.py", "src/own/__init__.py"]
    prefixes = [tree / "lib/python3", tree / SITE, tree / "lib/no-such-folder"]
    return remember(
        [str(tree / name) for name in files], [str(prefix) for prefix in prefixes], ["json", "torch.nn"]
    )


def test_what_is_compared(tree):
    names = [os.path.relpath(path, tree) for path in look_at(tree).stamps]
    assert names[:2] == ["src/own/__init__.py", "src/own/model.py"]
    assert set(names[2:]) == {
        *("lib/python3", SITE, "lib/no-such-folder"),
        f"{SITE}/torch-2.0.dist-info/RECORD",
    }


def test_nothing_changed(tree):
    sources = look_at(tree)
    (tree / "src/other.py").write_text("pass\n")
    (tree / SITE / "torch/__init__.py").write_text("edited in place\n")
    assert sources.changed() is None


def test_code_of_the_user_changes(tree):
    sources, path = look_at(tree), tree / "src/own/model.py"
    before = path.stat()
    path.write_text("edited\n")
    assert sources.changed() == str(path)
    path.write_text("pass\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sources.changed() is None
    path.unlink()
    assert sources.changed() == str(path)


@pytest.mark.parametrize("restores_time", [False, True])
def test_a_distribution_changes(tree, restores_time):
    site = tree / SITE
    before = site.stat()
    sources = look_at(tree)
    (site / "torch-2.0.dist-info").rename(site / "torch-2.1.dist-info")
    # A file system counts in ticks, and a quick rename may fall into that of its creation.
    later = before.st_mtime_ns if restores_time else before.st_mtime_ns + 1_000_000
    os.utime(site, ns=(before.st_atime_ns, later))
    assert sources.changed() == str(site if not restores_time else site / "torch-2.0.dist-info/RECORD")


def test_a_distribution_is_added(tree):
    sources, site = look_at(tree), tree / SITE
    (site / "third-1.0.dist-info").mkdir()
    os.utime(site, ns=(0, site.stat().st_mtime_ns + 1_000_000))
    assert sources.changed() == str(site)


STAMPS = st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(st.dictionaries(st.sampled_from(("/a", "/b", "/c")), STAMPS), st.dictionaries(st.just("/b"), STAMPS))
def test_the_first_that_differs_is_told(before, changes):
    now = {**before, **changes}
    found = remember(before, [], [], before.__getitem__).changed(now.get)
    assert found == next((path for path in before if now[path] != before[path]), None)
