"""Key-value store in a file, for nodes that run on one machine or share a file system.

Every operation holds a lock (``flock`` of ``<path>.lock``). An operation that changes data replaces the whole
file. If a process is killed during an operation, the file is unchanged, and the kernel releases the lock. The
file is JSON with a version number. It cannot be shared with torch's ``FileStore``, which has a different
format.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
import weakref
from base64 import b64decode, b64encode
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elasticrs.store.timed import TimedStore, bytes_of, timed_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["FileStore", "TemporaryFileStore"]

VERSION = 1
MAX_BYTES = 64 << 20
"""Maximum size of the file in bytes. It is limited because every operation reads the whole file."""

_FORMAT = "elasticrs.file_store"
_SHORTEST_PAUSE = 0.005
_LONGEST_PAUSE = 0.2


class FileStore(TimedStore):
    """Key-value store in a file, with the interface of :class:`elasticrs.store.Store`. Like torch's
    ``FileStore``, it has no queue operations.

    No descriptor stays open between two calls.

    Args:
        path: path of the file, which is created if it is missing.
        timeout: time limit of :meth:`get` and :meth:`wait`.

    Raises:
        OSError: the file cannot be locked, read or written. Every method may raise this.
        ValueError: the file was not written by this version of elasticrs, or is too large. Every method may
            raise this.
    """

    def __init__(self, path: str, timeout: datetime.timedelta = datetime.timedelta(seconds=300)) -> None:
        super().__init__(timeout)
        self._path = path
        if os.path.isdir(path):
            # Raise the error here, because `_locked` would first create a file beside the folder.
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        with self._locked():
            self._read()

    @property
    def path(self) -> str:
        """Path of the file."""
        return self._path

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = dict(zip(keys, map(bytes_of, values), strict=True))
        with self._locked():
            self._write({**self._read(), **pairs})

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._wait(keys, self._timeout)
        return [values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._wait(keys, self._timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return true if all these keys exist."""
        with self._locked():
            return self._read().keys() >= set(keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is ``expected``, or if it is missing and ``expected`` is empty.

        Returns:
            The resulting value of the key. As in torch, it is ``expected`` if the key is missing and was not
            set.
        """
        old, new = bytes_of(expected), bytes_of(desired)
        with self._locked():
            values = self._read()
            found = values.get(key)
            if found == old or (found is None and not old):
                self._write({**values, key: new})
                return new
            return old if found is None else found

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return true if it existed."""
        with self._locked():
            values = self._read()
            if values.pop(key, None) is None:
                return False
            self._write(values)
            return True

    def num_keys(self) -> int:
        """Return the number of keys."""
        with self._locked():
            return len(self._read())

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        with self._locked():
            values = self._read()
            values[key] = change(values.get(key, b""))
            self._write(values)
            return values[key]

    def _wait(self, keys: Sequence[str], timeout: datetime.timedelta) -> dict[str, bytes]:
        deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST_PAUSE
        while True:
            with self._locked():
                values = self._read()
            if values.keys() >= set(keys):
                return values
            left = deadline - time.monotonic()
            if left <= 0:
                raise timed_out("wait", timeout, f"keys: {', '.join(keys)}")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    # --- the file ---

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Lock a separate file, because each write replaces the data file.
        fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _read(self) -> dict[str, bytes]:
        try:
            with open(self._path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        if not data:
            return {}
        if len(data) > MAX_BYTES:
            raise ValueError(f"{self._path} is larger than {MAX_BYTES} bytes")
        try:
            document = json.loads(data)
            if (document["format"], document["version"]) != (_FORMAT, VERSION):
                raise ValueError(f"its version is {document['version']!r}, here it is {VERSION}")
            return {key: b64decode(value, validate=True) for key, value in document["values"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self._path} was not written by this version of elasticrs ({error!r}): choose another file"
            ) from error

    def _write(self, values: dict[str, bytes]) -> None:
        document = {
            "format": _FORMAT,
            "version": VERSION,
            "values": {key: b64encode(value).decode() for key, value in values.items()},
        }
        data = json.dumps(document).encode()
        if len(data) > MAX_BYTES:
            raise ValueError(f"{self._path} would be larger than {MAX_BYTES} bytes")
        # A fixed name is enough, because only the lock holder writes this file.
        fresh = f"{self._path}.new"
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(fresh, self._path)


class TemporaryFileStore(FileStore):
    """File store for a single process. Its temporary folder is removed when this object is destroyed or the
    interpreter exits.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="elasticrs-rdzv-")
        weakref.finalize(self, _remove_in, os.getpid(), folder)
        super().__init__(os.path.join(folder, "store"))


def _remove_in(pid: int, folder: str) -> None:
    # A forked child also runs this finalizer. Do nothing there, because the parent still uses the folder.
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
