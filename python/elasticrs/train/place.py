"""Tells the agent in which meeting this worker is; see :mod:`elasticrs.places`."""

from __future__ import annotations

import os

from elasticrs.places import LAYOUT, VARIABLE

__all__ = ["tell"]


def tell(number: int, rank: int, world_size: int) -> None:
    """Write down a meeting, where an agent wants to know; costs a microsecond or two.

    A program that has closed the descriptor, or put another file in its place, is left alone: then the agent
    knows this worker by its local rank.

    Args:
        number: of the round.
        rank: of this worker.
        world_size: how many have met.
    """
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    fd, inode, offset = map(int, place.split(":"))
    try:
        if os.fstat(fd).st_ino == inode:
            os.pwrite(fd, LAYOUT.pack(number, rank, world_size, number), offset)
    except OSError:
        os.environ.pop(VARIABLE)
