"""Function workers of an agent, with every start method."""

import errno
import json
import os
import re
import signal
import sys

import pytest
from helpers import procs
from helpers.host_programs import told
from helpers.launcher import clean_environment
from helpers.procs import run_program

from elasticrs._engine.job.phrases import SILENT
from elasticrs.multiprocessing.api import _UNGUARDED

HOST = """
import subprocess

# The workers, which import this module, need none of this.
if __name__ == "__main__":
    from elasticrs import ChildFailedError, LaunchConfig, elastic_launch
    from elasticrs.agent.server import LocalElasticAgent
    from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException, Std

    LOGS, METHOD, LOOP = sys.argv[1:]

    if LOOP == "hooks":
        # Torch's loop, as a hook is replaced.
        plain = LocalElasticAgent._get_worker_state
        LocalElasticAgent._get_worker_state = lambda self, *how: plain(self, *how)

    class Broken(DefaultLogsSpecs):
        def reify(self, envs):
            found = super().reify(envs)
            found.stdouts = dict.fromkeys(envs, os.path.join(LOGS, "no", "such", "directory"))
            return found

    def launch(function, *args, specs=DefaultLogsSpecs, **how):
        config = LaunchConfig(
            1, 1, how.pop("nproc", 2), rdzv_backend="c10d", run_id="job", role="trainer",
            start_method=METHOD, logs_specs=specs(LOGS, tee=Std.ALL), max_restarts=how.pop("restarts", 0),
            monitor_interval=0.05, **how,
        )
        return elastic_launch(config, function)(*args)

def work(size):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("the first one")
    assert os.environ["WORLD_SIZE"] == "2"
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.pause()
    assert os.environ["ELASTICRS_ROUND"] == "2"
    print("here", os.environ["RANK"], flush=True)
    return os.environ["RANK"] * size

def wait():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    # In one piece: two write at the same time.
    os.write(1, f"RUNS {os.getpid()} {child.pid}\\n".encode())
    signal.pause()

def possessions():
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return len(os.listdir("/proc/self/fd")), sorted(children.read().split())
"""

FORKSERVER = pytest.mark.parametrize(
    "host", [("forkserver", "events"), ("forkserver", "hooks")], indirect=True, ids=["events", "hooks"]
)


@pytest.fixture(
    params=[
        ("spawn", "events"),
        ("fork", "events"),
        ("fork", "hooks"),
        ("forkserver", "events"),
        ("forkserver", "hooks"),
    ],
    ids=str,
)
def host(request, host_program, tmp_path):
    """Return a function that starts a program whose workers have a start method and are watched by a loop."""
    return lambda main, functions="": host_program(
        HOST + functions, main, str(tmp_path / "logs"), *request.param
    )


def all_told(launched):
    """Wait for the program to exit with code 0, and return the values of each of its calls of ``tell``."""
    told(launched)
    return [json.loads(values) for values in re.findall("^TOLD (.*)$", launched.stdout, re.MULTILINE)]


def test_functions_return_values_or_their_first_failure_and_leak_nothing(host):
    launched = host("""
# multiprocessing's resource tracker comes with the first one, and stays.
tell(values={rank: len(value) for rank, value in launch(work, 300_000, restarts=1).items()})
before = possessions()
launch(work, 1, restarts=1)
tell(before=before, after=possessions())
try:
    launch(work, 1)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    tell(name=error.name, rank=rank, code=failure.exitcode, text=failure.message["message"])
try:
    launch(work, 1, specs=Broken)
except RuntimeError as error:
    text = str(error)
tell(text=text, after=possessions())
""")
    returned, restarted, failed, cannot_start = all_told(launched)
    assert returned == {"values": {"0": 300_000, "1": 300_000}}
    assert "[trainer1]:here 1" in launched.stdout
    assert restarted["after"] == restarted["before"] == cannot_start["after"]
    assert failed == {"name": "work", "rank": 1, "code": 1, "text": "ValueError: the first one"}
    assert re.search("not be started.*before.*stderr|could not open the log file", cannot_start["text"])
    assert os.strerror(errno.ENOENT) in cannot_start["text"] + launched.stderr


def test_a_signal_ends_functions_and_their_child_processes(host):
    launched = host("""
try:
    launch(wait)
except SignalException as error:
    tell(signal=error.sigval.name, is_restored=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
""")
    lines = launched.wait_for_lines(r"RUNS (\d+) (\d+)", 2)
    launched.signal(signal.SIGTERM)
    assert told(launched) == {"signal": "SIGTERM", "is_restored": True}
    assert "SIGTERM" in launched.stderr
    procs.assert_gone(int(pid) for line in lines for pid in line.groups())


@FORKSERVER
def test_a_signal_is_handled_while_the_fork_server_imports(host):
    launched = host(
        """
try:
    launch(work, 1)
except SignalException as error:
    tell(signal=error.sigval.name)
""",
        """
if __name__ == "__mp_main__":
    child = subprocess.Popen(["sleep", "1000"])
    os.write(1, f"IMPORTS {os.getpid()} {child.pid}\\n".encode())
    signal.pause()
""",
    )
    pids = launched.wait_for_line(r"IMPORTS (\d+) (\d+)").groups()
    launched.signal(signal.SIGTERM)
    assert told(launched) == {"signal": "SIGTERM"}
    procs.assert_gone(map(int, pids))
    procs.reap_adopted()


@FORKSERVER
@pytest.mark.parametrize("trouble", ["stopped", "deaf"])
def test_a_stuck_fork_server_does_not_block_the_exit(host, trouble):
    launched = host(
        """
from elasticrs._engine.process import signals
signals.RELAY = 0.1
try:
    launch(work, 1)
except SignalException as error:
    tell(signal=error.sigval.name)
""",
        f"""
if __name__ == "__mp_main__":
    if {trouble == "deaf"}:
        # As in state D: what ends it is not delivered.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.write(1, f"IMPORTS {{os.getpid()}}\\n".encode())
    while True:
        signal.sigtimedwait([signal.SIGUSR1], 1000)
""",
    )
    pid = int(launched.wait_for_line(r"IMPORTS (\d+)")[1])
    if trouble == "stopped":
        os.kill(pid, signal.SIGSTOP)
        procs.wait_state(pid, "T")
    launched.signal(signal.SIGTERM)
    if trouble == "deaf":
        launched.wait_for_line("SIGTERM received", "stderr")
        launched.read_for(0.2)
        launched.signal(signal.SIGTERM)
    assert told(launched) == {"signal": "SIGTERM"}
    procs.assert_gone([pid])
    procs.reap_adopted()


@FORKSERVER
def test_a_fork_server_that_is_importing_dies_with_its_program(host):
    launched = host(
        "launch(work, 1)",
        """
if __name__ == "__mp_main__":
    os.write(1, f"IMPORTS {os.getpid()}\\n".encode())
    signal.pause()
""",
    )
    pid = int(launched.wait_for_line(r"IMPORTS (\d+)")[1])
    launched.signal(signal.SIGKILL)
    launched.wait()
    procs.assert_gone([pid])
    procs.reap_adopted()


@FORKSERVER
def test_a_module_that_cannot_be_imported_fails_the_launch(host):
    launched = host(
        """
before = possessions()[0]
try:
    launch(work, 1)
except RuntimeError as error:
    text = str(error)
tell(text=text, leaked=possessions()[0] - before - 1)
""",
        """
if __name__ == "__mp_main__":
    raise ValueError("not like this")
""",
    )
    found = told(launched)
    assert re.search("not be started.*parent.*stderr", found["text"])
    assert "ValueError: not like this" in launched.stderr
    assert found["leaked"] == 0


def test_workers_that_exit_without_a_value_hang_or_raise_and_do_not_exit_fail(host):
    launched = host(
        """
from elasticrs.timer import heartbeat
tell(values=sorted(launch(leave_once, restarts=1).values()))
try:
    launch(leave)
except ChildFailedError as error:
    codes = [found.exitcode for found in error.failures.values()]
    tell(codes=codes, text=error.get_first_failure()[1].message)
heartbeat(7)  # of no worker
try:
    launch(hang, hang_timeout=1)
except ChildFailedError as error:
    failure = error.failures[1]
    tell(ranks=sorted(error.failures), code=failure.exitcode, text=failure.message, stack=failure.stack)
try:
    launch(hold, exit_timeout=2)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    text = str(failure.error_file_data)
    tell(rank=rank, code=failure.exitcode, text=text, note=failure.note, stack=failure.stack)
""",
        """
def leave():
    os._exit(0)

def leave_once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        leave()
    return 1

def hang():
    from elasticrs.timer import heartbeat
    pipe = os.pipe()
    rank = int(os.environ["RANK"])
    heartbeat(rank)
    if rank == 1:
        os.read(pipe[0], 1)
    with heartbeat.section("the others may take any time", limit=None):
        os.read(pipe[0], 1)

def hold():
    import threading
    pipe = os.pipe()
    def upload():
        os.read(pipe[0], 1)
    if os.environ["RANK"] == "0":
        upload()
    threading.Thread(target=upload).start()
    raise ValueError("no such batch")
""",
    )
    restarted, silent, hung, held = all_told(launched)
    assert restarted == {"values": [1, 1]}
    assert silent == {"codes": [0, 0], "text": SILENT}
    assert re.search(SILENT + r"; restarting\D* 1 of 1\b", launched.stderr)

    assert (1 in hung["ranks"], hung["code"]) == (True, -9)
    assert "hung: no heartbeat for" in hung["text"]
    assert "step 1" in hung["text"]
    assert "in hang" in hung["stack"]

    assert (held["rank"], held["code"]) == (1, -9)
    assert "ValueError: no such batch" in held["text"]
    assert "2 s" in held["note"]
    assert "in upload" in held["stack"]


LAUNCH = """
from elasticrs.launcher import LaunchConfig, elastic_launch

def function():
    return 1

config = LaunchConfig(1, 1, 2, run_id="job", max_restarts=0, rdzv_backend="c10d", start_method={method!r})
elastic_launch(config, function)()
"""
CONTEXT = """
from elasticrs.multiprocessing import DefaultLogsSpecs, start_processes

def function():
    return 1

two = {{0: (), 1: ()}}, {{0: {{}}, 1: {{}}}}
context = start_processes("job", function, *two, DefaultLogsSpecs(), start_method={method!r})
failures = context.wait().failures
assert not failures, failures
"""


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("program", [LAUNCH, CONTEXT], ids=["launch", "context"])
def test_a_launch_without_a_main_guard_is_refused_without_worker_tracebacks(tmp_path, program, method):
    script = tmp_path / "script.py"
    script.write_text(program.format(method=method))
    done = run_program([sys.executable, script], env=clean_environment())
    # Reap the resource tracker, which exits shortly after the program.
    procs.reap_adopted()
    assert done.returncode == 1
    # Each worker prints one line, unless it is stopped earlier. The report contains the message as well.
    assert done.stderr.splitlines().count(_UNGUARDED) in (1, 2)
    # Only the program itself prints a traceback, not its workers.
    assert done.stderr.count("Traceback") == 1
    assert "bootstrapping" not in done.stderr
