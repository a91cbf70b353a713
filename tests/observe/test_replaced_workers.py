"""Reports about replaced workers: their ranks in the last rendezvous, and the restarts that are left."""

import json
import os
import re
import signal
import time

import pytest
from helpers import procs
from helpers.attempts import attempt_of, exited
from helpers.http_client import get, get_json, port_of, wait_until_answers
from helpers.schema import schemas

from elasticrs._engine.job.config import JobSpec
from elasticrs._engine.supervise.attempt import JobResult
from elasticrs._engine.supervise.observe.recorder import MetricRecorder
from elasticrs._engine.supervise.state_machine import Phase
from elasticrs.metrics.api import add_sink, remove_sink

pytestmark = pytest.mark.beyond_torchrun

EVENT, INNER = schemas("events.md")
(STATUS,) = schemas("metrics.md")

WORKER = """
    # Meets the others as elasticrs.train does: a node of two workers, whose ranks are not in order.
    import os, signal
    from elasticrs._engine.workers.node_page import page_of
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    page = page_of(os.environ)
    local, life = int(os.environ["LOCAL_RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"UP {local} {os.getpid()} {life}.\\n".encode())
    while signal.sigwait([signal.SIGUSR1, signal.SIGUSR2]) == signal.SIGUSR2:
        page.place(int(os.environ["SUM"]) - local, 6, 1)
        os.write(1, f"MET {local}.\\n".encode())
    page.finish()
"""


def status_with(port, expected):
    """Poll until the status and the metrics show these ranks, because responses are cached briefly. Return
    the status.
    """

    def look():
        (code, status), (_, _, page) = get_json(port, "/status"), get(port, "/metrics")
        assert code == 200
        STATUS.validate(status)
        told = {worker["local_rank"]: worker["rank"] for worker in status["workers"]}
        return told, {int(local): int(rank) for rank, local in re.findall(SAMPLE, page)}, status

    with_rank = {local: rank for local, rank in expected.items() if rank is not None}
    return procs.wait_until(look, lambda found: found[:2] == (expected, with_rank))[2]


SAMPLE = r'worker_cpu_seconds_total\{rank="(-?\d+)",local_rank="(\d+)"\}'


def test_all_reports_name_the_rank_of_the_last_rendezvous(launch, worker_script, tmp_path):
    events = tmp_path / "events"
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=2", "--on-failure=replace", "--health-check-port=0"),
        *(f"--event-log-handler=file:{events}", worker_script(WORKER)),
        env={"SUM": "5"},
    )
    port = port_of(job)
    pids = {int(up[1]): int(up[2]) for up in job.wait_for_lines(r"UP (\d) (\d+) 0\.", 2)}
    wait_until_answers(port, "/readyz")
    status_with(port, {0: 0, 1: 1})
    for local, pid in pids.items():
        os.kill(pid, signal.SIGUSR2)
        job.wait_for_line(rf"MET {local}\.")
    status_with(port, {0: 5, 1: 4})
    os.kill(pids[0], signal.SIGKILL)
    new = int(job.wait_for_line(r"UP 0 (\d+) 1\.")[1])
    job.wait_for_line(rf"rank 5 \(local_rank 0, pid {pids[0]}\) .*SIGKILL; .*replaced by pid {new}")
    status = status_with(port, {0: 0, 1: 4})
    assert (status["last_failure"]["rank"], status["restarts_left"]) == (5, 1)
    assert re.search(r"^elasticrs_recovery_seconds_count 1$", get(port, "/metrics")[2], re.MULTILINE)
    for pid in (new, pids[1]):
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr
    ends = [event["metadata"] for event in map(json.loads, events.read_text().splitlines())]
    found = [(each["global_rank"], each["worker_id"]) for each in ends if each["state"] == "FAILED"]
    assert found == [(5, str(pids[0]))]


def test_a_worker_whose_rank_was_reassigned_is_shown_without_a_rank(launch, worker_script):
    job = launch(
        *("--nproc-per-node=2", "--on-failure=replace", "--health-check-port=0", worker_script(WORKER)),
        env={"SUM": "1"},
    )
    port = port_of(job)
    pids = {int(up[1]): int(up[2]) for up in job.wait_for_lines(r"UP (\d) (\d+) 0\.", 2)}
    status_with(port, {0: 0, 1: 1})
    # Worker 0 joins a rendezvous with the rank that worker 1 was started with.
    os.kill(pids[0], signal.SIGUSR2)
    job.wait_for_line(r"MET 0\.")
    status_with(port, {0: 1, 1: None})
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr


def test_the_report_distinguishes_two_workers_with_the_same_rank(launch, worker_script):
    script = worker_script("""
        # Uses elasticrs.train
        import os, signal
        from elasticrs._engine.workers.node_page import page_of
        page_of(os.environ).place(7, 8, 1 + int(os.environ["LOCAL_RANK"]))
        os.write(1, f"UP {os.environ['LOCAL_RANK']} {os.getpid()}.\\n".encode())
        signal.pause()
    """)
    job = launch("--nproc-per-node=2", "--max-restarts=0", "--on-failure=replace", script)
    pids = {int(up[1]): int(up[2]) for up in job.wait_for_lines(r"UP (\d) (\d+)\.", 2)}
    os.kill(pids[0], signal.SIGKILL)
    job.exits(1)
    cause = job.stderr[job.stderr.index("Root Cause") :]
    assert re.search(r"rank +: none.* \(local_rank: 0\)", cause)
    assert f"(pid: {pids[0]})" in cause
    assert re.search("^Stopped .*: rank 7 ", job.stderr, re.MULTILINE)


@pytest.fixture
def values():
    """Values of all metrics that are published during the test, by name."""
    found = {}

    def keep(_, name, value):
        found[name] = value

    add_sink(keep)
    yield found
    remove_sink(keep)


def test_torch_metrics_count_the_restarts_that_were_used(values):
    recorder = MetricRecorder(JobSpec(1, "j", role="r", max_restarts=3))
    attempt = attempt_of(1, 2)
    recorder.replaced(attempt, attempt_of(1, 1))
    assert values == {"workers.r.remaining_restarts": 1, "workers.r.healthy": 1}
    # Add one more restart, which happened on another node.
    attempt.restarts = 3
    recorder.ended(JobResult(Phase.SUCCEEDED, 0, attempts=[attempt]), None)
    assert (values["workers.r.run_success_with_retries"], values["workers.r.flakiness"]) == (1, 75)


def test_a_restart_of_all_workers_is_measured_also_if_workers_are_replaceable(values):
    recorder = MetricRecorder(JobSpec(1, "j", role="r"))
    failed, again = attempt_of(1, 0, replaces=True), attempt_of(2, 1, replaces=True)
    exited(failed, 0, 1, seen_ns=time.monotonic_ns() - 5_000_000_000)
    again.after = failed
    recorder.running(JobResult(attempts=[again]))
    assert 5_000 <= values["SimpleElasticAgent._restart_workers.duration.ms"] < 60_000
