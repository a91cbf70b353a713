"""Random schedules of the rendezvous: ``python -m tests.rendezvous.soak --seconds 600`` or ``--schedules N``.

Ends with 1 at the first schedule that breaks a rule, and prints its seed.
"""

import argparse
import itertools
import sys
import time
from collections import Counter

from . import schedules


def play(seeds):
    """Play the schedules with these seeds, and return how often each event happened."""
    totals = Counter()
    for seed in seeds:
        totals.update(schedules.play(seed).stats)
        totals["schedules"] += 1
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=60.0, help="how long")
    length.add_argument("--schedules", type=int, help="how many, however long it takes")
    parser.add_argument("--seed", type=int, default=0, help="the first schedule")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    seeds = itertools.count(arguments.seed)
    if arguments.schedules is None:
        chosen = itertools.takewhile(lambda _: time.monotonic() < end, seeds)
    else:
        chosen = itertools.islice(seeds, arguments.schedules)
    try:
        totals = play(chosen)
    except schedules.ScheduleError as failed:
        print(failed)
        return 1
    print(f"{totals.pop('schedules')} schedules from seed {arguments.seed}, no violation")
    for what in sorted(totals):
        print(f"  {what}: {totals[what]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
