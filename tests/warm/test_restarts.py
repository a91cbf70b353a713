"""Tests for restarts of jobs with ``--warm``: how long they took, and why some started cold."""

import json
import os
import re
import signal
import sys
import venv

import pytest
from helpers import procs
from helpers.nodes import meeting
from helpers.said import line_with, says
from helpers.steady import EXIT_0, SteadyJob, send

pytestmark = pytest.mark.beyond_torchrun


def read_events(path, name):
    """Return the metadata of the events with this name."""
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return [each["metadata"] for each in told if each["name"] == name]


def restarted(launch, folder, modules, *, loses_nursery=False, env=None):
    """Run a job whose first attempt fails because a worker or the nursery is killed. Return the launcher, and
    the metadata of the restart in the event log.
    """
    events = f"--event-log-handler=file:{folder / 'events'}"
    job = SteadyJob(launch, folder, 2, "--max-restarts=1", f"--warm={modules}", events, env=env or {})
    pids = job.ready()
    send(job.nursery() if loses_nursery else pids[1], signal.SIGKILL)
    for pid in job.ready(1).values():
        send(pid, EXIT_0)
    job.launched.exits(0)
    _, about = (json.loads(each["metadata"]) for each in read_events(folder / "events", "attempt running"))
    return job.launched, about


def test_a_warm_restart_reports_its_duration_and_phases(launch, tmp_path):
    launched, started = restarted(launch, tmp_path, "colorsys")
    assert (started["warm"], started["why_cold"]) == (True, None)
    assert {"stopping", "starting"} <= started["phases_ms"].keys()
    line = r"attempt 1 .* ([\d.]+) ms after the failure .*\(\w+ [\d.]+\), warm$"
    (span,) = re.findall(line, launched.stderr, re.MULTILINE)
    assert float(span) == pytest.approx(sum(started["phases_ms"].values()), abs=0.06)


def test_a_restart_that_waits_for_an_import_reports_the_import_time(launch, tmp_path):
    _, started = restarted(launch, tmp_path, "colorsys", loses_nursery=True)
    assert started["warm"] is True
    assert started["phases_ms"]["importing"] > 0


def test_a_cold_restart_is_reported_with_its_cause(launch, tmp_path):
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    launched, started = restarted(launch, tmp_path, "colorsys", env={"PYTHON_EXEC": str(wrapper)})
    why = started["why_cold"]
    assert started["warm"] is False
    says(why, "no effect", "wrapper ")
    assert re.search(rf"attempt 1 .*\), cold: {re.escape(why)}$", launched.stderr, re.MULTILINE)


FAILS_ONCE = """
    import os, signal, sys
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fails = os.environ["RANK"] == sys.argv[1]
        # Each waits for the other one.
        open(sys.argv[2], "r" if fails else "w").close()
        if fails:
            os._exit(3)
        signal.pause()
    os.write(1, f"GROUP {os.environ['GROUP_RANK']}\\n".encode())
"""


@pytest.mark.parametrize(("rank", "since"), [("0", "the failure"), ("1", "the stop")])
def test_only_the_first_node_reports_the_duration_of_a_restart(launch, tmp_path, worker_script, rank, since):
    options = (*meeting(), "--max-restarts=1")
    script, fifo = worker_script(FAILS_ONCE), tmp_path / "both run"
    os.mkfifo(fifo)
    agents = [launch(*options, script, rank, fifo) for _ in range(2)]
    told = {
        agent.exits(0).stdout: re.findall(rf"attempt 1 .* [\d.]+ ms after .*({since}).* \(", agent.stderr)
        for agent in agents
    }
    assert told == {"GROUP 0\n": [since], "GROUP 1\n": []}


def test_the_failure_report_contains_the_restarts(launch, worker_script):
    launched = launch("--max-restarts=1", "--warm=colorsys", worker_script("import os; os._exit(3)")).exits(1)
    note = r"note      : attempt 1 .* [\d.]+ ms .*\(.*\), warm$"
    assert re.search(note, launched.stderr, re.MULTILINE), launched.stderr


KILLER = """
import os, signal
os.register_at_fork(before=lambda: {ends})
"""


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "os.abort()"])
def test_workers_start_cold_if_a_fork_handler_ends_the_nursery(launch, library, worker_script, ends):
    env = library(killer=KILLER.format(ends=ends))
    script = worker_script("import os; os._exit(3 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))")
    options = ("--nproc-per-node=2", "--max-restarts=1", "--warm=killer")
    launched = launch(*options, script, env=env).exits(0)
    line_with(launched.stderr, "warm: workers start cold", "the nursery")
    line_with(launched.stderr, "succeeded after", "1 restart charged")


SCARCE = """
import errno, sys
forks = []
def refuse(event, _):
    if event == "os.fork":
        forks.append(event)
        if len(forks) == 4:
            raise OSError(errno.EAGAIN, "no process is left")
sys.addaudithook(refuse)
"""


def test_a_restart_whose_workers_cannot_be_forked_is_cold_and_charged_once(
    launch, library, worker_script, tmp_path
):
    script = worker_script("import os\nos._exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)")
    events = f"--event-log-handler=file:{tmp_path / 'events'}"
    options = ("--nproc-per-node=2", "--max-restarts=1", "--warm=scarce", events, script)
    launched = launch(*options, env=library(scarce=SCARCE)).exits(0)
    told = re.findall(r"attempt (.*?) is running, ([\d.]+) ms after .*? \((.*?)\), cold", launched.stderr)
    assert [attempt for attempt, _, _ in told] == ["1 (cold)"], launched.stderr
    (running,) = read_events(tmp_path / "events", "attempt running")[1:]
    spans = json.loads(running["metadata"])["phases_ms"].values()
    assert sum(spans) == pytest.approx(float(told[0][1]), abs=0.06)


@pytest.fixture
def bare(tmp_path):
    """Return the interpreter and the site-packages folder of a virtual environment with one installed
    package.
    """
    venv.create(tmp_path / "bare", symlinks=True)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    (site / "a_library.py").write_text("VALUE = 1\n")
    (site / "a_library-1.0.dist-info").mkdir()
    (site / "a_library-1.0.dist-info" / "RECORD").write_text("a_library.py,,\n")
    return tmp_path / "bare/bin/python", site


def test_installed_files_cause_a_new_import_only_if_they_were_imported(launch, tmp_path, bare):
    python, site = bare
    options = ("--max-restarts=2", "--warm=a_library")
    job = SteadyJob(launch, tmp_path, 1, *options, env={"PYTHON_EXEC": str(python)})
    for attempt, changes_library in ((0, False), (1, True)):
        pids, nursery = job.ready(attempt), job.nursery()
        (site / f"another-{attempt}.0.dist-info").mkdir()
        for number in range(50):
            (site / f"another_{attempt}_{number}.py").write_text("VALUE = 1\n")
        if changes_library:
            (site / "a_library.py").write_text("VALUE = 'another release'\n")
        send(pids[0], signal.SIGKILL)
        job.launched.wait_for_line(rf"attempt {attempt + 1} is running, .* warm$", "stderr")
        if changes_library:
            assert procs.wait_gone(nursery)
        assert (job.nursery() != nursery) is changes_library
    send(job.ready(2)[0], EXIT_0)
    job.launched.exits(0)
    said = re.findall(r"warm: (.*) has changed", job.launched.stderr)
    assert said == [str(site / "a_library.py")]
