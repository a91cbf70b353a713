"""Handlers for the signals that request a checkpoint from a worker."""

import faulthandler
import os
import signal
import sys
import textwrap

import pytest
from helpers.procs import run_program

from elasticrs.train import Coordinator
from elasticrs.train.request_signals import RequestSignals, is_default


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
