"""The health check server of whole jobs answers correctly, copes with bad clients, and never blocks
the job.
"""

import errno
import os
import re
import signal
import socket
from functools import partial
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace

import pytest
from helpers import ports, procs
from helpers.held import held, thread_of
from helpers.http_client import get, get_json, port_of, wait_until_answers
from helpers.launcher import launcher_with
from helpers.nodes import meeting
from helpers.procs import wait_until
from helpers.said import says
from helpers.schema import schemas

from elasticrs._engine.hangs.late import Look
from elasticrs._engine.job.config import JobSpec
from elasticrs._engine.supervise.observe import job_health

(STATUS,) = schemas("metrics.md")


def waiting(*lines):
    """Return a script that runs ``lines``, prints its ranks and pid, and waits for SIGUSR1."""
    header = """
        import os, signal
        from elasticrs.timer import heartbeat
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    """
    tells = r'os.write(1, f"here {rank} {os.getpid()} {restarts}.\n".encode())'
    return "\n".join([dedent(header), *lines, tells, "signal.sigwait([signal.SIGUSR1])\n"])


WAITS = waiting()


def status_of(port):
    code, status = get_json(port, "/status")
    assert code == 200
    STATUS.validate(status)
    return status


@pytest.fixture
def samples_of():
    """Return a function that reads the metrics page with Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser")

    def read(port):
        code, kind, text = get(port, "/metrics")
        assert code == 200
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        families = list(parser.text_string_to_metric_families(text))
        assert len(families) == len({family.name for family in families})
        assert all(family.documentation and family.type != "unknown" for family in families)
        values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        return lambda family, /, **labels: values[(f"elasticrs_{family}", *sorted(labels.items()))]

    return read


RATES = (
    waiting(
        "# What elasticrs.train does.",
        "from elasticrs._engine.workers.node_page import page_of",
        "page = page_of(os.environ)",
        "page.place(int(rank), 3, 1)",
        "page.stepped()",
        "if rank < '2':",
        "    page.tell_rate(10.0 - int(rank))",
    )
    + "page.finish()\n"
)


@pytest.mark.slow
@pytest.mark.beyond_torchrun
def test_status_shows_the_rates_of_workers_and_the_slowest_worker(launch, worker_script, samples_of):
    job, port, pids = start(launch, worker_script(RATES), "--on-failure=replace", nproc=3)
    status = wait_until(lambda: status_of(port), lambda status: status["slowest"] is not None)
    assert status["slowest"] == {"rank": 1, "local_rank": 1, "rate": 9.0, "median": 9.5}
    told = [each["training"] for each in status["workers"]]
    assert told == [{"steps": 1, "rate": rate} for rate in (10.0, 9.0, None)]
    sample = samples_of(port)
    assert sample("metric_last", group="elasticrs.train", name="rate.1") == 9.0
    release(job, pids)
    assert "slow" not in job.stderr


def start(launch, script, *args, nproc=2, restart=0, **how):
    job = launch("--health-check-port=0", f"--nproc-per-node={nproc}", *args, script, **how)
    port = port_of(job)
    pids = {
        int(line[1]): int(line[2]) for line in job.wait_for_lines(rf"here (\d+) (\d+) {restart}\.", nproc)
    }
    wait_until_answers(port, "/readyz")
    return job, port, pids


def release(job, pids):
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr


def test_health_endpoints_describe_a_running_job(launch, worker_script):
    job, port, pids = start(launch, worker_script(WAITS), "--role=trainer", "--max-restarts=3")
    code, health = get_json(port, "/healthz")
    assert (code, health["alive"], health["limit_seconds"]) == (200, True, 60.0)
    assert get_json(port, "/readyz") == (200, {"ready": True, "state": "HEALTHY"})
    status = status_of(port)
    assert status["job"] | {"run_id": "", "name": ""} == {
        "run_id": "",
        "role": "trainer",
        "name": "",
        "nproc": 2,
        "max_restarts": 3,
        "restart_window": None,
    }
    assert {worker["rank"]: worker["pid"] for worker in status["workers"]} == pids
    assert {worker["state"] for worker in status["workers"]} == {"RUNNING"}
    assert status["last_failure"] is None
    assert status["agent"]["pid"] == job.pid
    release(job, pids)
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")


def test_the_metrics_page_contains_prometheus_samples_of_the_job(launch, worker_script, samples_of):
    run_id = 'a "quoted" \\ name'
    options = ("--tee=3", "--max-restarts=3", f"--rdzv-id={run_id}", "--rdzv-backend=c10d")
    job, port, pids = start(launch, worker_script(WAITS), *options, "--rdzv-endpoint=localhost:0")
    value = samples_of(port)
    assert status_of(port)["job"]["run_id"] == run_id
    assert value("job_info", run_id=run_id, node=os.uname().nodename, group_rank="0") == 1
    assert value("world_size") == 2
    assert value("restarts_left") == 3
    assert value("agent_alive") == 1
    assert value("agent_state", state="HEALTHY") == 1
    for rank in "01":
        labels = {"local_rank": rank, "rank": rank}
        assert value("worker_resident_memory_bytes", **labels) > 1 << 20
        assert value("worker_cpu_seconds_total", **labels) >= 0
        assert value("log_lines_total", **labels, stream="stdout") == 1
        assert value("log_bytes_total", **labels, stream="stdout") > 8
    started = {"group": "torchelastic", "name": "LocalElasticAgent._start_workers.success"}
    assert value("metric_last", **started) == 1
    assert value("time_seconds_total", activity="productive") > 0
    release(job, pids)


def test_status_and_metrics_show_a_failure_and_a_restart(launch, worker_script, samples_of):
    job, port, pids = start(launch, worker_script(WAITS), "--tee=1", "--max-restarts=2/1h")
    status = status_of(port)
    assert (status["job"]["max_restarts"], status["job"]["restart_window"]) == (2, 3600)
    assert status["restarts_left"] == samples_of(port)("restarts_left") == 2
    os.kill(pids[1], signal.SIGKILL)
    again = job.wait_for_lines(r"here (\d+) (\d+) 1\.", 2)
    wait_until_answers(port, "/readyz")
    status = status_of(port)
    assert (status["restarts"], status["restarts_left"], status["attempt"]) == (1, 1, "1")
    assert {"stopping", "starting"} <= status["restart_phases_ms"].keys()
    failure = status["last_failure"]
    assert (failure["rank"], failure["pid"], failure["exitcode"]) == (1, pids[1], -signal.SIGKILL)
    assert (failure["what"], failure["attempt"]) == ("died by SIGKILL", "0")
    # A quick restart takes less time than the page of metrics is kept.
    value = wait_until(lambda: samples_of(port), lambda value: value("restarts_left") == 1)
    assert value("restarts_total", cause="worker_failed") == 1
    assert value("recovery_seconds_count") == 1
    assert value("time_seconds_total", activity="restarting") > 0
    # The counters continue across the restart: each of the two attempts printed one line.
    labels = {"local_rank": "0", "rank": "0", "stream": "stdout"}
    assert value("log_lines_total", **labels) == 2
    release(job, {int(line[1]): int(line[2]) for line in again})


def test_status_shows_failures_with_exceptions_and_error_files(launch, worker_script, tmp_path):
    script = waiting(
        "if (rank, restarts) == ('1', '0'):",
        "    raise KeyError('first')",
        "if (rank, restarts) == ('1', '1'):",
        "    os._exit(3)",
    )
    options = ("--max-restarts=2", f"--log-dir={tmp_path}")
    job, port, pids = start(launch, worker_script(script), *options, restart=2)
    status = status_of(port)
    assert status["host"] == os.uname().nodename
    folder = Path(status["log_folder"])
    assert folder.parent == tmp_path
    (earlier,), last = status["earlier_failures"], status["last_failure"]
    assert re.fullmatch(r"KeyError: 'first' \(worker\.py:\d+\)", earlier["exception"])
    assert earlier["error_file"] == str(folder / "attempt_0/1/error.json")
    assert Path(earlier["error_file"]).is_file()
    assert (earlier["rank"], earlier["exitcode"]) == (1, 1)
    assert (last["rank"], last["exitcode"], last["exception"]) == (1, 3, None)
    assert last["error_file"] is None
    assert (status["cause"]["rank"], status["cause"]["what"]) == (1, last["what"])
    assert status["nodes"] == [os.uname().nodename]
    release(job, pids)


def test_status_keeps_the_failures_before_a_hang(launch, worker_script):
    script = waiting(
        "if (rank, restarts) == ('1', '0'):", "    os._exit(3)", "if restarts == '1':", "    heartbeat(7)"
    )
    options = ("--max-restarts=2", "--hang-timeout=1")
    job, port, pids = start(launch, worker_script(script), *options, restart=2)
    status = status_of(port)
    (earlier,), last = status["earlier_failures"], status["last_failure"]
    assert (earlier["rank"], earlier["exitcode"]) == (1, 3)
    says(last["what"], "hung", "step 7")
    release(job, pids)


FAILS_ON_NODE_0 = waiting("if (rank, restarts) == ('0', '0'):", "    raise KeyError('first')")


def test_every_node_shows_the_cause_of_a_failure_on_another_node(launch, worker_script):
    options = (*meeting(), "--max-restarts=1", "--health-check-port=0")
    jobs = [launch(*options, worker_script(FAILS_ON_NODE_0)) for _ in range(2)]
    pids = [int(job.wait_for_line(r"here \d (\d+) 1\.")[1]) for job in jobs]
    statuses = [
        wait_until(partial(status_of, port_of(job)), lambda found: found["cause"] is not None) for job in jobs
    ]
    for status in statuses:
        assert status["cause"]["rank"] == 0
        assert "KeyError: 'first' (worker.py:" in status["cause"]["what"]
    assert sorted(status["last_failure"] is None for status in statuses) == [False, True]
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert [job.wait() for job in jobs] == [0, 0]


def test_each_agent_has_a_health_server_that_lists_the_nodes_of_its_round(launch, worker_script, samples_of):
    port = ports.free()
    command = (*meeting("2:3", port), "--health-check-port=0", worker_script(WAITS))
    jobs = [launch(*command)]
    wait_until(lambda: ports.is_listening(port))
    jobs += [launch(*command) for _ in range(2)]

    def pids_in_round(number):
        lines = [job.wait_for_lines(r"here \d (\d+) 0\.", number)[-1] for job in jobs]
        group_ranks = set()
        for job in jobs:
            status = wait_until(partial(status_of, port_of(job)), lambda found: found["nodes"] is not None)
            assert status["nodes"] == [os.uname().nodename] * len(jobs)
            assert (status["round"], status["group"]["world_size"]) == (number, len(jobs))
            group_ranks.add(status["group"]["rank"])
            assert samples_of(port_of(job))("time_seconds_total", activity="waiting_for_nodes") > 0
        assert group_ranks == set(range(len(jobs)))
        return [int(line[1]) for line in lines]

    pids_in_round(1)
    lost = jobs.pop()
    lost.signal(signal.SIGKILL)
    lost.wait()
    procs.reap_adopted(keep=[job.pid for job in jobs])
    for pid in pids_in_round(2):
        os.kill(pid, signal.SIGUSR1)
    assert [job.wait() for job in jobs] == [0, 0]


STANDS_STILL = waiting("heartbeat(8 - int(rank))")


def test_status_says_which_ranks_stand_where_while_no_rank_makes_progress(launch, worker_script):
    argv = launcher_with("_engine.supervise.observe.job_health", PROGRESS_LIMIT=0.2)
    job, port, pids = start(launch, worker_script(STANDS_STILL), "--hang-timeout=600", argv=argv)
    status = wait_until(lambda: status_of(port), lambda found: found["no_progress"])
    assert status["state"] == "NO_PROGRESS"
    assert get_json(port, "/readyz") == (200, {"ready": True, "state": "HEALTHY"})
    assert status["no_progress"]["seconds"] >= 0.2
    says(status["no_progress"]["what"], "rank 1 in step 7", "rank 0 in step 8")
    release(job, pids)


LEAVES_A_COLLECTIVE = """
    import os, signal
    import torch
    import torch.distributed as dist
    from elasticrs.timer import heartbeat
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    dist.init_process_group("gloo")
    ones = torch.ones(4)
    dist.all_reduce(ones)
    heartbeat(1)
    os.write(1, b"here %d %d 0.\\n" % (dist.get_rank(), os.getpid()))
    if dist.get_rank() == 1:
        signal.sigwait([signal.SIGUSR1])
    dist.all_reduce(ones)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_status_says_who_waits_in_which_collective(launch, worker_script):
    argv = launcher_with("_engine.supervise.observe.job_health", PROGRESS_LIMIT=0.2)
    job, port, pids = start(launch, worker_script(LEAVES_A_COLLECTIVE), "--hang-timeout=600", argv=argv)
    waits = "rank 0 waits in all_reduce #2"
    status = wait_until(
        lambda: status_of(port), lambda found: waits in (found["no_progress"] or {"what": ""})["what"]
    )
    says(status["no_progress"]["what"], "step 1", waits, "rank 1 did not enter it")
    os.kill(pids[1], signal.SIGUSR1)
    assert job.wait() == 0, job.stderr


@pytest.mark.parametrize(
    ("modules", "is_warm", "why"),
    [("off", None, None), ("colorsys", True, None), ("auto", False, "nothing .*worker.py.*")],
)
def test_status_shows_whether_workers_start_warm_and_why_not(launch, worker_script, modules, is_warm, why):
    script = WAITS if modules != "auto" else f"def main():\n{indent(WAITS, '    ')}\nmain()"
    job, port, pids = start(launch, worker_script(script), f"--warm={modules}")
    status = status_of(port)
    assert status["warm"] is is_warm
    assert re.fullmatch(why or "None", str(status["why_cold"]))
    assert status["restart_phases_ms"] == {}
    release(job, pids)


def test_status_shows_a_paused_worker(launch, worker_script):
    job, port, pids = start(launch, worker_script(WAITS))

    def states():
        return [worker["state"] for worker in status_of(port)["workers"]]

    os.kill(pids[0], signal.SIGSTOP)
    job.wait_for_line("is stopped")
    # Poll, because responses are cached briefly and the line is printed before the state is published.
    wait_until(states, ["PAUSED", "RUNNING"].__eq__)
    os.kill(pids[0], signal.SIGCONT)
    job.wait_for_line("continues")
    wait_until(states, ["RUNNING", "RUNNING"].__eq__)
    release(job, pids)


def test_status_and_metrics_count_an_expired_timer(launch, worker_script, samples_of):
    script = worker_script(
        waiting(
            "from elasticrs import timer",
            "timer.configure(timer.FileTimerClient(os.environ['TORCHELASTIC_TIMER_FILE']))",
            "timer.expires(after=0.05 if restarts == '0' else 600, scope='epoch').__enter__()",
        )
    )
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    job, port, pids = start(launch, script, "--max-restarts=1", nproc=1, restart=1, env=env)
    # The new timer's request is already in the FIFO, so the agent reads it soon.
    status = wait_until(lambda: status_of(port), lambda status: status["timers"]["live"] == 1)
    assert status["timers"]["expired"] == 1
    assert "'epoch'" in status["last_failure"]["what"]
    value = samples_of(port)
    assert value("timers_live") == 1
    assert value("restarts_total", cause="timer_expired") == 1
    release(job, pids)


BEATS = waiting(
    "if rank == '1':",
    "    heartbeat(1204)",
    "if restarts != '0':",
    "    heartbeat.section('checkpoint', limit=None).__enter__()",
)


def test_status_and_metrics_show_a_hung_worker(launch, worker_script, samples_of):
    job, port, pids = start(
        launch, worker_script(BEATS), "--hang-timeout=1", "--max-restarts=1", nproc=2, restart=1
    )
    status = status_of(port)
    failure = status["last_failure"]
    assert failure["rank"] == 1
    assert re.match(r"hung: .* [\d.]+ s \(limit 1 s\); .*step 1,204", failure["what"])
    own, last = (worker["heartbeat"] for worker in status["workers"])
    assert (own["step"], own["section"]) == (None, "checkpoint")
    assert (last["step"], last["section"]) == (1204, "checkpoint")
    assert 0 <= last["age_seconds"] < 60
    value = samples_of(port)
    labels = {"local_rank": "1", "rank": "1"}
    assert value("worker_step", **labels) == 1204
    assert value("worker_heartbeat_age_seconds", **labels) >= last["age_seconds"]
    assert value("restarts_total", cause="worker_hung") == 1
    assert value("restarts_total", cause="timer_expired") == 0
    # The second that passed before the agent noticed the hang is not productive time.
    assert value("time_seconds_total", activity="hung") >= 1
    release(job, pids)


def test_an_agent_whose_runtime_thread_hangs_is_reported_as_not_alive(launch, worker_script):
    job, port, pids = start(launch, worker_script(WAITS), "--health-check-timeout=0.2")
    wait_until_answers(port, "/healthz")
    with held(thread_of(job.pid, "elasticrs")):
        # On a loaded machine, the agent's loop can be late too, so wait until the reason names the runtime.
        wait_until(lambda: get_json(port, "/healthz"), lambda found: "runtime" in str(found[1]["reason"]))
    wait_until_answers(port, "/healthz")
    release(job, pids)


def trickle(port):
    """Connect a client that starts a request and never finishes it."""
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
    return client


def reading_nothing(port):
    """Connect a client that sends a request and never reads the answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    return client


@pytest.mark.parametrize(("connect", "number"), [(trickle, 200), (reading_nothing, 70)])
def test_hanging_clients_do_not_delay_the_health_server_or_the_job(launch, worker_script, connect, number):
    job, port, pids = start(launch, worker_script(WAITS), "--max-restarts=1")
    stuck = [connect(port) for _ in range(number)]
    assert get_json(port, "/healthz")[0] == 200
    os.kill(pids[0], signal.SIGKILL)
    again = job.wait_for_lines(r"here (\d+) (\d+) 1\.", 2)
    assert get_json(port, "/healthz")[0] == 200
    wait_until_answers(port, "/readyz")
    below = len(os.listdir(f"/proc/{job.pid}/fd"))
    assert below < 64 + 64
    release(job, {int(line[1]): int(line[2]) for line in again})
    for client in stuck:
        client.close()


def test_unusual_http_requests_get_the_matching_status_code(launch, worker_script):
    job, port, pids = start(launch, worker_script(WAITS), nproc=1)
    for request, answer in (
        (b"POST /healthz HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /healthz HTTP/3\r\n\r\n", b"505"),
        (b"\x16\x03\x01\x02\n\n", b"400"),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n", b"431"),
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"404"),
    ):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request)
            assert client.recv(100).split(b" ")[1] == answer
    assert get(port, "/status", "HEAD") == (200, "application/json", "")
    assert get(port, "/?x=1")[0] == 200
    with trickle(port) as client:
        client.settimeout(30)
        # The server closes the connection, because it received no complete request in time.
        assert client.recv(1) == b""
    # The server listens only on 127.0.0.1.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    release(job, pids)


def test_the_health_server_listens_on_the_given_host(launch, worker_script):
    job = launch(
        *("--health-check-port=0", "--nproc-per-node=1", worker_script(WAITS)),
        env={"ELASTICRS_HEALTH_CHECK_HOST": "127.0.0.2"},
    )
    line = job.wait_for_line(r"http://127\.0\.0\.2:(\d+)", "stderr")
    socket.create_connection(("127.0.0.2", int(line[1]))).close()
    here = job.wait_for_line(r"here 0 (\d+)")
    os.kill(int(here[1]), signal.SIGUSR1)
    assert job.wait() == 0


def test_a_health_check_port_in_use_or_invalid_does_not_fail_the_job(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = launch("--no-python", "true", env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)}).exits(0)
        assert f"127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}; " in job.stderr
    job = launch("--no-python", "true", env={"TORCHELASTIC_HEALTH_CHECK_PORT": "http"}).exits(0)
    assert "TORCHELASTIC_HEALTH_CHECK_PORT: got 'http'" in job.stderr


def test_no_health_server_thread_runs_unless_requested(launch, worker_script):
    job = launch(worker_script(WAITS))
    line = job.wait_for_line(r"here 0 (\d+)")
    threads = [
        Path(f"/proc/{job.pid}/task/{thread}/comm").read_text().strip()
        for thread in os.listdir(f"/proc/{job.pid}/task")
    ]
    assert "elasticrs-healt" not in threads
    os.kill(int(line[1]), signal.SIGUSR1)
    assert job.wait() == 0


class Native:
    """Counts how often the status is published."""

    fd, viewers, published = 7, 0, 0

    def publish(self, *_):
        self.published += 1

    def take_notices(self):
        return ()

    def __getattr__(self, name):
        return lambda *_args, **_more: None


def test_a_look_makes_the_status_stale_once_and_once_more_when_it_is_old(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(job_health.time, "monotonic", lambda: clock[0])
    native = Native()
    server = SimpleNamespace(open=lambda: native, answer=lambda: None)
    health = job_health.HealthObserver(JobSpec(1, "job"), server, print)
    monkeypatch.setattr(health, "_status", dict)
    attempt = SimpleNamespace(look=None, running=dict, shown_ranks=dict, keep_files=None)
    health._attempt, health._shown_budget = attempt, health._budget()

    def publications():
        before = native.published
        for _ in range(3):
            health.fd_ready(native.fd)
        return native.published - before

    assert publications() == 0
    attempt.look = Look(clock[0], {}, {})
    assert publications() == 1
    clock[0] += job_health.LOOK_AGE + 1
    assert publications() == 1
    attempt.look = Look(clock[0], {}, {})
    assert publications() == 1
