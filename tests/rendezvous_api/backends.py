"""A back end for torch's dynamic rendezvous, as a user would write it."""

import fcntl
import os

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend


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
