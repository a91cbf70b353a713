"""Functions as workers of an agent, by start method."""

import json
import signal
import sys

import pytest
from helpers import procs

HOST = """
import json, multiprocessing.resource_tracker, os, signal, subprocess, sys
from elasticrs import ChildFailedError, LaunchConfig, elastic_launch
from elasticrs.agent.server import LocalElasticAgent
from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException, Std

HOOKED = {hooked!r}
if HOOKED:
    # Torch's loop, as a hook is replaced.
    plain = LocalElasticAgent._get_worker_state
    LocalElasticAgent._get_worker_state = lambda self, *how: plain(self, *how)

def launch(function, *args, **how):
    config = LaunchConfig(
        1, 1, how.pop("nproc", 2), rdzv_backend="c10d", run_id="job", start_method={method!r},
        logs_specs=DefaultLogsSpecs(sys.argv[1], tee=Std.ALL), max_restarts=how.pop("restarts", 0),
        monitor_interval=0.05, **how,
    )
    return elastic_launch(config, function)(*args)

def tell(**what):
    print("TOLD " + json.dumps(what), flush=True)

def work(size):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("the first one")
    assert os.environ["WORLD_SIZE"] == "2"
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.pause()
    print("here", os.environ["RANK"], flush=True)
    return os.environ["RANK"] * size

def wait():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    # In one piece: two write at the same time.
    os.write(1, f"RUNS {{os.getpid()}} {{child.pid}}\\n".encode())
    signal.pause()

def leave():
    os._exit(0)

def leave_once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        leave()
    return 1

if __name__ == "__main__":
{main}
    multiprocessing.resource_tracker._resource_tracker._stop()
"""


@pytest.fixture(params=["fork", "forkserver"])
def method(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["events", "hooks"])
def host(request, launch, tmp_path, method):
    def start(main):
        program = tmp_path / "host.py"
        indented = "\n".join("    " + line for line in main.strip().splitlines())
        program.write_text(HOST.format(method=method, hooked=request.param, main=indented))
        return launch(program, str(tmp_path / "logs"), argv=[sys.executable])

    return start


def told(launched):
    assert launched.wait() == 0, launched.stderr
    return json.loads(launched.stdout.rsplit("TOLD ", 1)[1])


def test_functions_run_again_and_return(host):
    launched = host(
        "tell(**{str(rank): len(value) for rank, value in launch(work, 300_000, restarts=1).items()})"
    )
    assert told(launched) == {"0": 300_000, "1": 300_000}
    assert "[default_role1]:here 1" in launched.stdout


def test_an_exception_is_the_cause(host):
    launched = host("""
try:
    launch(work, 1)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    tell(rank=rank, code=failure.exitcode, text=str(failure.message))
""")
    found = told(launched)
    assert (found["rank"], found["code"]) == (1, 1)
    assert "the first one" in found["text"]


def test_a_signal_ends_them_and_what_they_started(host):
    launched = host("""
try:
    launch(wait)
except SignalException as error:
    tell(signal=error.sigval.name)
""")
    lines = launched.wait_for_lines(r"RUNS (\d+) (\d+)", 2)
    launched.signal(signal.SIGTERM)
    assert told(launched) == {"signal": "SIGTERM"}
    procs.assert_gone(int(pid) for line in lines for pid in line.groups())


def test_an_exit_without_a_value_is_a_failure_that_a_restart_may_mend(host):
    launched = host("""
tell(values=sorted(launch(leave_once, restarts=1).values()))
try:
    launch(leave)
except ChildFailedError as error:
    codes = [found.exitcode for found in error.failures.values()]
    tell(codes=codes, text=error.get_first_failure()[1].message)
""")
    found = told(launched)
    assert 'TOLD {"values": [1, 1]}' in launched.stdout
    assert found == {"codes": [0, 0], "text": "exited with code 0 before the function returned"}
