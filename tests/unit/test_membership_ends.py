"""A worker that finishes its last steps does not wait forever for a peer that has died."""

import threading
from types import SimpleNamespace

import pytest

from elasticrs.store import DistNetworkError
from elasticrs.train import membership
from elasticrs.train.membership import Membership


class Board:
    """Message board of a round in which a worker has finished after step 5. Each call of ``list_keys``
    returns the next item of ``keys``.
    """

    def __init__(self, *keys):
        self._keys = list(keys)

    def check(self, _keys):
        return True

    def get(self, _key):
        return b"5"

    def list_keys(self):
        if not self._keys:
            raise DistNetworkError("gone")
        return self._keys.pop(0)


@pytest.mark.parametrize(
    "keys",
    [
        [["done", "here/0", "here/1"], ["done", "here/0"]],
        # The store is lost after the first call.
        [["done", "here/0", "here/1"]],
    ],
)
def test_a_peer_that_dies_in_the_last_step_ends_the_wait(keys):
    member = Membership.__new__(Membership)
    member._stuck_timeout = 0.05
    member._changed = threading.Condition()
    step = SimpleNamespace(at=None, saves=False, done=3)
    current = SimpleNamespace(board=Board(*keys), step=step, world_size=2)
    member.round = current
    member._await_end(current)
    assert step.at == 5


def test_a_worker_that_left_the_round_has_not_died():
    assert not membership._has_lost({"here/1"}, {"out/1"})
