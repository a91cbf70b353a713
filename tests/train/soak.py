"""A long job whose workers are killed at random moments, those of recovery included, and replaced at once.

``PYTHONPATH=tests python -m tests.train.soak --kills 200 --seed 0``. Ends with an error if a step is lost or
counted twice, or if a recovery takes longer than a limit.
"""

import argparse
import random
import statistics
import tempfile
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from helpers.trainers import ByHand, Parent

LIMIT = 60.0


def soak(
    job: ByHand, kills: int, seed: int, end: Path, *, workers: int = 4, longest_pause: float = 0.2
) -> list[float]:
    """Kill and replace; return the seconds without a step of anybody, for each gap that a kill has made."""
    chance = random.Random(seed)
    order = {"end_when": str(end), "pause": 0.001}
    live = [f"w{number}" for number in range(workers)]
    job.start(*live, **order)
    job.wait("stepped", workers)
    for number in range(kills):
        # In a step, or anywhere in the recovery from the last one.
        until = time.monotonic() + chance.uniform(0.0, longest_pause)
        while (left := until - time.monotonic()) > 0:
            job.take(left)
        # Somebody has to keep the state, and who has not told of itself has no pid yet.
        job.wait_until(lambda: len(holders(job, live)) > 1 and all(name in job.pids for name in live), LIMIT)
        victim = chance.choice(
            live if len(holders(job, live)) > 2 else sorted(set(live) - holders(job, live)) or live
        )
        job.kill(victim)
        live.remove(victim)
        live.append(f"r{number}")
        job.start(live[-1], **order)
    began = time.monotonic()
    job.wait_until(lambda: len(holders(job, live)) == workers, LIMIT)
    end.touch()
    job.wait_until(lambda: len(ends(job)) == workers, LIMIT)
    for told in ends(job):
        assert told["equal"], told
        assert told["sum"] == told["step"], told
    assert time.monotonic() - began < LIMIT
    steps = sorted(each["at"] for each in job.of("stepped"))
    return [later - earlier for earlier, later in pairwise(steps)]


def holders(job: ByHand, live: list[str]) -> set[str]:
    """Those who have the state: they have done a step."""
    return {told["name"] for told in job.of("stepped") if told["name"] in live}


def ends(job: ByHand) -> list[dict[str, object]]:
    return job.of("done") + job.of("stopped")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, closing(Parent()) as parent:
        path = Path(folder)
        size = f"min_workers={options.workers}&max_workers={options.workers}"
        with parent.job(size, path / "stderr") as job:
            try:
                gaps = soak(
                    job,
                    options.kills,
                    options.seed,
                    path / "end",
                    workers=options.workers,
                    longest_pause=options.pause,
                )
            except BaseException:
                print((path / "stderr").read_text())
                for told in job.told[-200:]:
                    print(told)
                raise
    shown = f"median {statistics.median(gaps):.3f} s, longest {max(gaps):.2f} s"
    print(f"{options.kills} kills; between first steps of workers: {shown}")


if __name__ == "__main__":
    main()
