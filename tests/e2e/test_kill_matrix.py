"""Kill each process of a job in each phase. The launcher reports the failure, leaks nothing, and loses no log
line.

Processes and descriptors are seen to by the guard around every test.
"""

import re
import signal

import pytest
from helpers import procs
from helpers.steady import EXIT_0, EXIT_1, SteadyJob, send

pytestmark = pytest.mark.beyond_torchrun

N = 3

WORKER_EVENTS = {
    "worker SIGKILL": signal.SIGKILL,
    "worker SIGSTOP": signal.SIGSTOP,
    "worker SIGSEGV": signal.SIGSEGV,
    "worker exits 1": EXIT_1,
    "worker exits 0": EXIT_0,
}
WARM = pytest.mark.parametrize("warm", [(), ("--warm", "json,colorsys")])
AGENT_EVENTS = ("agent SIGTERM", "agent SIGINT twice", "agent SIGKILL", "nursery SIGKILL")


class Phase:
    """A job that has been brought to a certain phase."""

    def __init__(self, name, launch, folder):
        warm, _, name = name.rpartition(" ")
        self.is_stopping = name == "stopping"
        arguments = ("--max-restarts", "1" if name == "restarting" else "0", "--shutdown-timeout", "1")
        arguments += ("--warm", "json") if warm else ()
        self.job = SteadyJob(launch, folder, N, *arguments, stubborn=self.is_stopping)
        self.attempt = 1 if name == "restarting" else 0
        if name in {"running", "stopping", "restarting"}:
            pids = self.job.ready()
        if name in {"stopping", "restarting"}:
            send(pids[0], EXIT_1)
        if name == "stopping":
            self.job.launched.wait_for_lines("STOPPING", N - 1)
            del pids[0]
        if name in {"starting", "restarting"}:
            # Only one worker is known to run; the others are still starting.
            pids = self.job.ready(self.attempt, count=1)
        self.pids = pids
        self.victim = max(pids)


PHASES = ("starting", "running", "stopping", "restarting")


@pytest.fixture(params=[*PHASES, *(f"warm {phase}" for phase in PHASES)])
def phase(request, launch, tmp_path):
    return Phase(request.param, launch, tmp_path)


@pytest.mark.parametrize("event", WORKER_EVENTS)
def test_each_worker_event_in_each_phase_gives_the_expected_exit_code(phase, event):
    send(phase.pids[phase.victim], WORKER_EVENTS[event])
    expected = 1
    if event == "worker SIGSTOP" and not phase.is_stopping:
        # A stopped worker is not a failure, so the job continues until the launcher gets SIGTERM.
        phase.job.launched.signal(signal.SIGTERM)
    elif event == "worker exits 0" and not phase.is_stopping:
        for rank, pid in phase.job.ready(phase.attempt).items():
            if rank != phase.victim:
                send(pid, EXIT_0)
        expected = 0
    assert phase.job.launched.wait() == expected, phase.job.launched.stderr
    phase.job.check_logs()


@pytest.mark.parametrize("event", AGENT_EVENTS)
def test_signals_to_agent_or_nursery_in_each_phase_end_all_workers(phase, event):
    launched = phase.job.launched
    if event == "nursery SIGKILL":
        send(phase.job.nursery(), signal.SIGKILL)
        # If the nursery was still forking workers, all workers start again without it. The job goes on.
        line = launched.wait_for_line("workers start cold|failed after", "stderr")
        if line[0] == "workers start cold":
            launched.signal(signal.SIGTERM)
    elif event == "agent SIGINT twice":
        launched.signal(signal.SIGINT)
        launched.signal(signal.SIGINT)
    else:
        launched.signal(signal.SIGTERM if event == "agent SIGTERM" else signal.SIGKILL)
    was_killed = event == "agent SIGKILL"
    assert launched.wait() == (-signal.SIGKILL if was_killed else 1), launched.stderr
    if was_killed:
        procs.reap_adopted()
    procs.assert_gone(phase.pids.values())
    phase.job.check_logs(is_console_complete=not was_killed)


@WARM
def test_a_nursery_paused_by_sigstop_loses_no_exit_code(launch, tmp_path, warm):
    job = SteadyJob(launch, tmp_path, N, *warm)
    pids = job.ready().values()
    send(job.nursery(), signal.SIGSTOP)
    for pid in pids:
        send(pid, EXIT_0)
    assert job.launched.wait() == 0, job.launched.stderr
    job.check_logs()


@WARM
def test_a_killed_nursery_costs_exactly_one_restart(launch, tmp_path, warm):
    job = SteadyJob(launch, tmp_path, N, "--max-restarts", "1", *warm)
    first = job.ready()
    send(job.nursery(), signal.SIGKILL)
    second = job.ready(attempt=1)
    procs.assert_gone(first.values())
    for pid in second.values():
        send(pid, EXIT_0)
    assert job.launched.wait() == 0, job.launched.stderr
    assert re.search(r"nursery died by SIGKILL.*restarting\D* 1 of 1\b", job.launched.stderr)
    job.check_logs()
