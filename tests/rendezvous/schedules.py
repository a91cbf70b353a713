"""Random schedules by seed, and schedules from lists of numbers that hypothesis can shrink."""

import bisect
import itertools
import random

from .checks import ViolationError
from .world import World

LENGTHS = (40, 120, 300)


class ScheduleError(AssertionError):
    """Raised when a schedule breaks a rule. The message tells which rule, and the seed that reproduces it."""


def play(seed, **how):
    """Play the random schedule with this seed, and return the world at its end."""
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
    """Return the index that a number between 0 and 1 selects from these weights."""
    ends = list(itertools.accumulate(weights))
    return bisect.bisect(ends, number * ends[-1], 0, len(ends) - 1)


def play_choices(numbers):
    """Play the schedule that a list of numbers describes, and return the world. Each number selects the next
    event.
    """
    source = iter(numbers)
    # Choose at random once the list is exhausted, because always making the same choice would starve a node.
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
