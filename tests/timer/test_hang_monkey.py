"""A monkey test: workers hang in random ways, several at once, while the launcher receives signals.

Each game is a job of a few ranks and attempts. In an attempt some ranks hang and the others wait for them,
go on by themselves, or are in a section without a limit. Every game has to end with the code that follows
from its plan, with nobody left, and has to name a rank that hangs. A failure shows the seed; ``MONKEY_SEED``
repeats that game, with ``MONKEY_GAMES`` so many from it on.
"""

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest
from helpers import procs

pytestmark = pytest.mark.beyond_torchrun

WORKER = Path(__file__).resolve().parent.parent / "workers" / "hanging.py"
HANGS = (
    *("select", "wait", "stopped", "loop", "gil", "ignore"),
    *("section", "timer", "leave", "children", "spoil"),
)
OTHERS = ("peer", "peer", "peer", "beats", "unlimited")
# Play the same games every time, because the test must not depend on luck. Set MONKEY_SEED to play others.
FIRST_SEED = 90160
AT_ONCE = 4
"""Most of a game is waiting."""


class Game:
    """One job: its plan, and the signals that its launcher received."""

    def __init__(self, launch, folder, seed):
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.n = rng.choice([1, 2, 3, 3, 4])
        self.restarts = rng.choice([0, 1, 1, 2])
        failing = rng.choice([0, 1, 1, 2])
        self.plan = [self.attempt() for _ in range(failing)] + [self.success()]
        self.is_disturbed = rng.random() < 0.4
        self.was_asked = self.was_killed = False
        self.expected = 0 if failing <= self.restarts else 1
        grace = rng.choice(["0", "0.1", "1"])
        options = ["--nproc-per-node", str(self.n), "--max-restarts", str(self.restarts)]
        options += ["--shutdown-timeout", grace, "--hang-timeout=1", f"--log-dir={folder / 'logs'}"]
        options += rng.choice([[], ["--tee=3"], ["--virtual-local-rank"], ["--hang-startup-timeout=30"]])
        marks = folder / "marks"
        marks.mkdir()
        env = {"PLAN": json.dumps(self.plan), "MARKS": str(marks), "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
        self.story = [f"MONKEY_SEED={seed}", *options, str(self.plan)]
        self.launched = launch(*options, WORKER, env=env)

    def attempt(self):
        """Plan an attempt in which some ranks hang. Ranks that wait are a step ahead, or have a newer
        heartbeat.

        Without steps, of several at one place and one that waits elsewhere, the latter is the odd one.
        """
        rng = self.rng
        hung = rng.sample(range(self.n), rng.choice([1, 1, 1, min(2, self.n)]))
        ranks = {rank: rng.choice(HANGS if rank in hung else OTHERS) for rank in range(self.n)}
        steps = [0, rng.randrange(10**9)] if len(hung) > 1 else [None, 0, rng.randrange(10**9)]
        return {"step": rng.choice(steps), "hung": hung, "ranks": ranks}

    def success(self):
        return {"step": 0, "hung": [], "ranks": dict.fromkeys(range(self.n), "done")}

    def play(self):
        """Send signals at random moments. None of them may change which rank is named."""
        launched, rng = self.launched, self.rng
        launched.read_for(rng.uniform(0.2, 1.4))
        for _ in range(rng.randint(1, 3) if self.is_disturbed else 0):
            rng.choices([self.pause, self.suspend, self.ask, self.kill], [4, 4, 1, 1])[0]()
            launched.read_for(rng.choice([0.0, 0.02, 0.3]))

    def pause(self):
        self.signal(signal.SIGSTOP)
        self.launched.read_for(self.rng.choice([0.0, 0.05, 0.3]))
        self.signal(signal.SIGCONT)

    def suspend(self):
        self.signal(signal.SIGTSTP)
        self.launched.read_for(self.rng.choice([0.0, 0.05, 0.3]))
        self.signal(signal.SIGCONT)

    def ask(self):
        self.was_asked = True
        for _ in range(self.rng.choice([1, 2, 3])):
            self.signal(signal.SIGTERM)

    def kill(self):
        self.was_killed = True
        self.signal(signal.SIGKILL)

    def signal(self, signum):
        self.story.append(f"{signum.name} to the launcher")
        self.launched.signal(signum)

    def check(self):
        code = self.launched.wait()
        story = "\n".join([*self.story, self.launched.stderr])
        assert "\nTraceback" not in "\n" + self.launched.stderr, story
        assert "panicked" not in self.launched.stderr, story
        if self.was_killed and code == -signal.SIGKILL:
            return
        if self.was_asked:
            assert code in (self.expected, 1), story
            return
        assert code == self.expected, story
        self.check_names(story)

    def check_names(self, story):
        """Check that each failure with a restart is named in a line, and the last failure in the report."""
        named = re.findall(
            r"rank (\d+) \(pid \d+\)[^;\n]*(?:hung|timer|exit)[^\n]*restarting", self.launched.stderr
        )
        failed = self.plan[:-1][: self.restarts]
        assert len(named) == len(failed), story
        for rank, attempt in zip(named, failed, strict=True):
            assert int(rank) in attempt["hung"], story
        if self.expected == 1:
            (rank,) = re.findall(r"^  rank      : (\d+) \(local_rank", self.launched.stderr, re.MULTILINE)[
                -1:
            ]
            assert int(rank) in self.plan[self.restarts]["hung"], story


def play(launch, tmp_path, count):
    first = int(os.environ.get("MONKEY_SEED", FIRST_SEED))
    print(f"MONKEY_SEED={first}, {count} games")
    only = "MONKEY_SEED" in os.environ and "MONKEY_GAMES" not in os.environ
    count = 1 if only else int(os.environ.get("MONKEY_GAMES", count))
    for start in range(first, first + count, AT_ONCE):
        games = []
        for seed in range(start, min(start + AT_ONCE, first + count)):
            folder = tmp_path / str(seed)
            folder.mkdir()
            games.append(Game(launch, folder, seed))
        for game in games:
            game.play()
        for game in games:
            game.check()
        # Processes that a killed launcher has left exit on their own, and are adopted by this process.
        if any(game.was_killed for game in games):
            procs.reap_adopted()
        assert not procs.adopted(), [game.story for game in games]


def test_random_hangs_name_a_hung_rank_and_leave_no_processes(launch, tmp_path):
    play(launch, tmp_path, AT_ONCE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_hangs_name_a_hung_rank_and_leave_no_processes(launch, tmp_path):
    play(launch, tmp_path, 6 * AT_ONCE)
