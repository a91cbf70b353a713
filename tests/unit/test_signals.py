"""Signals as events; each test in a process of its own, because dispositions belong to the process."""

import subprocess
import sys

import pytest

PRELUDE = """
import os, select, signal, sys, threading
from elasticrs.agent.signals import SignalPipe, catch_signals, ignored_signals
def wait(pipe):
    assert select.select([pipe.fd], [], [], 10)[0], "no signal came"
    return pipe.take()
"""

CASES = {
    "signals_come_in_order": """
        pipe = SignalPipe([signal.SIGTERM, signal.SIGUSR1])
        for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(signum)
        assert wait(pipe) == [10, 15, 10]
        assert pipe.take() == []
    """,
    "everything_is_put_back": """
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        pipe = SignalPipe([signal.SIGINT, signal.SIGTERM])
        assert pipe.caught == {2, 15}
        pipe.close()
        pipe.close()
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
        assert signal.set_wakeup_fd(-1) == -1
    """,
    "at_the_end_of_a_process_they_are_ignored": """
        pipe = SignalPipe([signal.SIGTERM])
        pipe.close(ignore=True)
        signal.raise_signal(signal.SIGTERM)
        assert signal.set_wakeup_fd(-1) == -1
        import atexit
        atexit.register(signal.raise_signal, signal.SIGTERM)
    """,
    "an_ignored_signal_stays_ignored": """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        pipe = SignalPipe([signal.SIGHUP, signal.SIGTERM])
        signal.raise_signal(signal.SIGHUP)
        assert pipe.caught == {15}
        assert pipe.take() == []
        assert ignored_signals() == (signal.SIGHUP,), "and not those that Python itself ignores"
    """,
    "the_set_can_change": """
        pipe = SignalPipe([signal.SIGTERM])
        pipe.catch([signal.SIGUSR2])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR2)
        assert wait(pipe) == [12]
    """,
    "a_hosts_wakeup_descriptor_goes_on": """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.set_wakeup_fd(writer)
        pipe = SignalPipe([signal.SIGTERM])
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert wait(pipe) == [15], "the host's signal is none of ours"
        assert os.read(reader, 9) == bytes([10, 15])
        pipe.close()
        assert signal.set_wakeup_fd(-1) == writer
    """,
    "only_the_main_thread_catches": """
        found, before = [], os.listdir("/proc/self/fd")
        thread = threading.Thread(target=lambda: found.append(catch_signals([signal.SIGTERM])))
        thread.start()
        thread.join()
        assert found == [None]
        assert os.listdir("/proc/self/fd") == before
        assert catch_signals([signal.SIGTERM]).caught == {15}
    """,
}


@pytest.mark.parametrize("case", CASES)
def test_signals(case):
    body = "\n".join(line[8:] for line in CASES[case].splitlines())
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
