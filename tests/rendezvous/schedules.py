"""Schedules by number, and from lists of numbers that hypothesis can shrink."""

import bisect
import itertools
import random

from .checks import ViolationError
from .world import World

LENGTHS = (40, 120, 300)


class ScheduleError(AssertionError):
    """A schedule breaks a rule; says which, and how to see it again."""


def play(seed, **how):
    """One random schedule; the world as it ended."""
    rng = random.Random(seed)

    def pick(weights):
        return choice(weights, rng.random())

    world = None
    try:
        world = World(pick, rng.random, **how)
        world.run(rng.choice(LENGTHS))
    except ViolationError as violation:
        raise ScheduleError(f"seed {seed}: {violation.args}\n{tail(world)}") from violation
    return world


def choice(weights, number):
    """The index that a number below 1 chooses."""
    ends = list(itertools.accumulate(weights))
    return bisect.bisect(ends, number * ends[-1], 0, len(ends) - 1)


def play_choices(numbers):
    """The schedule that a list of numbers stands for: each chooses the next thing that happens."""
    source = iter(numbers)
    # What comes after the list has to be fair: always the same choice would starve a node.
    rest = random.Random(0)

    def number(limit):
        chosen = next(source, None)
        return rest.randrange(limit) if chosen is None else chosen % limit

    def pick(weights):
        return choice(weights, number(1 << 16) / (1 << 16))

    world = World(pick, lambda: number(1000) / 1000)
    world.run(len(numbers))
    return world


def tail(world, lines=60):
    if world is None:
        return ""
    return "\n".join(str(line)[:240] for line in world.log[-lines:])
