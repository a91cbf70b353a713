"""Byte metrics of log files that are not tailed: with real workers, and with a size check that hangs."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.held import gone, held, hold, thread_of
from helpers.http_client import get, get_json, port_of
from helpers.procs import wait_until

WRITES = """
    import os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    os.write(1, b"x" * 1000 * (int(os.environ["RANK"]) + 1))
    os.write(2, b"y" * 9 + b"\\n")
    while signal.sigwait([signal.SIGUSR1, signal.SIGUSR2]) == signal.SIGUSR2:
        os.write(1, b"z" * 500)
"""


class Page:
    """The metrics page of one agent. Each read checks that no byte counter has decreased."""

    def __init__(self, port):
        self.port = port
        self._last = {}

    def samples(self, name):
        """Return the values of a metric, keyed by the text between the braces."""
        code, _, text = get(self.port, "/metrics")
        assert code == 200
        found = {
            labels or "": float(value)
            for labels, value in re.findall(rf"^elasticrs_{name}(?:\{{(.*)\}})? (.*)$", text, re.MULTILINE)
        }
        if name == "log_bytes_total":
            assert all(found.get(labels, 0) >= value for labels, value in self._last.items())
            self._last = found
        return found

    def counts(self):
        found = self.samples("log_bytes_total")
        return {tuple(re.findall(r'"(\w+)"', labels)[::2]): count for labels, count in found.items()}

    def until(self, **counts):
        """Poll until the byte counts equal these. `stdout0` means the stdout of rank 0."""
        expected = {(name[-1], name[:-1]): count for name, count in counts.items()}
        wait_until(self.counts, expected.__eq__)

    def workers(self, attempt="0"):
        """Wait until the attempt runs, and return its pids by rank."""
        _, status = wait_until(
            lambda: get_json(self.port, "/status"),
            lambda found: (found[1]["attempt"], found[1]["state"]) == (attempt, "HEALTHY"),
        )
        return {worker["rank"]: worker["pid"] for worker in status["workers"]}


@pytest.fixture
def start(launch, worker_script, tmp_path):
    def started(*arguments):
        job = launch(
            *("--health-check-port=0", f"--log-dir={tmp_path / 'logs'}", "--max-restarts=1"),
            *(*arguments, worker_script(WRITES)),
        )
        return job, Page(port_of(job))

    return started


def release(job, pids):
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr


def test_log_bytes_of_all_attempts_are_counted(start, tmp_path):
    job, page = start("--nproc-per-node=2", "--redirects=3")
    page.until(stdout0=1000, stderr0=10, stdout1=2000, stderr1=10)
    assert page.samples("log_lines_total") == {}
    assert page.samples("log_sizes_age_seconds")[""] >= 0
    pids = page.workers()
    # Truncate the file, as logrotate's copytruncate does. Everything written after that is new.
    (written,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    os.truncate(written, 0)
    page.until(stdout0=1000, stderr0=10, stdout1=2000, stderr1=10)
    os.kill(pids[0], signal.SIGUSR2)
    page.until(stdout0=1500, stderr0=10, stdout1=2000, stderr1=10)
    os.kill(pids[1], signal.SIGKILL)
    pids = page.workers("1")
    page.until(stdout0=2500, stderr0=20, stdout1=4000, stderr1=20)
    release(job, pids)


def test_followed_streams_are_counted_once_and_with_their_lines(start):
    job, page = start("--nproc-per-node=2", "--redirects=3", "--tee=0:2")
    page.until(stdout0=1000, stderr0=10, stdout1=2000, stderr1=10)
    pids = page.workers()
    assert page.samples("log_lines_total") == {'rank="0",local_rank="0",stream="stderr"': 1}
    release(job, pids)


def test_no_thread_measures_file_sizes_if_all_streams_are_followed(start):
    job, page = start("--nproc-per-node=1", "--tee=3")
    page.until(stdout0=1000, stderr0=10)
    pids = page.workers()
    assert page.samples("log_sizes_age_seconds") == {}
    assert thread_of(job.pid, "elasticrs-sizes") is None
    release(job, pids)


def test_a_hanging_size_check_delays_neither_scrapes_nor_the_job(start):
    job, page = start("--nproc-per-node=2", "--redirects=1", "--health-check-timeout=1000")
    page.until(stdout0=1000, stdout1=2000)
    pids = page.workers()
    with held(thread_of(job.pid, "elasticrs-sizes")):
        os.kill(pids[0], signal.SIGUSR2)
        before = page.samples("log_sizes_age_seconds")[""]
        while page.samples("log_sizes_age_seconds")[""] < before + 0.3:
            # The page still shows the last known sizes.
            assert page.counts() == {("0", "stdout"): 1000, ("1", "stdout"): 2000}
        assert get_json(page.port, "/healthz")[0] == 200
        wait_until(lambda: Path(f"/proc/{pids[0]}/fd/1").stat().st_size == 1500)
        os.kill(pids[1], signal.SIGKILL)
        pids = page.workers("1")
        assert page.counts() == {("0", "stdout"): 1000, ("1", "stdout"): 2000}
    # The released thread catches up on the end of the first attempt and on the second attempt.
    page.until(stdout0=2500, stdout1=4000)
    release(job, pids)


def test_a_hanging_size_check_does_not_keep_the_agent_from_exiting(start):
    job, page = start("--nproc-per-node=1", "--redirects=3")
    page.until(stdout0=1000, stderr0=10)
    (pid,) = page.workers().values()
    thread = thread_of(job.pid, "elasticrs-sizes")
    hold(thread)
    os.kill(pid, signal.SIGUSR1)
    assert gone(thread)
    assert job.wait() == 0, job.stderr


OWN = """
import os, sys, time
from elasticrs.agent.server.health_check_server import HealthCheckServer
from elasticrs.launcher.api import LaunchConfig, elastic_launch
from elasticrs.multiprocessing import LogsDest, LogsSpecs

class Own(LogsSpecs):
    '''All attempts write to the same file, which was there before.'''
    def reify(self, envs):
        return LogsDest({0: sys.argv[1]}, {0: ""}, {}, {}, {0: ""})
    @property
    def root_log_dir(self):
        return os.path.dirname(sys.argv[1])

server = HealthCheckServer(time.time, 0, 60)
server.open()
print("health check server on http://" + server.address, file=sys.stderr, flush=True)
config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", max_restarts=1, logs_specs=Own())
elastic_launch(config, sys.executable, server)(sys.argv[2])
"""


def test_only_new_bytes_of_an_existing_log_file_are_counted(launch, worker_script, tmp_path):
    log = tmp_path / "own.log"
    log.write_bytes(b"-" * 100)
    waits = worker_script(WRITES.replace('os.write(1, b"x"', 'len(b"x"'))
    job = launch(worker_script(OWN, "host.py"), log, waits, argv=[sys.executable])
    page = Page(port_of(job))
    job.wait_for_line("y{9}", "stderr")
    pids, added = page.workers(), 0
    # The first measurement is the baseline. All bytes that are written after it count.
    while not (counted := page.counts()["0", "stdout"]):
        with log.open("ab") as file:
            added += file.write(b".")
    assert counted <= added
    written = time.monotonic()

    def is_measured():
        now = time.monotonic()
        return page.samples("log_sizes_age_seconds")[""] < now - written

    wait_until(is_measured)
    before = page.counts()["0", "stdout"]
    os.kill(pids[0], signal.SIGUSR2)
    page.until(stdout0=before + 500)
    os.kill(pids[0], signal.SIGKILL)
    job.wait_for_lines("y{9}$", 2, "stderr")
    pids = page.workers("1")
    os.kill(pids[0], signal.SIGUSR2)
    page.until(stdout0=before + 1000)
    release(job, pids)
