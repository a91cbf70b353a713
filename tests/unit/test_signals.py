"""Tests for signals as events. Each test runs in its own process, because signal dispositions are per
process.
"""

import os
import signal
import subprocess
import sys

import pytest
from helpers import procs
from helpers.procs import run_program
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.process.signals import ECHO, RELAY, StopRequests, without_what_was_taken_back

PRELUDE = """
import ctypes, os, select, signal, sys, threading
from elasticrs import _core
from elasticrs._engine.process.signals import SignalPipe, catch_signals, ignored_signals
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
    "a_request_to_pause_is_one_of_the_signals_or_none": """
        pipe = SignalPipe([signal.SIGTERM])
        pipe.catch([signal.SIGTERM], pauses=True)
        for signum in (signal.SIGTSTP, signal.SIGTERM, signal.SIGTSTP):
            signal.raise_signal(signum)
        assert wait(pipe) == [15, 20], "many at a time are one"
        signal.raise_signal(signal.SIGTSTP)
        signal.raise_signal(signal.SIGCONT)
        assert wait(pipe) == [], "SIG-4"
        pipe.catch([signal.SIGTSTP, signal.SIGCONT], pauses=True)
        signal.raise_signal(signal.SIGTSTP)
        signal.raise_signal(signal.SIGCONT)
        assert wait(pipe) == [20, 18], "they end the job then"
    """,
    "handlers_of_pauses_wait_for_each_other": """
        pipe = SignalPipe([])
        pipe.catch([], pauses=True)
        both = {signal.SIGTSTP, signal.SIGCONT}
        libc = ctypes.CDLL(None)
        for signum, other in ((signal.SIGTSTP, signal.SIGCONT), (signal.SIGCONT, signal.SIGTSTP)):
            action = (ctypes.c_ulong * 64)()
            assert libc.sigaction(signum, None, action) == 0
            assert libc.sigismember(ctypes.byref(action, 8), other) == 1
    """,
    "a_forked_child_has_what_was_there_before": """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        hosts = lambda *_: None
        signal.signal(signal.SIGTERM, hosts)
        signal.set_wakeup_fd(writer)
        outer, inner = SignalPipe([signal.SIGTERM, signal.SIGUSR1]), SignalPipe([signal.SIGTERM])
        def fork():
            if (pid := os.fork()) == 0:
                handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
                found = [*handlers, signal.set_wakeup_fd(-1), blocked]
                os._exit(7 if found == [hosts, signal.SIG_DFL, writer, set()] else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        codes = []
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        fork()
        assert codes == [7, 7], codes
        signal.raise_signal(signal.SIGTERM)
        assert wait(inner) == [15], "the parent goes on"
        assert wait(outer) == [15]
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


PAUSES = """
pipe = SignalPipe([])
pipe.catch([signal.SIGTERM], pauses=True)
print("UP", flush=True)
for line in sys.stdin:
    if line == "take\\n":
        print(*wait(pipe), flush=True)
    elif line == "hold\\n":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])
        signal.raise_signal(signal.SIGTSTP)
        print("HELD", flush=True)
    else:
        (pipe.stop_this_process if line == "stop\\n" else _core.stop_unless_continued)()
        print("GOES ON", flush=True)
"""


class Pausing:
    """A process that executes commands from its standard input."""

    def __init__(self):
        command = [sys.executable, "-c", PRELUDE + PAUSES]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        self.pid = self.process.pid
        self.hears("UP")

    def signal(self, signum):
        os.kill(self.pid, signum)

    def tell(self, line):
        print(line, file=self.process.stdin, flush=True)

    def hears(self, line):
        assert procs.wait_readable(self.process.stdout.fileno(), procs.HANG), "it hangs"
        assert self.process.stdout.readline() == f"{line}\n"

    def takes(self, signum):
        self.signal(signum)
        self.tell("take")
        self.hears(signum.value)

    def is_stopped(self):
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def close(self):
        # Do not use SIGKILL, because the stopped process has a child that it reaps once it is continued.
        self.signal(signal.SIGCONT)
        self.process.communicate(timeout=procs.HANG)


@pytest.fixture
def pausing():
    process = Pausing()
    yield process
    process.close()


def test_a_process_stays_stopped_until_sigcont(pausing):
    for _ in range(2):
        pausing.takes(signal.SIGTSTP)
        pausing.tell("stop")
        pausing.is_stopped()
        pausing.signal(signal.SIGCONT)
        pausing.hears("GOES ON")


def test_a_sigcont_before_the_stop_cancels_the_stop(pausing):
    pausing.takes(signal.SIGTSTP)
    pausing.signal(signal.SIGCONT)
    pausing.tell("stop")
    pausing.hears("GOES ON")
    # The earlier SIGCONT cancels only the first stop.
    pausing.takes(signal.SIGTSTP)
    pausing.tell("stop")
    pausing.is_stopped()


def test_a_sigcont_after_the_last_check_cancels_the_stop(pausing):
    pausing.tell("hold")
    pausing.hears("HELD")
    pausing.signal(signal.SIGCONT)
    pausing.tell("core")
    pausing.hears("GOES ON")
    pausing.tell("hold")
    pausing.hears("HELD")
    pausing.tell("core")
    pausing.is_stopped()


def test_a_sigterm_during_a_stop_is_handled_after_sigcont(pausing):
    pausing.takes(signal.SIGTSTP)
    pausing.tell("stop")
    pausing.is_stopped()
    pausing.signal(signal.SIGTERM)
    pausing.signal(signal.SIGCONT)
    pausing.hears("GOES ON")
    pausing.tell("take")
    pausing.hears("15")


@given(st.lists(st.sampled_from([signal.SIGTSTP, signal.SIGCONT, signal.SIGTERM]), max_size=12).map(bytes))
def test_a_sigtstp_is_kept_only_if_no_sigcont_follows(received):
    is_pending = False
    for signum in received:
        is_pending = signum == signal.SIGTSTP or (is_pending and signum != signal.SIGCONT)
    left = without_what_was_taken_back(received)
    assert left.count(signal.SIGTSTP) == is_pending
    others = [signum for signum in received if signum != signal.SIGTSTP]
    assert [signum for signum in left if signum != signal.SIGTSTP] == others
    if is_pending:
        assert left.endswith(received[received.rindex(signal.SIGTSTP) :])


def run(program):
    done = run_program([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("case", CASES)
def test_the_signal_pipe_catches_and_restores_signals(case):
    run(PRELUDE + "\n".join(line[8:] for line in CASES[case].splitlines()))


TERM, INT, HUP, QUIT = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT


@pytest.mark.parametrize(
    ("came", "new"),
    [
        ([(TERM, 0), (HUP, 0), (TERM, 0.09), (INT, 0.09)], [TERM]),
        ([(TERM, 0), (HUP, ECHO), (HUP, 9)], [TERM]),
        # A shell whose process group Slurm signals passes SIGTERM on, late if the machine is busy.
        ([(TERM, 0), (TERM, ECHO), (TERM, RELAY - 0.01)], [TERM]),
        ([(TERM, 0), (TERM, RELAY)], [TERM, TERM]),
        ([(INT, 0), (TERM, 10), (TERM, 10 + ECHO), (INT, 10 + ECHO)], [INT, INT]),
        ([(TERM, 0), (HUP, 0), (TERM, 5)], [TERM, TERM]),
        ([(INT, 0), (INT, 1), (INT, 1.01)], [INT, INT, INT]),
        ([(TERM, 0), (QUIT, 1)], [TERM, QUIT]),
        # LSF sends SIGINT first and SIGTERM 10 s later.
        ([(INT, 0), (TERM, 10)], [INT]),
        ([(INT, 0), (TERM, 10), (TERM, 20)], [INT, TERM]),
        ([(HUP, 0), (HUP, 1)], [HUP]),
    ],
)
def test_echoed_signals_do_not_count_as_new_stop_requests(came, new):
    requests = StopRequests()
    assert [signum for signum, now in came if requests.is_new(signum, 1000 + now)] == new


@pytest.mark.parametrize(
    ("came", "new"),
    [
        ([(TERM, 0)], []),
        ([(TERM, 10)], []),
        ([(TERM, 10), (TERM, 10 + RELAY)], [TERM]),
        ([(HUP, 10), (TERM, 20)], []),
        ([(INT, 10)], [INT]),
    ],
)
def test_a_sigterm_after_an_order_of_elasticctl_is_the_same_request(came, new):
    requests = StopRequests()
    requests.note_order(1000)
    assert [signum for signum, now in came if requests.is_new(signum, 1000 + now)] == new
    assert requests.repeated_after(TERM, 1007) == 7
    assert requests.repeated_after(INT, 1007) is None


SIGNALLED_WHILE_FORKING = """
import os, select, signal, sys, threading
# Other threads run before the hook of the fork ends.
def linger(frame, event, _):
    if event == "return" and frame.f_code.co_name == "_after_in_parent":
        select.select([], [], [], 0.1)
sys.setprofile(linger)
def send():
    os.kill(os.getpid(), signal.SIGTERM)
# Of these hooks the last that was registered is called first: this one is called when signals are blocked.
os.register_at_fork(before=send)
from elasticrs.agent.server.polled_workers import raised_signals
from elasticrs.multiprocessing import SignalException
def fork():
    if os.fork() == 0:
        os._exit(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
# Thread.start() itself would fail if the exception came inside it.
has_started = threading.Event()
def fork_in_thread():
    has_started.wait()
    fork()
# One that comes right before the wait would not end it.
reader, writer = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(writer)
try:
    with raised_signals([signal.SIGTERM]):
        {fork}
        select.select([reader], [], [], 20)
    raise AssertionError("the signal was lost")
except SignalException:
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""


@pytest.mark.parametrize(
    "fork", ["fork()", "threading.Thread(target=fork_in_thread).start(); has_started.set()"]
)
def test_a_signal_during_a_fork_is_raised_only_in_the_parent(fork):
    run(SIGNALLED_WHILE_FORKING.replace("{fork}", fork))


TWO_AT_ONCE = """
import signal
from elasticrs.agent.server.polled_workers import raised_signals
from elasticrs.multiprocessing import SignalException
with raised_signals([signal.SIGTERM, signal.SIGHUP]):
    try:
        signal.raise_signal(signal.SIGTERM)
    except SignalException:
        signal.raise_signal(signal.SIGHUP)
    else:
        raise AssertionError("the first was not raised")
"""


def test_a_second_signal_is_not_raised_while_the_first_is_handled():
    assert run(TWO_AT_ONCE) == ""


def test_a_later_sigterm_that_is_not_raised_is_reported():
    late = "from elasticrs._engine.process import signals\nsignals.ECHO = 0\n"
    assert "SIGTERM counts as" in run(late + TWO_AT_ONCE.replace("SIGHUP)\n    else", "SIGTERM)\n    else"))
