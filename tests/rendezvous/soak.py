"""Random schedules of the rendezvous: ``python -m tests.rendezvous.soak --seconds 600`` or ``--schedules N``.

Ends with 1 at the first schedule that breaks a rule, and prints its seed.
"""

import argparse
import sys
import time

from . import schedules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=60.0, help="how long")
    length.add_argument("--schedules", type=int, help="how many, however long it takes")
    parser.add_argument("--seed", type=int, default=0, help="the first schedule")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    seed, totals = arguments.seed, {}

    def goes_on():
        if arguments.schedules is not None:
            return seed < arguments.seed + arguments.schedules
        return time.monotonic() < end

    while goes_on():
        try:
            world = schedules.play(seed)
        except schedules.ScheduleError as failed:
            print(failed)
            return 1
        for what, times in world.stats.items():
            totals[what] = totals.get(what, 0) + times
        seed += 1
    print(f"{seed - arguments.seed} schedules from seed {arguments.seed}, no violation")
    for what in sorted(totals):
        print(f"  {what}: {totals[what]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
