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

from elasticrs.workers.followers import follower_of

pytestmark = pytest.mark.beyond_torchrun

LAUNCHER = ("-m", "elasticrs.launch")
SCRIPT = """
    import os
    rank = os.environ["RANK"]
    print("RAN", rank, flush=True)
"""


def test_breakpoints_stop_the_workers_even_if_they_could_be_warm(launch, worker_script):
    script, port = worker_script(SCRIPT), ports.free()
    debugpy = ("-Xfrozen_modules=off", "-m", "debugpy", "--listen", str(port), "--wait-for-client")
    argv = (sys.executable, *debugpy, *LAUNCHER)
    launched = launch("--nproc-per-node=2", "--warm=auto", script, argv=argv)
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


def test_a_tracer_records_the_workers(launch, worker_script, tmp_path):
    traced = tmp_path / "trace.json"
    argv = (sys.executable, "-m", "viztracer", "--quiet", "-o", str(traced), *LAUNCHER)
    launched = launch("--nproc-per-node=2", worker_script(SCRIPT), "--lr=1", argv=argv).exits(0)
    launched.wait_for_lines("RAN", 2, "stdout")
    launched.wait_for_line("viztracer", "stderr")
    events = json.loads(traced.read_text())["traceEvents"]
    ran = {event["pid"] for event in events if "worker.py" in event["name"]}
    assert len(ran) == 2


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


def test_nothing_follows_the_workers_of_an_ordinary_program():
    assert follower_of([sys.executable, "-u", "t.py"]) is None


def test_a_tool_that_only_watches_processes_does_not_count(replaced):
    replaced(lambda args: args)
    assert follower_of([sys.executable, "-u", "t.py"]) is None


def test_a_tool_that_changes_command_lines_is_asked_without_starting_anything(replaced):
    replaced(lambda args: ["/no/such/tool", *args])
    found = follower_of(["python", "-u", "t.py"])
    assert list(found.command) == ["/no/such/tool", "python", "-u", "t.py"]
    assert found.name == __name__.partition(".")[0]
