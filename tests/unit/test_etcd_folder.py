"""The folder of a hosted etcd member: its lock, its permissions, and the removal of old folders."""

import os
import subprocess
import sys

import pytest

from elasticrs.rendezvous.elastic.etcd_membership import Seat
from elasticrs.rendezvous.etcd_folder import Folder

SEATS = tuple(Seat(f"n{index}", 2379, 2380) for index in range(3))


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def claim(label="a", index=0, seats=SEATS):
    folder = Folder.claim(label, seats, index)
    assert folder is not None
    return folder


def test_etcd_data_are_kept_for_the_next_agent():
    folder = claim()
    assert folder.held() is None
    os.mkdir(folder.data("abc"))
    folder.note_joined()
    folder.release(keep=True)
    again = claim()
    assert (again.path, again.held(), again.has_joined()) == (folder.path, "abc", True)
    again.discard("abc")
    assert (again.held(), again.has_joined()) == (None, False)
    again.release(keep=False)
    assert not os.path.exists(folder.path)


def test_each_job_member_index_and_endpoint_list_has_its_own_etcd_folder():
    folders = [claim(), claim("b"), claim(index=1), claim(seats=SEATS[:1])]
    assert len({folder.path for folder in folders}) == len(folders)
    for folder in folders:
        folder.release(keep=False)


def test_a_running_etcd_member_keeps_its_folder_locked():
    folder = claim()
    assert Folder.claim("a", SEATS, 0) is None
    # etcd inherits the lock, and may exit slightly later than the program that started it.
    etcd = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(folder.lock,))
    folder.release(keep=True)
    assert Folder.claim("a", SEATS, 0) is None
    etcd.communicate(b"\n")
    claim().release(keep=False)


def test_a_folder_that_other_users_can_access_is_refused():
    folder = claim()
    folder.release(keep=True)
    os.chmod(folder.path, 0o750)
    with pytest.raises(PermissionError, match="set TMPDIR"):
        Folder.claim("a", SEATS, 0)


def test_a_folder_of_another_user_is_refused():
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a folder to another user")
    folder = claim()
    folder.release(keep=True)
    os.chown(folder.path, 54321, -1)
    with pytest.raises(PermissionError, match="another user"):
        Folder.claim("a", SEATS, 0)


def test_a_symbolic_link_in_place_of_the_folder_is_refused(root):
    folder = claim()
    folder.release(keep=False)
    (root / "elsewhere").mkdir(mode=0o700)
    os.symlink(root / "elsewhere", folder.path)
    with pytest.raises(PermissionError):
        Folder.claim("a", SEATS, 0)


def test_unused_etcd_folders_are_removed():
    same_endpoint, running, recent, old = claim("b"), claim("c"), claim("b", 1), claim("b", 2)
    for folder in (same_endpoint, recent, old):
        folder.release(keep=True)
    os.utime(os.path.join(old.path, "lock"), (0, 0))
    mine = claim()
    assert set(mine.remove_others()) == {same_endpoint.path, old.path}
    assert [os.path.exists(each.path) for each in (same_endpoint, running, recent, old)] == [
        *(False, True, True, False)
    ]
    os.utime(os.path.join(recent.path, "lock"), (0, 0))
    assert mine.remove_others() == [recent.path]
    for folder in (mine, running):
        folder.release(keep=False)
