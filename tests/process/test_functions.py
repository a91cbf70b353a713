"""Function workers inside a host program that has children, threads and signal handlers."""

import errno
import os
import re
import sys
from pathlib import Path

import pytest
from helpers import ports
from helpers.host_programs import told
from helpers.procs import run_program

from elasticrs._engine.job.phrases import SILENT
from elasticrs.launcher import LaunchConfig

TESTS = str(Path(__file__).parents[1])

HOST = """
import multiprocessing, subprocess, threading, time

# The workers, which import this module, need none of this.
if __name__ == "__main__":
    from elasticrs import ChildFailedError, LaunchConfig, elastic_launch, metrics
    from elasticrs.multiprocessing import DefaultLogsSpecs

    def launch(function, *args, nproc=3, restarts=0, **how):
        specs = DefaultLogsSpecs(os.environ["TMPDIR"] + "/logs")
        config = LaunchConfig(
            1, 1, nproc, rdzv_backend="c10d", run_id="job", max_restarts=restarts, logs_specs=specs, **how
        )
        return elastic_launch(config, function)(*args)
"""


@pytest.fixture
def host(host_program):
    """Return a function that starts a program that launches functions."""
    return lambda main, functions="": host_program(HOST + functions, main, options=("-W", "default"))


def test_large_arguments_queues_and_locks_reach_the_functions(host):
    functions = """
def work(data, queue, lock):
    with lock:
        queue.put((own("RANK"), len(data)))
"""
    main = """
context = multiprocessing.get_context("spawn")
queue, lock = context.Queue(), context.Lock()
launch(work, b"x" * 1_000_000, queue, lock)
tell(*sorted(queue.get(timeout=10) for _ in range(3)))
"""
    assert told(host(main, functions)) == [[0, 1_000_000], [1, 1_000_000], [2, 1_000_000]]


def test_an_exit_without_a_value_is_restarted_and_shown_in_health_and_metrics(host):
    functions = """
def work():
    import http.client
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(0)
    connection = http.client.HTTPConnection("127.0.0.1", own("TORCHELASTIC_HEALTH_CHECK_PORT"))
    connection.request("GET", "/status")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found["state"], found["restarts"], found["last_failure"]
"""
    main = f"""
class Kept(metrics.MetricHandler):
    values = []
    def emit(self, data):
        self.values.append(data.name)
metrics.configure(Kept())
os.environ["TORCHELASTIC_HEALTH_CHECK_PORT"] = "{ports.free()}"
tell(*launch(work, nproc=1, restarts=1)[0], Kept.values)
"""
    state, restarts, failure, metrics = told(host(main, functions))
    assert (state, restarts) == ("HEALTHY", 1)
    assert (failure["rank"], failure["exitcode"]) == (0, 0)
    assert failure["what"] == SILENT
    assert "workers.default_role.failed" in metrics
    assert "workers.default_role.succeeded" in metrics


def test_an_unpicklable_function_is_refused_and_leaks_no_descriptor(host):
    main = """
import multiprocessing.resource_tracker
counts = []
multiprocessing.resource_tracker.getfd()
for _ in range(2):
    counts.append(len(os.listdir("/proc/self/fd")))
    try:
        launch(lambda: None)
    except Exception as error:
        said = str(error)
        kind = type(error).__name__
tell(*counts, kind, said)
"""
    before, after, kind, said = told(host(main))
    assert after == before
    assert kind == "PicklingError"
    assert "start_method='fork'" in said


def test_a_launch_changes_no_children_descriptors_or_handlers_of_its_program(host):
    # The kernel lists a thread for a moment after it exits, so `leaks.new_threads` waits until it is gone.
    main = f"""
sys.path.append({TESTS!r})
from helpers import leaks
child = subprocess.Popen(["sleep", "60"])
handler = lambda *_: None
signal.signal(signal.SIGTERM, handler)
at_first = leaks.snapshot()
launch(own, "RANK")  # multiprocessing's resource tracker comes with the first one, and stays
descriptors = sorted(os.listdir("/proc/self/fd"))
launch(own, "RANK")
left_alone = [descriptors == sorted(os.listdir("/proc/self/fd")), leaks.new_threads(at_first)]
tell(*left_alone, child.poll(), signal.getsignal(signal.SIGTERM) is handler)
child.kill()
child.wait()
"""
    assert told(host(main)) == [True, [], None, True]


def test_a_launch_from_a_thread_works_but_handles_no_signals(host):
    main = """
values = []
thread = threading.Thread(target=lambda: values.append(launch(own, "RANK")))
thread.start()
thread.join()
tell(*values[0].values())
"""
    started = host(main)
    assert told(started) == [0, 1, 2]
    assert "main thread" in started.stderr


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_the_local_rank_macro_is_expanded_for_each_worker(host, method):
    functions = """
def work(*arguments):
    return arguments
"""
    main = f"""
values = launch(work, "rank=${{local_rank}}", "$$", "${{other}}", 5, nproc=2, start_method={method!r})
tell(*values.values())
"""
    assert told(host(main, functions)) == [[f"rank={rank}", "$", "${other}", 5] for rank in range(2)]


@pytest.mark.parametrize(
    ("program", "kind", "why"),
    [
        ("/no/such/program", "FileNotFoundError", os.strerror(errno.ENOENT)),
        ("no-such-program", "FileNotFoundError", os.strerror(errno.ENOENT)),
        ("/etc", "PermissionError", os.strerror(errno.EACCES)),
    ],
)
def test_a_program_that_cannot_be_run_raises_an_error_compatible_with_torch(host, program, kind, why):
    main = f"""
try:
    launch({program!r}, restarts=3)
except {kind} as error:
    assert isinstance(error, RuntimeError) and error.strerror is None and error.errno
    tell(str(error))
"""
    (text,) = told(host(main))
    assert f"`{program}`" in text
    assert why in text


def test_a_launch_stops_its_health_check_server_and_removes_its_empty_folder(host):
    main = """
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
tell(*said, os.listdir(temporary))
"""
    assert told(host(main)) == ["start", "stop", "false", []]


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
def test_invalid_heartbeat_limits_are_refused(limits, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        LaunchConfig(1, 1, 1, **limits)


def test_a_function_of_a_program_on_stdin_is_refused():
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
    life = own("TORCHELASTIC_RESTART_COUNT")
    if own("RANK") == 1:
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
tell(*(values[rank] for rank in sorted(values)))
"""


@pytest.mark.parametrize("how", ["", 'warm="json"'])
def test_return_values_come_from_the_last_replacement_of_each_rank(host, how):
    started = host(REPLACES.format(how=how), REPLACED)
    values = told(started)
    assert [life for life, _, _ in values] == [0, 2, 0], "the others were left alone"
    assert [len(member) for _, member, _ in values] == [1, 2, 1], "who came later knows whose place it has"
    assert {len(text) for _, _, text in values} == {100_000}
    assert len(re.findall(r"SIGKILL; replaced", started.stderr)) == 2


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
def test_an_unusable_on_failure_setting_is_refused(host, functions, main, why):
    attempt = f"try:\n    {main}\nexcept ValueError as error:\n    tell(str(error))"
    (message,) = told(host(attempt, functions))
    assert why in message
    assert "on_failure" in message
