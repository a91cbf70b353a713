"""Handlers for the signals that request a checkpoint from a worker."""

import faulthandler
import json
import os
import signal
import sys
import textwrap

import pytest
from helpers.procs import run_program
from helpers.said import line_with

from elasticrs.train import Coordinator
from elasticrs.train.checkpoint import FileSystemCheckpointManager
from elasticrs.train.running import RequestSignals, is_default


class Asked(Coordinator):
    takes_requests = True

    def __init__(self):
        self.requests = []

    def request(self, *, leave):
        self.requests.append(leave)

    rendezvous_barrier = init_process_group = signal_training_done = None
    should_rendezvous = should_stop_training = None

    @property
    def has_round(self):
        return True


Asked.__abstractmethods__ = frozenset()


@pytest.fixture
def defaults():
    """Set the default actions of both signals, and restore the previous handlers afterwards."""
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("defaults")
def test_request_signals_are_handled_only_during_training():
    coordinator = Asked()
    with RequestSignals(coordinator):
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(signum)
    assert coordinator.requests == [False, True]
    assert is_default(signal.SIGTERM)
    assert is_default(signal.SIGUSR1)


@pytest.mark.usefixtures("defaults")
def test_handlers_of_the_program_are_not_replaced():
    coordinator, got = Asked(), []
    signal.signal(signal.SIGTERM, lambda signum, _: got.append(signum))
    with RequestSignals(coordinator):
        signal.raise_signal(signal.SIGTERM)
    assert (coordinator.requests, got) == ([], [signal.SIGTERM])


@pytest.mark.usefixtures("defaults")
def test_handlers_installed_outside_python_are_not_replaced():
    with open(os.devnull, "w") as sink:
        faulthandler.register(signal.SIGUSR1, file=sink)
        try:
            with RequestSignals(coordinator := Asked()):
                signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert coordinator.requests == []


@pytest.mark.usefixtures("defaults")
def test_a_coordinator_that_takes_no_requests_changes_no_handler():
    coordinator = Asked()
    coordinator.takes_requests = False
    with RequestSignals(coordinator):
        assert is_default(signal.SIGTERM)


def run(program):
    """Run a program that handles the request signals. Return the words that it prints, and its exit code."""
    begin = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from train.test_request_signals import Asked, RequestSignals
"""
    here = os.path.dirname(os.path.dirname(__file__))
    command = [sys.executable, "-c", begin + textwrap.dedent(program), here]
    done = run_program(command)
    return done.stdout.split(), done.returncode


def test_a_forked_child_dies_by_sigterm():
    # Send SIGTERM at once, so that some of the signals arrive before the child has restored its handlers.
    program = """
    with RequestSignals(Asked()):
        for _ in range(50):
            pid = os.fork()
            while not pid:
                signal.pause()
            os.kill(pid, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert run(program) == ([str(-signal.SIGTERM)] * 50, 0)


def test_a_second_sigterm_kills_a_worker_at_once():
    program = """
    with RequestSignals(Asked()):
        signal.raise_signal(signal.SIGTERM)
        print("goes on")
        signal.raise_signal(signal.SIGTERM)
    """
    assert run(program) == (["goes", "on"], -signal.SIGTERM)


FIXED = "min_workers=4&max_workers=4"
FLEXIBLE = "min_workers=2&max_workers=4&last_call_timeout=1&scale_up_delay=0"
NAMES = ("a", "b", "c", "d")
SIZE = 2000
TOTAL = sum(range(SIZE))


class Job:
    """Training processes that save only on request, and that train slowly until the test lets them finish."""

    def __init__(self, trainers, tmp_path, **order):
        self.trainers, self.may_end = trainers, tmp_path / "may end"
        self.folder = tmp_path / "checkpoints"
        self.order = {"size": SIZE, "checkpoints": str(self.folder), "plain": True, "savers": [], **order}

    def start(self, *names, **order):
        self.trainers.start(*names, **self.order, slow_until=str(self.may_end), **order)

    def run(self, *names, **order):
        """Start these trainers, and wait until they have taken steps."""
        self.start(*names, **order)
        self.trainers.wait("stepped", len(names))

    def saved(self):
        """Return the steps, samples and sum of each checkpoint, newest first."""
        found = []
        for each in FileSystemCheckpointManager(str(self.folder)).list_checkpoints():
            with each.open_input_stream("default") as stream:
                found.append(json.load(stream))
        return found

    def rank_of(self, name):
        return self.trainers.of("met", name)[-1]["rank"]

    def ends(self, *names):
        """Let these trainers finish. Check that each sample was taken once, and that no step was repeated."""
        self.may_end.touch()
        job = self.trainers
        job.wait_until(lambda: {told["name"] for told in job.of("finished")} >= set(names))
        found = [job.of("finished", name)[0] for name in names]
        for told in found:
            assert (told["taken"], told["total"]) == (SIZE, TOTAL), told
            assert len(told["done"]) == len(set(told["done"])), told
        return found


def test_a_checkpoint_request_to_one_worker_makes_all_workers_save_once(trainers, tmp_path):
    job = Job(trainers(FIXED), tmp_path)
    job.run(*NAMES)
    job.trainers.kill("b", signal.SIGUSR1)
    met = job.trainers.wait("met", 4)
    ((step, taken, _),) = job.saved()
    # All processes continue from the saved step in new groups, without a restart.
    assert {each["step"] for each in met} == {step}
    assert taken == step * 20
    for told in job.ends(*NAMES):
        assert told["done"] == list(range(1, SIZE // 20 + 1))
    # The second checkpoint has the final state.
    assert [each[0] for each in job.saved()] == [SIZE // 20, step]


def test_simultaneous_requests_share_a_checkpoint(trainers, tmp_path):
    job = Job(trainers(FIXED), tmp_path)
    job.run(*NAMES)
    for name in NAMES:
        job.trainers.kill(name, signal.SIGUSR1)
    job.trainers.wait("met", 4)
    job.ends(*NAMES)
    assert 2 <= len(job.saved()) <= 3, (
        "one more if a signal comes after the save, and that of the final state"
    )


def test_a_request_without_a_checkpoint_manager_is_reported_and_ignored(trainers, tmp_path):
    job = Job(trainers(FIXED), tmp_path, checkpoints=None)
    job.run(*NAMES)
    job.trainers.kill("c", signal.SIGUSR1)
    job.ends(*NAMES)
    assert len(job.trainers.of("met")) == 8, "at the start and at the end"
    line_with(job.trainers.stderr.read_text(), "checkpoint", "set_checkpoint_manager")


def test_a_missing_checkpoint_manager_is_reported_once_when_a_worker_leaves(trainers, tmp_path):
    job = Job(trainers(FLEXIBLE + "&keep_alive_interval=5"), tmp_path, checkpoints=None)
    job.run(*NAMES)
    job.trainers.kill("c", signal.SIGTERM)
    assert job.trainers.code("c") == -signal.SIGTERM
    job.ends("a", "b", "d")
    line_with(job.trainers.stderr.read_text(), "checkpoint", "set_checkpoint_manager")


def test_a_request_is_not_lost_if_a_worker_dies_while_saving(trainers, tmp_path):
    job = Job(trainers(FLEXIBLE), tmp_path)
    fault = {"in": "save", "at": 0, "do": "kill", "once": str(tmp_path / "has died")}
    job.run(*NAMES, faults=[fault])
    asked = next(name for name in NAMES if job.rank_of(name) != 0)
    job.trainers.kill(asked, signal.SIGUSR1)
    (dead,) = job.trainers.wait("does")
    assert job.trainers.code(dead["name"]) == -signal.SIGKILL
    left = [name for name in NAMES if name != dead["name"]]
    job.trainers.wait("met", 3, world=3)
    job.trainers.wait("met", 3, world=3)
    assert len(job.saved()) == 1
    job.ends(*left)


def test_rank_0_saves_on_sigterm_and_leaves_without_interrupting_the_others(trainers, tmp_path):
    job = Job(trainers(FLEXIBLE), tmp_path)
    # Rank 0 leaves while the others still read from it. It must not exit before they have finished.
    job.run(*NAMES, reads_late=True)
    leaving = next(name for name in NAMES if job.rank_of(name) == 0)
    job.trainers.kill(leaving, signal.SIGTERM)
    assert job.trainers.code(leaving) == -signal.SIGTERM
    left = [name for name in NAMES if name != leaving]
    met = job.trainers.wait("met", 3, world=3)
    ((step, _, _),) = job.saved()
    assert {each["step"] for each in met} == {step}
    job.ends(*left)
    assert "interrupted by" not in job.trainers.stderr.read_text()


def test_the_next_run_continues_at_the_step_saved_on_sigterm(trainers, tmp_path):
    job = Job(trainers(FIXED), tmp_path)
    job.run(*NAMES)
    for name in NAMES:
        job.trainers.kill(name, signal.SIGTERM)
    assert {job.trainers.code(name) for name in NAMES} == {-signal.SIGTERM}
    ((step, _, _),) = job.saved()
    assert step >= 2
    again = [name * 2 for name in NAMES]
    job.start(*again)
    for told in job.ends(*again):
        assert told["done"] == list(range(step + 1, SIZE // 20 + 1))


def test_a_leaving_worker_does_not_wait_long_for_missing_workers(trainers, tmp_path):
    job = Job(trainers(FIXED), tmp_path, meeting_limit=0.5)
    job.run(*NAMES)
    job.trainers.kill("d")
    assert job.trainers.code("d") == -signal.SIGKILL
    # The other three workers wait for a fourth one, which never comes.
    job.trainers.kill("a", signal.SIGTERM)
    assert job.trainers.code("a") == -signal.SIGTERM
    assert job.saved() == []
