"""Debuggers and tracers that are attached to the launcher also follow the workers, as they follow all other
Python child processes.
"""

import functools
import json
import subprocess
import sys

import pytest
from helpers import ports, procs
from helpers.dap import Debugger

from elasticrs._engine.workers.process import follower_of

pytestmark = pytest.mark.beyond_torchrun

LAUNCHER = ("-m", "elasticrs.launch")
SCRIPT = """
    import os
    rank = os.environ["RANK"]
    print("RAN", rank, flush=True)
"""


@pytest.mark.parametrize("how", ["--warm=auto", "--run-path"])
def test_breakpoints_stop_the_workers(launch, worker_script, how):
    script, port = worker_script(SCRIPT), ports.free()
    debugpy = ("-Xfrozen_modules=off", "-m", "debugpy", "--listen", str(port), "--wait-for-client")
    argv = (sys.executable, *debugpy, *LAUNCHER)
    launched = launch("--nproc-per-node=2", how, script, argv=argv)
    procs.wait_until(lambda: ports.is_listening(port))
    debugger = Debugger(port, script, 4)
    try:
        launched.exits(0)
        assert debugger.stops == ["breakpoint"] * 2
        launched.wait_for_line("debugpy", "stderr")
        launched.wait_for_lines("RAN", 2, "stdout")
    finally:
        debugger.close()
        procs.reap_adopted()


@pytest.mark.parametrize("how", [(), ("--run-path", "--warm=auto")], ids=str)
def test_a_tracer_records_the_workers(launch, worker_script, tmp_path, how):
    traced = tmp_path / "trace.json"
    argv = (sys.executable, "-m", "viztracer", "--quiet", "-o", str(traced), *LAUNCHER)
    launched = launch("--nproc-per-node=2", *how, worker_script(SCRIPT), "--lr=1", argv=argv).exits(0)
    launched.wait_for_lines("RAN", 2, "stdout")
    launched.wait_for_line("viztracer", "stderr")
    assert len(_processes_with(traced, "worker.py")) == 2


def _processes_with(traced, name):
    events = json.loads(traced.read_text())["traceEvents"]
    return {event["pid"] for event in events if name in event["name"]}


FUNCTIONS = """
    import os
    from elasticrs.multiprocessing import DefaultLogsSpecs, start_processes

    def work(rank):
        return rank, os.getpid()

    if __name__ == "__main__":
        arguments = {rank: (rank,) for rank in range(2)}
        logs = DefaultLogsSpecs()
        context = start_processes("", work, arguments, {0: {}, 1: {}}, logs, start_method="spawn")
        print("RAN", sorted(context.wait().return_values.values()), flush=True)
"""


def test_a_tracer_records_functions_of_a_program(worker_script, tmp_path):
    traced, program = tmp_path / "trace.json", worker_script(FUNCTIONS)
    argv = (sys.executable, "-m", "viztracer", "--quiet", "-o", str(traced), str(program))
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=procs.HANG)
    assert "RAN [(0, " in done.stdout, done.stderr
    assert len(_processes_with(traced, "work ")) == 2
    procs.reap_adopted()  # multiprocessing's resource tracker


PROFILED = """
    import os, sys
    from multiprocessing import spawn  # It remembers `sys.executable`.
    from elasticrs.launcher.api import LaunchConfig, elastic_launch

    def work():
        return os.environ["RANK"]

    if __name__ == "__main__":
        # Scalene does the same.
        os._exit, sys.executable = sys.exit, sys.argv[1]
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method=sys.argv[2])
        print("RAN", elastic_launch(config, work)(), flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_functions_run_without_a_profiler_that_replaces_the_interpreter(worker_script, tmp_path, method):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexit 1\n")
    interpreter.chmod(0o755)
    argv = (sys.executable, worker_script(PROFILED), interpreter, method)
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=procs.HANG)
    assert done.stdout == "RAN {0: '0', 1: '1'}\n", done.stderr
    (line,) = [line for line in done.stderr.splitlines() if str(interpreter) in line]
    assert "profiler" in line
    procs.reap_adopted()  # multiprocessing's resource tracker


@pytest.fixture
def replaced(monkeypatch):
    """Return a function that installs a tool. The tool rewrites the command lines of ``subprocess.Popen``."""

    def replace(rewrite):
        original = subprocess.Popen.__init__

        @functools.wraps(original)
        def init(self, args, *rest, **options):
            original(self, rewrite(args), *rest, **options)

        monkeypatch.setattr(subprocess.Popen, "__init__", init)

    return replace


def test_nothing_follows_the_workers_without_a_tool_that_changes_command_lines(replaced):
    assert follower_of([sys.executable, "-u", "t.py"]) is None
    replaced(lambda args: args)  # A tool that only watches processes.
    assert follower_of([sys.executable, "-u", "t.py"]) is None


def test_a_tool_that_changes_command_lines_is_asked_without_starting_anything(replaced):
    replaced(lambda args: ["/no/such/tool", *args])
    found = follower_of(["python", "-u", "t.py"])
    assert list(found.command) == ["/no/such/tool", "python", "-u", "t.py"]
    assert found.name == __name__.partition(".")[0]
