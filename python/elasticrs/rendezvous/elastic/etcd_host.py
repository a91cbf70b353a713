"""A member of etcd that this agent hosts for its job, as the agent sees it: a program that it starts, hears
of and ends. What happens in there is in :mod:`elasticrs.rendezvous.etcd_host_program`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

import elasticrs
from elasticrs.rendezvous.elastic.etcd_membership import label_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.rendezvous.elastic.settings import Rendezvous

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from elasticrs.rendezvous.etcd_host_program import main; sys.exit(main())"
)
_OVER = frozenset({"succeeded", "failed", "closed", "aborted", "timeout", "spare"})
"""How an agent ends when the job does."""

_LONGEST_END = 5.0
"""Seconds; the program ends etcd sooner."""

_SHORT = 10.0
"""Seconds; a program that is killed sooner than that, so many times in a row, is not started again."""

_MOST_SHORT = 3


class EtcdHost:
    """A member of the cluster of a job, if one of its endpoints is on this machine; it may take a while.

    Args:
        rendezvous: of a job whose agents host etcd.

    Attributes:
        fd: readable when :meth:`take` has something, or the program has ended; ``None`` afterwards.
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
            "prefix": site.prefix,
            "close_timeout": settings.close_timeout,
        }
        self._shorts = 0
        self._was_killed = self._is_leaving = False
        self._start()

    def _start(self, **orders: bool) -> None:
        self._folder = os.path.join(tempfile.gettempdir(), f"elasticrs_etcd_{os.urandom(8).hex()}")
        root = os.path.dirname(elasticrs.__path__[0])
        self._program = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the agent, which ends the program.
            start_new_session=True,
        )
        assert self._program.stdout is not None
        self.fd: int | None = self._program.stdout.fileno()
        os.set_blocking(self.fd, False)
        self._unread = b""
        self._begun = time.monotonic()
        self._say(json.dumps({**self._orders, "folder": self._folder, **orders}))

    def start_again(self) -> bool:
        """After the program was killed, start another one, with a member of its own; false if it is not to.

        What is listed at the seat is removed by then, or by one that is started for that alone.
        """
        if not self._was_killed or self._is_leaving or self._shorts > _MOST_SHORT:
            return False
        self.close()
        self._start(has_voted=True, gives_up=self._shorts == _MOST_SHORT)
        return True

    def _say(self, line: str) -> None:
        assert self._program.stdin is not None
        # It may have ended.
        with suppress(OSError):
            os.write(self._program.stdin.fileno(), line.encode() + b"\n")

    def take(self) -> list[tuple[str, str]]:
        """What the program tells: ``say`` or ``refused``, and a line for the user; never blocks."""
        if self.fd is None:
            return []
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        if not data:
            return self._over()
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [tuple(json.loads(line)) for line in lines]

    def _over(self) -> list[tuple[str, str]]:
        self.fd = None
        try:
            code = self._program.wait(_LONGEST_END)
        except subprocess.TimeoutExpired:
            return []
        self._was_killed = code != 0
        if not self._was_killed or self._is_leaving:
            return []
        self._shorts = self._shorts + 1 if time.monotonic() - self._begun < _SHORT else 1
        follows = "it is started again" if self._shorts < _MOST_SHORT else "this node has none any more"
        return [("say", f"the program of this node's member of etcd ended with exit code {code}; {follows}")]

    def leave(self, outcome: str) -> None:
        """The agent ends like this; :attr:`fd` becomes ``None`` when the member may go."""
        self._is_leaving = True
        self._say("over" if outcome in _OVER else "leave")

    def close(self) -> None:
        """End it. Idempotent."""
        program = self._program
        if program.poll() is None:
            program.terminate()
            try:
                program.wait(_LONGEST_END)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        self.fd = None
        for pipe in (program.stdin, program.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
