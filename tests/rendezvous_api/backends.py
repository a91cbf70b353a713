"""Back ends as users would write them: one in memory, and one in a file."""

import fcntl
import os

from elasticrs.rendezvous import RendezvousConnectionError
from elasticrs.rendezvous.dynamic_rendezvous import RendezvousBackend


class MemoryBackend(RendezvousBackend):
    """A back end in memory with numbers as tokens. Each item of ``trouble`` disturbs one access. A ``"lost"``
    write arrives, but its reply does not. A ``"refused"`` one does not arrive, and an ``"overtaken"`` one
    comes after another write.
    """

    name = "memory"

    def __init__(self):
        self.value, self.token, self.trouble = None, 0, []
        self.writes = 0

    def get_state(self):
        if self._next() in {"lost", "refused"}:
            raise RendezvousConnectionError("no answer")
        return None if self.value is None else (self.value, self.token)

    def set_state(self, state, token=None):
        trouble = self._next()
        if trouble == "refused":
            raise RendezvousConnectionError("not sent")
        if trouble == "overtaken":
            # Act as if another node had written the same state just before.
            self.token += 1
        is_set = token == self.token if self.value is not None else token is None
        if is_set:
            self.value, self.token = state, self.token + 1
            self.writes += 1
        if trouble == "lost":
            raise RendezvousConnectionError("no answer")
        return None if self.value is None else (self.value, self.token, is_set)

    def _next(self):
        return self.trouble.pop(0) if self.trouble else None


class FileBackend(RendezvousBackend):
    """A back end in a locked file whose first line is the version."""

    name = "mine"

    def __init__(self, path):
        self._path = path

    def _locked(self, change=None):
        with open(self._path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            version, _, state = file.read().partition(b"\n")
            if change is not None and (new := change(int(version or 0))):
                os.ftruncate(file.fileno(), 0)
                file.write(new)
                version, _, state = new.partition(b"\n")
            return (state, int(version)) if version else None

    def get_state(self):
        return self._locked()

    def set_state(self, state, token=None):
        written = []

        def change(version):
            if version != (token or 0):
                return None
            written.append(True)
            return b"%d\n%s" % (version + 1, state)

        found = self._locked(change)
        return None if found is None else (*found, bool(written))
