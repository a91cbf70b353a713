"""Random signals to every process of a job, in any order. The report is still correct.

The soak test kills one thing at a time and waits for what follows; here launcher, nursery and workers are hit
in short rows, without regard to what they are doing. A failure shows the seed; ``MONKEY_SEED`` repeats it.
"""

import os
import random
import re
import signal

import pytest
from helpers import procs
from helpers.steady import EXIT_0, EXIT_1, SteadyJob, send

pytestmark = [pytest.mark.slow, pytest.mark.beyond_torchrun, pytest.mark.timeout(120)]

GAMES = 40
N = 3
RESTARTS = 2
FOR_WORKERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM, EXIT_0, EXIT_1)
FOR_THE_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


class Game:
    """A job, and a record of the signals that the test has sent to it."""

    def __init__(self, launch, folder, rng):
        self.rng = rng
        self.is_launcher_killed = self.is_nursery_killed = False
        self.asked = False
        self.told_to_succeed = set()
        grace = rng.choice(["0", "0.2", "1"])
        arguments = ("--max-restarts", str(RESTARTS), "--shutdown-timeout", grace)
        arguments += rng.choice([(), ("--warm", "json")])
        self.job = SteadyJob(launch, folder, N, *arguments, stubborn=rng.random() < 0.3)
        self.story = [" ".join(arguments)]

    def play(self):
        launched, rng = self.job.launched, self.rng
        launched.read_for(rng.uniform(0.0, 0.3))
        for _ in range(rng.randint(1, 8)):
            if launched.has_exited:
                return
            rng.choices([self.hit_worker, self.hit_launcher, self.hit_nursery], [6, 2, 1])[0]()
            launched.read_for(rng.choice([0.0, 0.0, 0.001, 0.01, 0.08]))

    def end(self):
        """Continue stopped processes and send SIGTERM until the launcher exits. Return its exit code."""
        launched = self.job.launched
        while not launched.has_exited:
            for process in [*launched.descendants(), procs.process(launched.pid)]:
                if process is not None and process.state == "T":
                    send(process.pid, signal.SIGCONT)
            self.ask(signal.SIGTERM)
            launched.read_for(0.3)
        return launched.wait()

    def hit_worker(self):
        if workers := self.workers():
            victim, signum = self.rng.choice(workers), self.rng.choice(FOR_WORKERS)
            self.tell(f"worker {victim.pid}", signum)
            if signum == EXIT_0:
                self.told_to_succeed.add(victim.pid)
            send(victim.pid, signum)

    def hit_nursery(self):
        nursery = self.nursery()
        if nursery is not None:
            self.is_nursery_killed = True
            self.tell("nursery", signal.SIGKILL)
            send(nursery.pid, signal.SIGKILL)

    def hit_launcher(self):
        kill = self.rng.random() < 0.1
        signum = signal.SIGKILL if kill else self.rng.choice(FOR_THE_LAUNCHER)
        self.is_launcher_killed |= kill
        for _ in range(self.rng.choice([1, 1, 2, 10])):
            self.tell("launcher", signum)
            if signum == signal.SIGTSTP:
                self.job.launched.signal(signum)
            else:
                self.ask(signum)

    def ask(self, signum):
        """Ask the launcher to stop. A job whose workers have all been told to exit with 0 may still
        succeed.
        """
        self.asked |= not {worker.pid for worker in self.workers()} <= self.told_to_succeed
        self.job.launched.signal(signum)

    def workers(self):
        nursery = self.nursery()
        return procs.children(nursery.pid) if nursery is not None else []

    def nursery(self):
        return next(iter(procs.nurseries(self.job.launched.pid)), None)

    def may_have_succeeded(self):
        """Return true if all workers of the last attempt were told to exit with 0."""
        ready = re.findall(r"READY \d (\d+) (\d+)$", self.job.launched.stderr, re.MULTILINE)
        last = max((int(attempt) for attempt, _ in ready), default=0)
        pids = {int(pid) for attempt, pid in ready if int(attempt) == last}
        return len(pids) == N and pids <= self.told_to_succeed

    def tell(self, whom, signum):
        self.story.append(f"{signal.Signals(signum).name} to {whom}")


def is_handled(launched):
    """Return true if the launcher has installed its signal handlers. Before that, it has the interpreter's
    handlers.
    """
    with open(f"/proc/{launched.pid}/status", encoding="utf-8") as status:
        (mask,) = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (signal.SIGHUP - 1) & 1)


@pytest.fixture
def rng():
    seed = int(os.environ.get("MONKEY_SEED", random.SystemRandom().randrange(10**6)))
    print(f"MONKEY_SEED={seed}")
    return random.Random(seed)


def test_the_report_is_correct_after_random_signals(launch, tmp_path, rng):
    for number in range(GAMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        game = Game(launch, folder, rng)
        launched = game.job.launched
        while not (launched.has_exited or is_handled(launched)):
            launched.read_for(0.002)
        game.play()
        code = game.end()
        story = f"game {number}: {game.story}\n{launched.stderr}"
        if code == -signal.SIGKILL:
            assert game.is_launcher_killed, story
            if game.is_nursery_killed:
                procs.assert_gone(child.pid for child in procs.adopted())
            procs.reap_adopted()
        else:
            # The exit code can only be 0 if the launcher was not asked to stop and all workers of one attempt
            # were told to exit with 0.
            assert code == 1 or (code == 0 and not game.asked and game.may_have_succeeded()), story
            assert not procs.adopted(), story
        # A worker's traceback has a prefix, so this would be a traceback of the launcher.
        assert "\nTraceback" not in "\n" + launched.stderr, story
        game.job.check_logs(is_console_complete=code != -signal.SIGKILL)
