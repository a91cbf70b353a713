"""Soak test: a long job whose workers are killed at random moments, even during recovery, and replaced at
once.

``PYTHONPATH=tests python -m tests.train.soak --kills 200 --seed 0``. ``--agents 1`` has the agent of one node
replace them, ``--agents 2`` those of two nodes, which are killed now and then, too. Ends with an error if a
step is lost or counted twice, if a recovery takes longer than a limit, or if a process is left.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from helpers import procs
from helpers.agent_trainers import UnderAgents
from helpers.launcher import LAUNCHERS, Launched, clean_environment
from helpers.trainers import ByHand, Parent, Trainers, store

LIMIT = 60.0
LONGEST = 30.0
"""Seconds from a kill to the next step: on a loaded machine, and after a time-out of 10 s."""
RESTARTS = 100_000
ENDLESS = {"size": 1 << 40, "shuffle": False, "weights": 1 << 16, "pause": 0.001}
"""Orders of a trainer that steps until a file exists."""

# --- by hand ---


def soak(
    job: ByHand, kills: int, seed: int, end: Path, *, workers: int = 4, longest_pause: float = 0.2
) -> list[float]:
    """Kill and replace workers. Return the seconds between the first step of a worker and that of the next
    one.
    """
    chance = random.Random(seed)
    order = {**ENDLESS, "end_when": str(end)}
    live = [f"w{number}" for number in range(workers)]
    job.start(*live, **order)
    job.wait("stepped", workers)
    for number in range(kills):
        # Wait, so that the kill hits a step or any moment of the previous recovery.
        job.take_for(chance.uniform(0.0, longest_pause))
        # Another worker must keep the state, and a worker that has not reported itself has no pid yet.
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
    job.wait_until(lambda: len(job.of("finished")) == workers, LIMIT)
    check_sums(job)
    assert time.monotonic() - began < LIMIT
    steps = sorted(each["at"] for each in job.of("stepped"))
    return [later - earlier for earlier, later in pairwise(steps)]


def holders(job: ByHand, live: list[str]) -> set[str]:
    """Return the live workers that have the state, because they have taken a step."""
    return {told["name"] for told in job.of("stepped") if told["name"] in live}


def check_sums(job: Trainers) -> None:
    """Check that the state of each finished trainer counts each sample and each step exactly once."""
    for told in job.of("finished"):
        steps, taken = told["steps"], told["taken"]
        assert (told["total"], told["weights"]) == (taken * (taken - 1) // 2, [steps]), told


# --- under agents ---


class Soak:
    """Kills workers and agents, and keeps track of the workers that are alive.

    Args:
        job: the trainers.
        nodes: the names of those on each node.
        end: the file at which they end.
        seed: of all that is left to chance.
    """

    def __init__(self, job: UnderAgents, nodes: Sequence[str], end: Path, seed: int) -> None:
        self._job, self._nodes, self._end = job, nodes, end
        self._seats = len("".join(nodes))
        self._chance = random.Random(seed)
        self._dead = set[int]()
        self._moments = list[float]()
        self.agents_killed = self.workers_killed = 0

    def run(self, kills: int) -> None:
        """Start all workers, kill ``kills`` times or slightly more, let the job finish, and check
        the result.
        """
        job, chance = self._job, self._chance
        self._start(*self._nodes)
        job.wait_until(lambda: len(self._holders()) == self._seats, LIMIT)
        while self.agents_killed + self.workers_killed < kills:
            self._kill()
            if chance.random() < 0.5:
                # Wait for a step, so that the next kill causes a separate recovery.
                job.wait_until(lambda: self._recovery(self._moments[-1]) is not None, LIMIT)
                job.take_for(chance.uniform(0.0, 0.3))
            else:
                # Wait for a random time, so that the next kill may hit any moment of the recovery.
                job.take_for(chance.uniform(0.2, 1.5))
        job.wait_until(lambda: len(self._holders()) == self._seats, LIMIT)
        self._end.touch()
        job.wait_until(lambda: len(job.of("finished")) == self._seats, LIMIT)
        job.over()
        self._check()

    def recoveries(self) -> list[float]:
        """Return the seconds from each kill to the next step in a round that started after the kill."""
        return [found for moment in self._moments if (found := self._recovery(moment)) is not None]

    def ended_themselves(self) -> int:
        """Return how many workers have exited without being killed."""
        return len({told["pid"] for told in self._job.of("up")} - self._dead) - self._seats

    def _start(self, *nodes: str) -> None:
        orders = {name: {**ENDLESS, "end_when": str(self._end)} for node in nodes for name in node}
        self._job.start_all(orders, restarts=RESTARTS, nodes=nodes)

    def _kill(self) -> None:
        """Kill one worker, two workers or an agent, but never all workers that have the state."""
        job, chance = self._job, self._chance
        if len(self._nodes) > 1 and chance.random() < 0.06:
            node = chance.choice(self._nodes)
            job.wait_until(lambda: any(name not in node for name in self._holders()), LIMIT)
            self._moments.append(time.monotonic())
            self._dead |= {pid for name, pid in self._live().items() if name in node}
            job.lose(node[0])
            self.agents_killed += 1
            self._start(node)
            return
        count = 2 if chance.random() < 0.25 else 1
        job.wait_until(lambda: bool(self._holders()) and len(self._live()) > count, LIMIT)
        keeper = chance.choice(sorted(self._holders()))
        live = self._live()
        self._moments.append(time.monotonic())
        for name in chance.sample(sorted(live.keys() - {keeper}), count):
            job.kill_pid(live[name])
            self._dead.add(live[name])
            self.workers_killed += 1

    def _live(self) -> dict[str, int]:
        """Return the pids of the workers that have started and were not killed, by name."""
        last = {told["name"][0]: told["pid"] for told in self._job.of("up")}
        return {name: pid for name, pid in last.items() if pid not in self._dead}

    def _holders(self) -> set[str]:
        """Return the names of the live workers that have the state, because they have taken a step."""
        have = {told["pid"] for told in self._job.of("stepped")}
        return {name for name, pid in self._live().items() if pid in have}

    def _recovery(self, moment: float) -> float | None:
        """Return the seconds from ``moment`` to the next step of a worker that has met the others since."""
        met = set[int]()
        for told in self._job.told:
            if told["at"] > moment and told["what"] == "met":
                met.add(told["pid"])
            elif told["at"] > moment and told["what"] == "stepped" and told["pid"] in met:
                return float(told["at"] - moment)
        return None

    def _check(self) -> None:
        check_sums(self._job)
        # Check that no step is lost. A job that loses its state starts anew, and still finishes with correct
        # sums.
        furthest = 0
        for told in self._job.told:
            if told["what"] in ("met", "stepped"):
                assert told["step"] >= furthest - 1, (furthest, told)
                furthest = max(furthest, told["step"])


def launch(*arguments: str | Path, env: dict[str, str], folder: Path) -> Launched:
    environment = clean_environment({"TMPDIR": str(folder), **env})
    return Launched([*LAUNCHERS["elasticrs"], *arguments], env=environment, cwd=folder)


def under_agents(folder: Path, agents: int, kills: int, seed: int, story: Path | None) -> None:
    """Run the soak test under one or two agents. Write all messages of the trainers to ``story``."""
    nodes = {1: ["abcd"], 2: ["ab", "cd"]}[agents]
    started: list[Launched] = []

    def start(*arguments: str | Path, env: dict[str, str]) -> Launched:
        started.append(launch(*arguments, env=env, folder=folder))
        return started[-1]

    began = time.monotonic()
    # Every round is short here, and the kills of agents must not end the job.
    conf = {"max_short_losses": RESTARTS}
    with store() as port, closing(UnderAgents(start, folder, (4, 4), conf, port, together=True)) as job:
        soak = Soak(job, nodes, folder / "end", seed)
        try:
            soak.run(kills)
            assert max(soak.recoveries()) < LONGEST, sorted(soak.recoveries())[-5:]
        finally:
            if story is not None:
                story.write_text(job.story(None))
            for agent in started:
                agent.close()
    assert not procs.children(), f"left behind: {procs.children()}"
    took, steps = time.monotonic() - began, job.of("finished")[0]["steps"]
    recoveries = soak.recoveries()
    print(
        f"{agents} agents: {soak.workers_killed} workers and {soak.agents_killed} agents killed, "
        f"{soak.ended_themselves()} workers ended otherwise; no sum is wrong after {steps} steps, "
        f"{took:.0f} s; from a kill to the next step: median {statistics.median(recoveries):.2f} s, "
        f"longest {max(recoveries):.2f} s"
    )


# --- the program ---


def by_hand(folder: Path, kills: int, seed: int, workers: int, pause: float) -> None:
    """Run the soak test without an agent."""
    size = f"min_workers={workers}&max_workers={workers}"
    with closing(Parent()) as parent, parent.job(size, folder / "stderr") as job:
        try:
            gaps = soak(job, kills, seed, folder / "end", workers=workers, longest_pause=pause)
        except BaseException:
            print((folder / "stderr").read_text())
            print(job.story())
            raise
    shown = f"median {statistics.median(gaps):.3f} s, longest {max(gaps):.2f} s"
    print(f"{kills} kills; between first steps of workers: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agents", type=int, default=0, choices=(0, 1, 2), help="0: started by hand")
    parser.add_argument("--workers", type=int, default=4, help="by hand; 4 under agents")
    parser.add_argument("--pause", type=float, default=0.2, help="by hand: seconds between kills, at most")
    parser.add_argument("--story", type=Path, help="under agents: a file for all that was told")
    options = parser.parse_args()
    # Adopt and reap the processes that a killed agent leaves behind.
    procs.become_subreaper()
    with tempfile.TemporaryDirectory() as folder:
        if options.agents:
            under_agents(Path(folder), options.agents, options.kills, options.seed, options.story)
        else:
            by_hand(Path(folder), options.kills, options.seed, options.workers, options.pause)


if __name__ == "__main__":
    main()
