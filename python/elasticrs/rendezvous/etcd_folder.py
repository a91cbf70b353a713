"""Data folder of an etcd member that an agent hosts. Later agents of the same job on this machine reuse it.

- **FOLDER-1** The folder survives the agent and a reboot of the machine: it is below ``TMPDIR`` if that is
  set, otherwise below ``/var/tmp``. Its name is derived from the job's id and token, all endpoints, and the
  seat (the endpoint of this member).
- **FOLDER-2** Only the owner can access the folder. If another user has created a folder with the same name,
  it is not used.
- **FOLDER-3** While a member runs, a file in the folder is locked. etcd inherits the lock, so the lock is not
  released before etcd has exited.
- **FOLDER-4** Each member that starts on the machine removes unlocked folders of other jobs. A folder with
  the same endpoint is removed immediately, because the new member now uses the ports of that endpoint. Other
  folders are removed a day after their last use.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs.rendezvous.elastic.etcd_membership import Seat

_PREFIX = "elasticrs_etcd_"
_UNUSED = 86400.0
"""Seconds without use after which an unlocked folder of another endpoint is removed."""


def root() -> str:
    """Return the path of the folder that contains the data folders of all jobs on this machine."""
    return os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp")


class Folder:
    """Data folder of an etcd member, locked by this process.

    Attributes:
        path: absolute path of the folder.
        lock: file descriptor of the locked file, which etcd inherits.
    """

    def __init__(self, path: str, lock: int) -> None:
        self.path, self.lock = path, lock

    @classmethod
    def claim(cls, label: str, seats: Sequence[Seat], index: int) -> Folder | None:
        """Lock the data folder of a seat (one of the job's endpoints). Create the folder if it does not
        exist.

        Returns:
            The folder, or ``None`` if another process runs a member in it.

        Raises:
            OSError: the folder cannot be used. The message contains the reason.
        """
        told = "\0".join((label, *(seat.peer_url for seat in seats), str(index)))
        name = f"{_PREFIX}{os.geteuid()}_{hashlib.sha256(told.encode()).hexdigest()[:16]}"
        path = os.path.join(os.path.abspath(root()), name)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"{path} belongs to another user, or others may access it: remove it, or set TMPDIR to "
                "another folder"
            )
        folder = cls._locked(path)
        if folder is not None:
            os.ftruncate(folder.lock, 0)
            os.pwrite(folder.lock, seats[index].url.encode(), 0)
        return folder

    @classmethod
    def _locked(cls, path: str) -> Folder | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(os.path.join(path, "lock"), flags, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Check the link count, because another process may have removed the folder after the file was
            # opened.
            if os.fstat(lock).st_nlink:
                return cls(path, lock)
        except BlockingIOError:
            pass
        os.close(lock)
        return None

    # --- the data ---

    def held(self) -> str | None:
        """Return the name of the cluster incarnation whose data the folder holds; ``None`` if the folder
        holds no data.
        """
        with os.scandir(self.path) as entries:
            return next((entry.name for entry in entries if entry.is_dir(follow_symlinks=False)), None)

    def data(self, incarnation: str) -> str:
        """Return the path of the folder that holds the etcd data of a cluster incarnation."""
        return os.path.join(self.path, incarnation)

    @property
    def log(self) -> str:
        """Path of etcd's log file."""
        return os.path.join(self.path, "etcd.log")

    @property
    def _marker(self) -> str:
        return os.path.join(self.path, "joined")

    def has_joined(self) -> bool:
        """Return true if the member that uses this folder has joined its cluster."""
        return os.path.exists(self._marker)

    def note_joined(self) -> None:
        """Record that the member that uses this folder has joined its cluster."""
        os.close(os.open(self._marker, os.O_CREAT | os.O_CLOEXEC, 0o600))

    def discard(self, incarnation: str) -> None:
        """Remove the data of one etcd cluster. Keep the data folder and its lock."""
        shutil.rmtree(self.data(incarnation), ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(self._marker)

    # --- removing folders ---

    def release(self, *, keep: bool) -> None:
        """If ``keep`` is false, remove the data folder. In any case, release the folder's lock."""
        if keep:
            os.utime(self.lock)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def remove_others(self) -> list[str]:
        """Remove the folders of other jobs whose members are no longer running (FOLDER-4). Return the removed
        paths.
        """
        removed = []
        with os.scandir(os.path.dirname(self.path)) as entries:
            found = [each.path for each in entries if each.name.startswith(f"{_PREFIX}{os.geteuid()}_")]
        for path in found:
            # Do not lock the folder for this check, because an agent that needs the folder could not use it
            # while it is locked.
            if path == self.path or not self._is_stale(path):
                continue
            try:
                other = self._locked(path)
            except OSError:
                continue
            if other is not None:
                other.release(keep=False)
                removed.append(path)
        return removed

    def _is_stale(self, path: str) -> bool:
        try:
            with open(os.path.join(path, "lock"), "rb", opener=_without_links) as lock:
                found = os.fstat(lock.fileno())
                is_own = found.st_uid == os.geteuid()
                is_unused = time.time() - found.st_mtime > _UNUSED
                return is_own and (is_unused or lock.read() == os.pread(self.lock, 4096, 0))
        except OSError:
            return False


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
