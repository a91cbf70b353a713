"""Function workers inside a host program that has children, threads and signal handlers."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers import ports
from helpers.procs import run_program

from elasticrs.launcher import LaunchConfig
from elasticrs.report.phrases import SILENT

TESTS = str(Path(__file__).parents[1])

HOST = """
import json, multiprocessing.resource_tracker, os, signal, subprocess, sys, threading, time
from elasticrs import ChildFailedError, LaunchConfig, elastic_launch, metrics
from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException

def launch(function, *args, nproc=3, restarts=0, **how):
    specs = DefaultLogsSpecs({logs!r})
    config = LaunchConfig(
        1, 1, nproc, rdzv_backend="c10d", run_id="job", max_restarts=restarts, logs_specs=specs, **how
    )
    return elastic_launch(config, function)(*args)

def rank():
    return int(os.environ["RANK"])

{functions}

if __name__ == "__main__":
{main}
    # Multiprocessing leaves its resource tracker to end by itself, some time after us.
    multiprocessing.resource_tracker._resource_tracker._stop()
"""


def host(tmp_path, functions, main):
    """Run a program that launches functions. Return the JSON value on its last line, and its stderr."""
    program = tmp_path / "host.py"
    indented = "\n".join("    " + line for line in main.strip().splitlines())
    program.write_text(HOST.format(logs=str(tmp_path / "logs"), functions=functions.strip(), main=indented))
    done = run_program([sys.executable, "-W", "default", str(program)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_arguments_of_any_size_and_queues_go_along(tmp_path):
    found, _ = host(
        tmp_path,
        """
def work(data, queue, lock):
    with lock:
        queue.put((rank(), len(data)))
""",
        """
context = multiprocessing.get_context("spawn")
queue, lock = context.Queue(), context.Lock()
launch(work, b"x" * 1_000_000, queue, lock)
print(json.dumps(sorted(queue.get(timeout=10) for _ in range(3))))
""",
    )
    assert found == [[0, 1_000_000], [1, 1_000_000], [2, 1_000_000]]


def test_a_silent_end_is_made_good_by_a_restart_and_observed(tmp_path):
    ((state, restarts, failure), metrics), _ = host(
        tmp_path,
        """
def work():
    import http.client
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(0)
    connection = http.client.HTTPConnection("127.0.0.1", int(os.environ["TORCHELASTIC_HEALTH_CHECK_PORT"]))
    connection.request("GET", "/status")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found["state"], found["restarts"], found["last_failure"]

class Kept(metrics.MetricHandler):
    values = []
    def emit(self, data):
        self.values.append(data.name)
""",
        f"""
metrics.configure(Kept())
os.environ["TORCHELASTIC_HEALTH_CHECK_PORT"] = "{ports.free()}"
value = launch(work, nproc=1, restarts=1)[0]
print(json.dumps([value, Kept.values]))
""",
    )
    assert (state, restarts) == ("HEALTHY", 1)
    assert (failure["rank"], failure["exitcode"]) == (0, 0)
    assert failure["what"] == SILENT
    assert "workers.default_role.failed" in metrics
    assert "workers.default_role.succeeded" in metrics


def test_a_function_that_cannot_be_sent_is_refused_and_leaves_no_descriptor(tmp_path):
    ((before, after), kind, said), _ = host(
        tmp_path,
        "",
        """
counts = []
multiprocessing.resource_tracker.getfd()
for _ in range(2):
    counts.append(len(os.listdir("/proc/self/fd")))
    try:
        launch(lambda: None)
    except Exception as error:
        said = str(error)
        kind = type(error).__name__
print(json.dumps([counts, kind, said]))
""",
    )
    assert after == before
    assert kind == "PicklingError"
    assert "start_method='fork'" in said


def test_the_hosts_children_descriptors_and_signals_are_left_alone(tmp_path):
    # The kernel lists a thread for a moment after it exits, so `leaks.new_threads` waits until it is gone.
    found, _ = host(
        tmp_path,
        """
def work():
    return rank()
""",
        f"""
sys.path.append({TESTS!r})
from helpers import leaks
child = subprocess.Popen(["sleep", "60"])
handler = lambda *_: None
signal.signal(signal.SIGTERM, handler)
at_first = leaks.snapshot()
launch(work)  # multiprocessing's resource tracker comes with the first one, and stays
descriptors = sorted(os.listdir("/proc/self/fd"))
launch(work)
left_alone = [descriptors == sorted(os.listdir("/proc/self/fd")), leaks.new_threads(at_first)]
print(json.dumps([*left_alone, child.poll(), signal.getsignal(signal.SIGTERM) is handler]))
child.kill()
child.wait()
""",
    )
    assert found == [True, [], None, True]


def test_a_thread_can_launch_but_not_catch_signals(tmp_path):
    values, stderr = host(
        tmp_path,
        """
def work():
    return rank()
""",
        """
values = []
thread = threading.Thread(target=lambda: values.append(launch(work)))
thread.start()
thread.join()
print(json.dumps(list(values[0].values())))
""",
    )
    assert values == [0, 1, 2]
    assert "main thread" in stderr


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_each_worker_gets_its_local_rank_for_the_macro(tmp_path, method):
    found, _ = host(
        tmp_path,
        """
def work(*arguments):
    return arguments
""",
        f"""
values = launch(work, "rank=${{local_rank}}", "$$", "${{other}}", 5, nproc=2, start_method={method!r})
print(json.dumps(list(values.values())))
""",
    )
    assert found == [[f"rank={rank}", "$", "${other}", 5] for rank in range(2)]


@pytest.mark.parametrize(
    ("program", "kind", "why"),
    [
        ("/no/such/program", "FileNotFoundError", os.strerror(errno.ENOENT)),
        ("no-such-program", "FileNotFoundError", os.strerror(errno.ENOENT)),
        ("/etc", "PermissionError", os.strerror(errno.EACCES)),
    ],
)
def test_a_program_that_cannot_be_run_is_an_error_and_torchs(tmp_path, program, kind, why):
    text, _ = host(
        tmp_path,
        "",
        f"""
try:
    launch({program!r}, restarts=3)
except {kind} as error:
    assert isinstance(error, RuntimeError) and error.strerror is None and error.errno
    print(json.dumps(str(error)))
""",
    )
    assert f"`{program}`" in text
    assert why in text


def test_a_health_check_server_ends_with_the_workers_and_an_empty_temporary_folder_is_removed(tmp_path):
    found, _ = host(
        tmp_path,
        "",
        """
from elasticrs.agent.server.health_check_server import HealthCheckServer
said = []
class Server(HealthCheckServer):
    def start(self): said.append("start")
    def stop(self): said.append("stop")
os.environ["TMPDIR"] = temporary = os.path.join(os.path.dirname(__file__), "tmp")
os.mkdir(temporary)
config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", max_restarts=0)
try:
    elastic_launch(config, "false", Server(time.time, 0, 60))()
except ChildFailedError as error:
    said.append(error.name)
print(json.dumps([*said, os.listdir(temporary)]))
""",
    )
    assert found == ["start", "stop", "false", []]


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"hang_timeout": 0}, "hang_timeout .*0"),
        ({"hang_timeout": "auto:0"}, "hang_timeout .*'auto:0'"),
        ({"hang_timeout": "soon"}, "hang_timeout .*'soon'"),
        ({"hang_timeout": 5, "hang_startup_timeout": -1}, "hang_startup_timeout .*-1"),
        ({"exit_timeout": -1}, "exit_timeout .*-1"),
        ({"hang_startup_timeout": 5}, "hang_startup_timeout .*hang_timeout.*"),
    ],
)
def test_invalid_limits_of_heartbeats_are_refused(limits, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        LaunchConfig(1, 1, 1, **limits)


def test_a_program_that_is_no_file_is_refused_before_any_start():
    program = """
from elasticrs import LaunchConfig, elastic_launch
def function(): pass
try:
    elastic_launch(LaunchConfig(1, 1, 1, rdzv_backend="c10d", run_id="job"), function)()
except RuntimeError as error:
    print(error)
"""
    done = run_program([sys.executable, "-"], input=program)
    assert re.search(r"\(<stdin>\).*start_method='fork'", done.stdout)


REPLACED = """
def work():
    # It would use elasticrs.train.
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank() == 1:
        if life < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(os.open("gate", os.O_WRONLY), b"xx")
    else:
        os.read(os.open("gate", os.O_RDONLY), 1)
    return life, os.environ["ELASTICRS_TRAIN_MEMBER"].split(), "x" * 100_000
"""
REPLACES = """
os.mkfifo("gate")
values = launch(work, restarts=5, on_failure="replace", {how})
print(json.dumps([values[rank] for rank in sorted(values)]))
"""


@pytest.mark.parametrize("how", ["", 'warm="json"'])
def test_values_are_those_of_the_last_in_each_place(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    values, errors = host(tmp_path, REPLACED, REPLACES.format(how=how))
    assert [life for life, _, _ in values] == [0, 2, 0], "the others were left alone"
    assert [len(member) for _, member, _ in values] == [1, 2, 1], "who came later knows whose place it has"
    assert {len(text) for _, _, text in values} == {100_000}
    assert len(re.findall(r"SIGKILL; 2 others .*; replaced", errors)) == 2


@pytest.mark.parametrize(
    ("functions", "main", "why"),
    [
        ("", 'launch(print, on_failure="replace", start_method="fork")', "start method fork"),
        ("", 'launch(print, on_failure="all")', "on_failure must be"),
        (
            "import elasticrs.train\nfrom elasticrs.agent.server import LocalElasticAgent\n"
            "LocalElasticAgent._rendezvous = lambda *_: None\ndef work(): ...",
            'launch(work, on_failure="replace")',
            "_rendezvous was replaced",
        ),
    ],
)
def test_jobs_without_replacement_are_refused(tmp_path, functions, main, why):
    attempt = f"try:\n    {main}\nexcept ValueError as error:\n    print(json.dumps(str(error)))"
    message, _ = host(tmp_path, functions, attempt)
    assert why in message
    assert "on_failure" in message
