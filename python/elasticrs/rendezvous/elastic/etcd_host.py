"""Start, monitor and stop the program that runs this agent's etcd member.

The program is :mod:`elasticrs.rendezvous.etcd_host_program`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import elasticrs
from elasticrs.rendezvous.elastic.etcd_membership import label_of, workers_password, workers_prefix
from elasticrs.rendezvous.etcd_keeper import end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic.rendezvous import Rendezvous

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from elasticrs.rendezvous.etcd_host_program import main; sys.exit(main())"
)
_OVER = frozenset({"succeeded", "failed", "closed", "aborted", "timeout", "spare"})
"""Outcomes of an agent after which the job may be over for all agents."""

_LONGEST_END = 5.0
"""Seconds that the program may take to exit after SIGTERM. This time is longer than the program's own time
limit for stopping etcd.
"""

_SHORT = 10.0
"""A run of the program that fails within this number of seconds counts as a short run. After ``_MOST_SHORT``
short runs in a row, the program is not restarted.
"""

_MOST_SHORT = 3


def _workers_access(rendezvous: Rendezvous) -> list[str] | None:
    """Return the password of the etcd user for workers, and the key prefix that this user may access;
    ``None`` if the job has no token.
    """
    site, token = rendezvous.etcd, rendezvous.settings.token
    if site is None or token is None:
        return None
    run_id = rendezvous.run_id
    return [workers_password(run_id, site.prefix, token), workers_prefix(run_id, site.prefix)]


class EtcdHost:
    """Controls the program that runs an etcd member on this machine. The program exits on its own if the list
    of endpoints does not contain this machine.

    Args:
        rendezvous: rendezvous of a job whose agents host etcd.

    Attributes:
        fd: file descriptor that is readable when :meth:`take` should be called. A call of :meth:`take` may
            change the descriptor. ``None`` once the program has exited.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        site, settings = rendezvous.etcd, rendezvous.settings
        assert site is not None
        self._orders = {
            "seats": [list(seat.values()) for seat in site.seats],
            "label": label_of(rendezvous.run_id, site.prefix, settings.token),
            "bind_addr": settings.bind_addr,
            "files": site.files,
            "password": site.password,
            "workers": _workers_access(rendezvous),
            "prefix": site.prefix,
            "close_timeout": settings.close_timeout,
        }
        self._shorts = 0
        self._has_failed = self._is_leaving = False
        self._start()

    def _start(self) -> None:
        root = os.path.dirname(elasticrs.__path__[0])
        self._program = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Start a new session, so that Ctrl-C does not reach the program. Only the agent stops it.
            start_new_session=True,
        )
        assert self._program.stdout is not None
        self._exit = os.pidfd_open(self._program.pid)
        self.fd: int | None = self._program.stdout.fileno()
        os.set_blocking(self.fd, False)
        self._unread = b""
        self._reason = ""
        self._begun = time.monotonic()
        self._say(json.dumps(self._orders))

    def start_again(self) -> bool:
        """Restart the program with its existing data if it has failed. Return true if it was restarted."""
        if not self._has_failed or self._is_leaving or self._shorts >= _MOST_SHORT:
            return False
        self.close()
        self._start()
        return True

    def _say(self, line: str) -> None:
        assert self._program.stdin is not None
        # Ignore write errors, because the program may already have exited.
        with suppress(OSError):
            os.write(self._program.stdin.fileno(), line.encode() + b"\n")

    def take(self) -> list[tuple[str, str]]:
        """Return the program's new messages for the user, each with its kind: ``say`` or ``refused``.

        Never blocks.
        """
        if self.fd is None:
            return []
        if self.fd == self._exit:
            return self._exited()
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        if not data:
            # The pipe is closed, so the program is about to exit. From now on, watch for its exit.
            self.fd = self._exit
            return []
        *lines, self._unread = (self._unread + data).split(b"\n")
        told = [(str(kind), str(text)) for kind, text in map(json.loads, lines)]
        self._reason = next((text for kind, text in told if kind == "exited"), self._reason)
        return [each for each in told if each[0] != "exited"]

    def _exited(self) -> list[tuple[str, str]]:
        code = self._program.poll()
        if code is None:
            return []
        self.fd = None
        self._has_failed = code != 0
        if not self._has_failed or self._is_leaving:
            return []
        self._shorts = self._shorts + 1 if time.monotonic() - self._begun < _SHORT else 1
        why = self._reason or f"the program that runs this node's member of etcd exited with exit code {code}"
        if self._shorts < _MOST_SHORT:
            return [("say", f"{why}; it is started again")]
        return [("refused", f"{why}; this node no longer has a member")]

    def leave(self, outcome: str) -> None:
        """Notify the program that this agent is about to exit with the given outcome. The agent should wait
        until :attr:`fd` is ``None`` before it exits.
        """
        self._is_leaving = True
        self._say("over" if outcome in _OVER else "leave")

    def close(self) -> None:
        """Stop the program. Idempotent."""
        end(self._program, _LONGEST_END)
        self.fd = None
        for pipe in (self._program.stdin, self._program.stdout):
            if pipe is not None:
                pipe.close()
        if self._exit >= 0:
            os.close(self._exit)
            self._exit = -1
