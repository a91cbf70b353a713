"""The Unix socket over which ``elasticctl`` reaches the agent of a job on this machine.

Each agent listens on ``PID.sock`` in a folder of its user. Only that user and root can use the folder
(mode 0700) and the socket (0600). The agent starts a server for the socket at the first connection.
"""

from __future__ import annotations

import _socket
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER_VARIABLE = "ELASTICRS_CONTROL_DIR"
"""Environment variable with the folder of the sockets. If it is empty, agents open no socket."""

PLACE, PREFIX, SUFFIX = "/tmp", "elasticrs-", ".sock"
_QUEUE = 128
_KIND = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK


def folder_of(environ: Mapping[str, str]) -> str:
    """Return the folder of this user's sockets. It does not depend on the login session, whose folder
    (``XDG_RUNTIME_DIR``) is deleted at logout, while jobs continue.
    """
    return environ.get(FOLDER_VARIABLE, f"{PLACE}/{PREFIX}{os.geteuid()}")


def check_folder(path: str) -> None:
    """Raise ``OSError`` unless ``path`` is a folder that only this user can use."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"the folder belongs to user {found.st_uid}", path)
    if found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "other users can open the folder (chmod 700)", path)


def is_served(path: str) -> bool:
    """Return false if no process listens on this socket any more."""
    probe = _socket.socket(_socket.AF_UNIX, _KIND)
    try:
        return probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)
    finally:
        probe.close()


class ControlSocket:
    """A Unix socket in ``folder``, on which this process listens for ``elasticctl``. The folder is created if
    it is missing. Raises ``OSError``.
    """

    def __init__(self, folder: str) -> None:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            check_folder(folder)
        self._owner = os.getpid()
        self.path = os.path.join(folder, f"{self._owner}{SUFFIX}")
        self._socket = _socket.socket(_socket.AF_UNIX, _KIND)
        try:
            self._listen(os.path.join(folder, f"{self._owner}.new"))
        except OSError:
            self._socket.close()
            raise

    def _listen(self, new: str) -> None:
        """Listen on a socket with the path ``new``, and only then rename it. Otherwise, ``elasticctl`` could
        find it before it listens, and remove it as that of a dead agent.
        """
        if is_served(self.path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if os.path.lexists(new):  # A process that had this pid earlier has left it behind.
            os.unlink(new)
        self._socket.bind(new)
        os.chmod(new, 0o600)
        self._socket.listen(_QUEUE)
        os.rename(new, self.path)

    @property
    def fd(self) -> int:
        """File descriptor that is readable when a program has connected to the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close and remove the socket. Idempotent. Do nothing in a forked child of this process."""
        if self._socket.fileno() == -1 or os.getpid() != self._owner:
            return
        self._socket.close()
        try:
            os.unlink(self.path)
        except OSError:
            return  # The file is gone already.
