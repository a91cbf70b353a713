"""The program ``elasticctl`` finds the jobs on this machine, shows their status, and acts on them."""

import fcntl
import http.client
import json
import os
import pty
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
from contextlib import closing
from pathlib import Path

import pytest
from helpers import procs
from helpers.elasticctl import COUNTS, SAVES, STUBBORN, WAITS, sizes, socket_of, status_of
from helpers.http_client import get, get_json, port_of
from helpers.nodes import meeting
from helpers.packages import install
from helpers.procs import wait_gone, wait_state, wait_until
from helpers.schema import schemas

from elasticrs import ctl
from elasticrs._engine.cli.control_client import Connection

FAILS_ONCE = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the first attempt")
""" + WAITS  # fmt: skip


@pytest.fixture
def start(launch, worker_script, sockets):
    """Return a function that starts a job whose workers wait, and waits until they all run."""

    def start(*options, source=WAITS, nproc=2, name="worker.py"):
        env = {"ELASTICRS_CONTROL_DIR": str(sockets)}
        job = launch(f"--nproc-per-node={nproc}", *options, worker_script(source, name), env=env)
        job.wait_for_lines(r"here (\d+) (\d+)\.", nproc)
        return job

    return start


def servers_of(job):
    """Return how many threads of the agent answer requests of ``elasticctl``."""
    names = [path.read_text() for path in Path(f"/proc/{job.pid}/task").glob("*/comm")]
    return len([name for name in names if name.startswith("elasticrs-healt")])


def test_the_first_question_starts_the_server_and_only_the_user_can_reach_it(start, sockets, asked):
    job = start("--rdzv-id=a-job", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket_of(sockets, job).stat().st_mode) == 0o600
    assert servers_of(job) == 0
    wait_until(lambda: asked("ps")[1], lambda text: " running " in text)
    assert servers_of(job) == 1
    code, text = asked("ps")
    assert code == 0
    assert text.splitlines()[-1].split()[:5] == ["a-job", "worker.py", "running", "1", "2"]
    assert text.split()[-1] == str(job.pid)
    status = json.loads(asked("status", "--json", "--job=a-job")[1])
    assert status["agent"]["pid"] == job.pid
    assert status["agent"]["uptime_seconds"] > 0
    assert [worker["state"] for worker in status["workers"]] == ["RUNNING"] * 2
    code, text = asked("status")
    assert code == 0
    assert text.startswith("worker.py (job a-job): running with 2 ranks")
    assert asked("stop")[0] == 0
    assert job.wait() == 1
    assert not any(sockets.iterdir())


def test_a_script_whose_name_is_not_valid_utf_8_has_a_status(start, asked):
    job = start(name="w\udcff.py", nproc=1)
    code, text = asked("status")
    assert code == 0
    assert text.startswith("w?.py")
    assert asked("stop")[0] == 0
    assert job.wait() == 1


def test_optimizer_steps_are_shown_without_a_hang_timeout(start, sockets, asked):
    job = start("--health-check-port=0", source=COUNTS, name="steps.py")
    workers = wait_until(
        lambda: status_of(sockets, job)["workers"],
        lambda workers: len([each for each in workers if each["progress"]]) == 2,
    )
    for worker in workers:
        assert worker["heartbeat"] is None
        assert (worker["progress"]["step"], worker["progress"]["counts"]) == (1041, "attempt")
        assert 0 <= worker["progress"]["age_seconds"] < procs.HANG
    sentence = asked("status")[1]
    assert ": running with 2 ranks for " in sentence
    assert ", step 1,041 (" in sentence
    page = get(port_of(job), "/metrics")[2]
    steps = [line.split() for line in page.splitlines() if line.startswith("elasticrs_worker_step{")]
    names = [f'elasticrs_worker_step{{rank="{rank}",local_rank="{rank}"}}' for rank in range(2)]
    assert steps == [[name, "1041"] for name in names]
    assert asked("stop", "--now")[0] == 0
    assert job.wait() == 1


@pytest.mark.parametrize(
    ("options", "source", "killed"), [((), WAITS, False), (("--now",), STUBBORN, True)], ids=["stop", "now"]
)
def test_stop_ends_the_job_and_waits_for_its_end(start, asked, tmp_path, options, source, killed):
    report = tmp_path / "report.json"
    job = start(f"--report={report}", f"--event-log-handler=file:{tmp_path}/events", source=source)
    code, text = asked("stop", *options)
    assert (code, wait_gone(job.pid)) == (0, True)
    assert ("are being killed" in text) == killed
    assert ("SIGTERM sent to 2 ranks at once" in text) != killed
    assert job.wait() == 1
    assert f"elasticctl (user {os.geteuid()}, pid {os.getpid()}): stop" in job.stderr
    order = " ".join(("stop", *options))
    assert f"stopped by elasticctl {order} after" in job.stderr
    report = json.loads(report.read_text())
    assert (report["outcome"], report["reason"]) == ("stopped", f"stopped by elasticctl {order}")
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert events[-1]["metadata"]["raw_error"] == report["reason"]
    assert job.stderr.count(f"elasticctl {order}: SIG") == 1
    assert "second stop request" not in job.stderr
    assert "SIGTERM received" not in job.stderr
    assert "another request" not in job.stderr
    assert asked("status") == (4, "elasticctl: no job of this user on this machine\n") or "other" in text


@pytest.mark.parametrize("is_signal", [False, True])
def test_a_second_stop_is_refused_and_one_with_now_kills(start, asked, tmp_path, is_signal):
    report = tmp_path / "report.json"
    job = start("--shutdown-timeout=600", f"--report={report}", source=STUBBORN)
    if is_signal:
        job.signal(signal.SIGTERM)
        job.wait_for_line("SIGTERM received", stream="stderr")
    else:
        assert asked("stop", "--no-wait")[0] == 0
    code, text = asked("stop")
    assert (code, "already" in text) == (5, True)
    for order in ("restart", "checkpoint"):
        code, text = asked(order)
        assert (code, "the job is being stopped" in text) == (5, True)
    assert [" being stopped " in asked(question)[1] for question in ("ps", "status")] == [True, True]
    assert asked("stop", "--now")[0] == 0
    assert job.wait() == 1
    told = json.loads(report.read_text())
    assert (told["signal"], told["reason"]) == (signal.SIGKILL, "stopped by elasticctl stop --now")
    assert "stopped by elasticctl stop --now after" in job.stderr


def test_a_stop_of_workers_that_are_replaced_is_answered_before_they_have_ended(start, asked):
    job = start("--on-failure=replace", "--shutdown-timeout=600", source=STUBBORN)
    code, text = asked("stop", "--no-wait")
    assert (code, "SIGTERM to its workers, SIGKILL in 600 s" in text) == (0, True)
    assert asked("stop", "--now")[0] == 0
    assert job.wait() == 1


def test_a_failure_before_the_first_question_is_known(start, sockets):
    job = start("--max-restarts=3", source=FAILS_ONCE)
    status = wait_until(lambda: status_of(sockets, job), lambda status: status["state"] == "HEALTHY")
    assert (status["restarts"], status["restarts_left"]) == (1, 2)
    assert status["last_failure"]["exception"].startswith("ValueError: the first attempt")
    assert status["round"] == 2
    assert ctl.main(["stop", "--now"]) == 0


def test_a_job_with_a_health_port_has_one_server_with_two_doors(start, sockets, asked):
    job = start("--health-check-port=0")
    port = port_of(job)
    over_socket = wait_until(lambda: status_of(sockets, job), lambda status: status["state"] == "HEALTHY")
    assert over_socket["workers"] == get_json(port, "/status")[1]["workers"]
    assert servers_of(job) == 1
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/do", json.dumps({"do": "stop"}))
        assert connection.getresponse().status == 405
    with closing(Connection(str(socket_of(sockets, job)), procs.HANG)) as connection:
        connection.request("GET", "/metrics")
        assert b"elasticrs_restarts_left" in connection.getresponse().read()
    assert asked("stop", "--now")[0] == 0


def test_several_jobs_are_named_and_none_is_guessed(start, asked):
    first, second = start(), start(name="other.py")
    code, text = asked("stop")
    assert code == 2
    assert str(first.pid) in text
    assert str(second.pid) in text
    assert asked("status", "--job=nothing")[0] == 4
    named = [start(name=f"llama-{end}.py") for end in ("a", "b")]
    code, text = asked("stop", "--job=llama")
    assert (code, "llama-a" in text, "llama-b" in text) == (2, True, True)
    for job, end in zip(named, "ab", strict=True):
        assert asked("stop", f"--job=llama-{end}")[0] == 0
        assert job.wait() == 1
    code, text = asked("stop", "--job=")
    assert (code, str(first.pid) in text, str(second.pid) in text) == (4, True, True)
    assert asked("stop", "--job=oth")[0] == 0
    assert second.wait() == 1
    assert asked("stop", f"--job={first.pid}")[0] == 0
    assert first.wait() == 1


def test_the_socket_of_a_killed_agent_is_removed(start, sockets, asked):
    job = start()
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    procs.reap_adopted()
    (left,) = sockets.iterdir()
    code, text = asked("status")
    assert code == 4
    assert f"agent {job.pid} was killed: removed the socket" in text
    assert not left.exists()


def test_a_stopped_agent_does_not_answer_and_is_listed(start, asked, monkeypatch):
    monkeypatch.setattr("elasticrs._engine.cli.control_client.ANSWER_LIMIT", 0.2)
    job = start()
    os.kill(job.pid, signal.SIGSTOP)
    wait_state(job.pid, "T")
    code, text = asked("ps")
    assert (code, "does not answer" in text) == (0, True)
    code, text = asked("status")
    assert (code, f"kill -CONT {job.pid}" in text) == (1, True)
    os.kill(job.pid, signal.SIGCONT)
    wait_until(lambda: asked("stop", "--now")[0], (0).__eq__)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.mkdir(mode=0o755), "other users can open the folder"),
        (lambda path: path.write_text(""), "not a folder"),
        (lambda path: path.symlink_to("/"), "not a folder"),
    ],
    ids=["open", "file", "link"],
)
def test_a_folder_that_others_can_use_is_not_used_and_the_job_runs(launch, sockets, make, why):
    make(sockets)
    job = launch("--no-python", "true", env={"ELASTICRS_CONTROL_DIR": str(sockets)})
    assert job.wait() == 0
    assert f"no control socket in {sockets}: {why}" in job.stderr


@pytest.mark.parametrize("length", [107, 108])
def test_a_path_of_107_bytes_is_the_longest(launch, worker_script, tmp_path, length):
    longest = len(f"/{os.getpid()}.sock")  # The pid of the agent most likely has the same number of digits.
    path = Path(f"{tmp_path}/".ljust(length - longest, "x"))
    job = launch(worker_script(WAITS), env={"ELASTICRS_CONTROL_DIR": str(path)})
    pid = int(job.wait_for_line(r"here 0 (\d+)\.")[1])
    names = [entry.name for entry in path.glob("*")]
    fits = len(f"{path}/{job.pid}.sock") <= 107
    assert names == ([f"{job.pid}.sock"] if fits else [])
    assert ("no control socket" in job.stderr) != fits
    os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0


STUCK = """
import logging, os
class Handler(logging.Handler):
    def emit(self, record):
        # As with a server for events that does not answer.
        if (gate := os.environ.get("GATE")) and os.environ["WHEN"] in record.getMessage():
            del os.environ["GATE"]
            os.write(2, b"stuck\\n")
            os.close(os.open(gate, os.O_RDONLY))
"""

BROKEN = """
import logging
from elasticrs import _core
_core.HealthServer = None
class Handler(logging.Handler):
    pass
"""


@pytest.mark.parametrize(("source", "said"), [(STUCK, False), (BROKEN, True)], ids=["whole", "broken"])
def test_the_control_socket_never_ends_the_job(launch, sockets, tmp_path, source, said):
    env = install(tmp_path / "site", "mine", source, "elasticrs.event_handlers", mine="Handler")
    env |= {"ELASTICRS_CONTROL_DIR": str(sockets)}
    job = launch(f"--max-restarts={10**11}", "--event-log-handler=mine", "--no-python", "true", env=env)
    assert job.wait() == 0, job.stderr
    assert ("no control socket in" in job.stderr, "Traceback" in job.stderr) == (said, False)


def test_without_a_folder_there_is_no_socket(launch, asked, monkeypatch):
    monkeypatch.setenv("ELASTICRS_CONTROL_DIR", "")
    job = launch("--no-python", "true", env={"ELASTICRS_CONTROL_DIR": ""})
    assert job.wait() == 0
    assert "socket" not in job.stderr
    assert asked("ps")[0] == 0


@pytest.mark.parametrize("mode", ["restart", "replace"])
def test_another_stop_is_refused_on_the_other_node(launch, worker_script, sockets, asked, mode):
    options = ("--shutdown-timeout=600", f"--on-failure={mode}")
    command = (*meeting("2"), *options, worker_script(STUBBORN))
    agents = [launch(*command, env={"ELASTICRS_CONTROL_DIR": str(sockets)}) for _ in range(2)]
    for agent in agents:
        agent.wait_for_line("here")
    assert asked("stop", "--no-wait", f"--job={agents[0].pid}")[0] == 0
    agents[1].wait_for_line("the job ends; stopping", stream="stderr")
    code, text = asked("stop", "--no-wait", f"--job={agents[1].pid}")
    assert (code, "already" in text) == (5, True)
    assert " being stopped " in asked("status", f"--job={agents[1].pid}")[1]
    assert asked("stop", "--now", f"--job={agents[1].pid}")[0] == 0
    assert [agent.wait() for agent in agents] == [1, 1]


def test_stop_on_one_node_ends_the_job_on_all(launch, worker_script, sockets, asked):
    agents = on_nodes(launch, worker_script, sockets, "2", 2)
    assert asked("stop", f"--job={agents[1].pid}")[0] == 0
    assert [agent.wait() for agent in agents] == [1, 1]


TELLS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
for number in range(20):
    print(f"out {number} of attempt {os.environ['ELASTICRS_ROUND']}", flush=True)
print("an error", file=sys.stderr, flush=True)
open(os.environ["HERE"] + os.environ["RANK"] + "." + os.environ["ELASTICRS_ROUND"], "w").close()
signal.sigwait([signal.SIGUSR1])
print("the end", flush=True)
"""


def test_logs_prints_the_last_lines_of_each_rank(launch, worker_script, sockets, tmp_path, asked):
    job = tells(launch, worker_script, sockets, tmp_path, "--redirects=3")
    code, text = asked("logs", "-n", "2")
    assert code == 0
    assert "; see elasticctl logs" in asked("status")[1]
    for rank in "01":
        own = [line for line in text.splitlines() if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] out 18 of attempt 1", f"[{rank}] out 19 of attempt 1", f"[{rank}] an error"]
    assert asked("logs", "-n", "1", "--rank=1") == (0, "out 19 of attempt 1\nan error\n")
    assert asked("logs", "--rank=2")[0] == 2
    assert asked("logs", "--events")[0] == 1
    assert asked("stop", "--now")[0] == 0
    assert job.wait() == 1


def tells(launch, worker_script, sockets, tmp_path, *options):
    env = {"ELASTICRS_CONTROL_DIR": str(sockets), "HERE": f"{tmp_path}/here"}
    script = worker_script(TELLS)
    job = launch("--nproc-per-node=2", *options, script, env=env)
    wait_until(lambda: len(list(tmp_path.glob("here*.1"))), (2).__eq__)
    return job


def test_followed_logs_go_on_with_the_next_attempt_until_the_job_ends(
    launch, worker_script, sockets, tmp_path
):
    job = tells(launch, worker_script, sockets, tmp_path, "--redirects=3", "--max-restarts=1")
    pids = {each["rank"]: each["pid"] for each in status_of(sockets, job)["workers"]}
    environ = {**os.environ, "ELASTICRS_CONTROL_DIR": str(sockets)}
    command = [sys.executable, "-m", "elasticrs.ctl", "logs", "-f", "-r", "0", "-n", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environ, text=True) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        assert client.stdout.readline() == "out 19 of attempt 1\n"
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: len(list(tmp_path.glob("here*.2"))), (2).__eq__)
        lines = iter(client.stdout.readline, "out 19 of attempt 2\n")
        assert "out 0 of attempt 2\n" in list(lines)
        pids = {each["rank"]: each["pid"] for each in status_of(sockets, job)["workers"]}
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        assert client.stdout.read().splitlines()[-1] == "the end"
        assert client.stderr.read().endswith(f"pid {job.pid}) has ended: succeeded\n")
        assert client.wait(procs.HANG) == 0
    assert job.wait() == 0


def test_events_are_followed_without_a_rank(launch, worker_script, sockets, tmp_path, asked):
    path = tmp_path / "events.jsonl"
    job = tells(launch, worker_script, sockets, tmp_path, f"--event-log-handler=file:{path}")
    code, text = asked("logs", "--events", "-n", "1000")
    assert code == 0
    assert [json.loads(line) for line in text.splitlines()]
    code, text = asked("logs")
    assert (code, "no log files: start the job with --redirects 3 or --tee 3\n" in text) == (1, True)
    assert "elasticctl logs" not in asked("status")[1]
    assert asked("stop", "--now")[0] == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (event,) = [event for event in events if event["name"] == "order received"]
    about = json.loads(event["metadata"]["metadata"])
    assert (about["order"], about["user"], about["pid"]) == ("stop --now", os.geteuid(), os.getpid())
    assert job.wait() == 1


def test_restart_costs_no_restart_and_waits_for_the_next_attempt(start, sockets, asked):
    job = start()
    before = status_of(sockets, job)
    code, text = asked("restart")
    assert code == 0
    assert "attempt 0 of round 2 is running, after" in text
    after = status_of(sockets, job)
    assert (after["round"], after["restarts"]) == (before["round"] + 1, 0)
    assert {each["pid"] for each in after["workers"]}.isdisjoint(each["pid"] for each in before["workers"])
    job.wait_for_lines(r"here (\d+) (\d+)\.", 4)
    for each in after["workers"]:
        os.kill(each["pid"], signal.SIGUSR1)
    assert job.wait() == 0


def on_nodes(launch, worker_script, sockets, nnodes, count):
    """Start ``count`` agents of a job, each as a node, and wait until the workers of all of them run."""
    options = (*meeting(nnodes), "--shutdown-timeout=20", worker_script(WAITS))
    env = {"ELASTICRS_CONTROL_DIR": str(sockets)}
    agents = [launch(*options, env=env) for _ in range(count)]
    wait_until(
        lambda: [sizes(sockets, agent) for agent in agents],
        lambda found: found == [("HEALTHY", count)] * count,
    )
    return agents


def rank_of(sockets, agent):
    return str(status_of(sockets, agent)["group"]["rank"])


def test_drain_leaves_the_other_nodes_running_and_never_goes_below_the_minimum(
    launch, worker_script, sockets, asked
):
    agents, own = on_nodes(launch, worker_script, sockets, "2:3", 3), os.uname().nodename
    code, text = asked("drain", "elsewhere", f"--job={agents[0].pid}")
    assert (code, own in text) == (2, True)
    ranks = [rank_of(sockets, agent) for agent in agents]
    for question in ("ps", "stop"):
        text = asked(question)[1]
        assert all(
            re.search(rf"{each.pid}\) with group rank {rank}|group rank {rank}\).* {each.pid}\n", text)
            for each, rank in zip(agents, ranks, strict=True)
        ), text
    code, text = asked("drain", own, f"--job={agents[0].pid}")
    assert (code, f"3 nodes are named {own}: choose one of these: {own}:0 (0)" in text) == (2, True), text
    for drained in agents:
        code, text = asked("drain", rank_of(sockets, drained), f"--job={drained.pid}")
        if code == 0:
            break
        # This agent may host the store in which the nodes meet, and may not leave then.
        assert (code, "hosts the store" in text) == (5, True)
    assert ": this node has left the job, and its agent has ended" in text
    assert drained.wait() == 1
    left = [agent for agent in agents if agent is not drained]
    wait_until(lambda: {sizes(sockets, agent) for agent in left}, ({("HEALTHY", 2)}).__eq__)
    for agent in left:
        code, text = asked("drain", rank_of(sockets, agent), f"--job={agent.pid}")
        assert (code, "needs 2 (--nnodes)" in text or "hosts" in text) == (5, True)
    assert asked("stop", f"--job={left[0].pid}")[0] == 0
    assert [agent.wait() for agent in left] == [1, 1]


@pytest.mark.parametrize("port", [(), ("--health-check-port=0",)], ids=["socket", "port"])
def test_a_stop_of_a_spare_says_that_the_job_on_the_other_nodes_ends(
    launch, worker_script, sockets, asked, port
):
    agents = on_nodes(launch, worker_script, sockets, "2", 2)
    words = Path(f"/proc/{agents[0].pid}/cmdline").read_text().split("\0")
    options = words[next(at for at, word in enumerate(words) if word.startswith("--nnodes")) : -1]
    spare = launch(*port, *options, env={"ELASTICRS_CONTROL_DIR": str(sockets)})
    spare.wait_for_line("waiting as a spare", "stderr")
    assert sum("waiting as a spare" in line for line in asked("ps")[1].splitlines()) == 1
    assert ": waiting as a spare (the job runs on 2 nodes) for " in asked("status", f"--job={spare.pid}")[1]
    code, text = asked("stop", f"--job={spare.pid}")
    assert (code, "stopping the job, which runs on 2 nodes without this one" in text) == (0, True), text
    assert [agent.wait() for agent in (*agents, spare)] == [1, 1, 1]


def test_restart_on_one_node_restarts_all_nodes(launch, worker_script, sockets, asked):
    agents = on_nodes(launch, worker_script, sockets, "2", 2)
    assert asked("restart", f"--job={agents[1].pid}")[0] == 0
    rounds = wait_until(lambda: [status_of(sockets, each)["round"] for each in agents], ([2, 2]).__eq__)
    assert rounds == [2, 2]
    assert asked("stop", f"--job={agents[0].pid}")[0] == 0
    assert [agent.wait() for agent in agents] == [1, 1]


WORKS = """
import ctypes, os, signal
from elasticrs._engine.inside.flight import answer_with_record

def load():
    os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.sigwait([signal.SIGUSR1])

def hold():
    os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
    ctypes.PyDLL(None).pause()  # keeps the GIL

if os.environ["RANK"] != "3":
    answer_with_record()
hold() if os.environ["RANK"] == "2" else load()
"""


def test_stacks_are_merged_and_ranks_without_an_answer_are_named(start, asked, monkeypatch):
    job = start(source=WORKS, nproc=4)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, text = asked("stacks")
    assert code == 0
    text = re.sub(r"signal.py:\d+", "signal.py:82", text)
    assert text.splitlines() == [
        "ranks 0, 1  sigwait (signal.py:82) <- load (worker.py:8) <- <module> (worker.py:16)",
        "rank 2: no answer within a second, so in C code that holds the GIL; install py-spy to see it",
        "rank 3: nothing in it can answer, because it has not imported torch.optim; install py-spy to see it",
    ]
    whole = asked("stacks", "--all")[1].splitlines()
    assert whole[0] == "ranks 0, 1, the most recent call first:"
    assert whole[2].endswith('/worker.py", line 8 in load')
    answer = json.loads(asked("stacks", "--json")[1])
    assert [each["can_answer"] for each in answer["silent"]] == [True, False]
    assert "elasticctl" not in job.stderr
    assert asked("stop", "--now")[0] == 0
    assert job.wait() == 1


@pytest.mark.skipif(shutil.which("py-spy", path=os.path.dirname(sys.executable)) is None, reason="no py-spy")
def test_py_spy_reads_the_stacks_of_silent_ranks(start, asked):
    job = start(source=WORKS, nproc=4)
    code, text = asked("stacks")
    assert code == 0
    if "py-spy could not" not in text:  # Some kernels do not let py-spy read.
        shown = [line.split("  ")[0] for line in text.splitlines()]
        assert shown == ["ranks 0, 1, 3", "rank 2"]
        assert "hold (worker.py:12)" in text
    assert asked("stop", "--now")[0] == 0
    assert job.wait() == 1


DEAF = SAVES.replace("signal.signal(", "os.environ['RANK'] == '0' and signal.signal(")


def test_checkpoint_signals_all_ranks_and_is_refused_if_it_would_kill_one(start, asked):
    job = start(source=SAVES)
    code, text = asked("checkpoint")
    assert (code, "SIGUSR1 sent to 2 ranks at once" in text) == (0, True)
    job.wait_for_lines(r"saved (\d)\.", 2)
    assert job.wait() == 0
    job = start(source=DEAF)
    code, text = asked("checkpoint")
    assert code == 5
    assert "SIGUSR1 would kill rank 1. A checkpoint on request needs one of these:" in text
    assert asked("stop", "--now")[0] == 0
    assert job.wait() == 1


@pytest.mark.slow
@pytest.mark.torch
def test_a_checkpoint_of_a_training_is_agreed_and_stacks_show_where_its_ranks_are(launch, sockets, asked):
    program = Path(__file__).parents[1] / "workers" / "agreed_training.py"
    env = {"ELASTICRS_CONTROL_DIR": str(sockets), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    job = launch("--nproc-per-node=2", program, "plain", "note", env=env)
    job.wait_for_lines(r"BEGUN \d+", 2)
    for number in (1, 2):
        code, text = asked("checkpoint")
        assert (
            code,
            re.search(r"SIGUSR1 sent to 2 ranks after step \d+ of this attempt, held", text) is not None,
        ) == (0, True), text
        acts = [match[1] for match in job.wait_for_lines(r"ACTED \d+ (\d+) \w+ \w+", 2 * number)]
        assert len(set(acts[-2:])) == 1
    answer = json.loads(asked("stacks", "--json")[1])
    assert answer["silent"] == []
    frames = [frame for stack in answer["stacks"] for frame in stack["frames"]]
    assert any(file == str(program) for file, _, _ in frames)
    assert sorted(rank for stack in answer["stacks"] for rank in stack["ranks"]) == [0, 1]
    code, text = asked("restart")
    assert (code, "attempt 0 of round 2 is running" in text) == (0, True)
    job.wait_for_lines(r"BEGUN \d+", 4)
    code, text = asked("stop")
    assert (code, "SIGTERM sent to 2 ranks" in text) == (0, True), text
    assert job.wait() == 1


def test_a_job_that_waits_for_nodes_can_be_asked_and_stopped(launch, worker_script, sockets, asked):
    job = launch(*meeting("2"), worker_script(WAITS), env={"ELASTICRS_CONTROL_DIR": str(sockets)})
    wait_until(socket_of(sockets, job).exists)
    status = status_of(sockets, job)
    assert (status["state"], status["group"], status["workers"]) == ("INIT", None, [])
    for order in ("restart", "stacks"):
        code, text = asked(order)
        assert (code, "no workers are running" in text) == (5, True)
    assert "starting" in asked("ps")[1]
    waits = wait_until(lambda: asked("status")[1], lambda text: "have joined" in text)
    assert re.search(
        r"^waits for 1 more node; 1 of at least 2 have joined: .* \(for at most 9 min ", waits, re.MULTILINE
    )
    assert asked("stop")[0] == 0
    assert job.wait() == 1


def test_a_job_between_attempts_tells_its_failure_and_can_be_stopped(launch, worker_script, sockets, asked):
    options = ("--max-restarts=1", "--restart-delay=600s", worker_script("raise ValueError('no')"))
    job = launch(*options, env={"ELASTICRS_CONTROL_DIR": str(sockets)})
    job.wait_for_line("restart")
    code, text = asked("status")
    assert code == 0
    assert "between attempts" in text
    assert "ValueError: no" in text
    assert re.search(r"^waits for the end of the restart delay \(for at most \d+ min ", text, re.MULTILINE)
    assert asked("restart")[0] == 5
    assert asked("stop")[0] == 0
    assert job.wait() == 1


class Terminal:
    """A run of ``elasticctl`` in a pseudo terminal of 100 columns and 30 lines."""

    def __init__(self, *args, sockets):
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(other)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elasticrs.ctl", *args],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "ELASTICRS_CONTROL_DIR": str(sockets)},
            start_new_session=True,
        )
        self._other, self._seen = other, ""

    def until(self, text):
        """Read the screen until it has shown a text, after the text of the last call."""
        while text not in self._seen:
            assert procs.wait_readable(self._own), f"{text!r} is not on the screen: {self._seen!r}"
            self._seen += os.read(self._own, 65536).decode()
        self._seen = self._seen.partition(text)[2]

    def type(self, keys):
        os.write(self._own, keys.encode())

    def end(self):
        """Wait for the end of ``elasticctl``. Return its exit code, and whether the terminal is as before."""
        code = self.process.wait(procs.HANG)
        is_restored = termios.tcgetattr(self._other) == self.before
        os.close(self._other)
        os.close(self._own)
        return code, is_restored


@pytest.fixture
def sticky(tmp_path, sockets):
    """Return a function that returns an environment, in which an agent's loop gets stuck in the handler for
    events, at the first event that contains ``when``, until the FIFO ``gate`` is opened for writing.
    """

    def make(gate, when):
        env = install(tmp_path / "site", "mine", STUCK, "elasticrs.event_handlers", mine="Handler")
        return env | {"ELASTICRS_CONTROL_DIR": str(sockets), "GATE": str(gate), "WHEN": when}

    return make


def test_an_agent_whose_loop_is_stuck_answers_the_first_question(
    launch, worker_script, sockets, sticky, tmp_path, asked, monkeypatch
):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    env = sticky(gate, "status.START")
    options = ("--nproc-per-node=2", "--redirects=2", "--event-log-handler=mine")
    job = launch(*options, worker_script(WORKS, "worker.py"), env=env)
    job.wait_for_line("stuck", "stderr")
    pids = {match[1]: match[2] for match in job.wait_for_lines(r"here (\d+) (\d+)\.", 2)}
    assert servers_of(job) == 0
    code, text = asked("status")
    assert (code, servers_of(job)) == (0, 1)
    first, second, *rest = text.splitlines()
    assert re.match(r"worker.py \(job \w+\): running with 2 ranks for ", first)
    assert re.match(r"the agent's loop has taken no step for \d+\.\d s; ", second)
    rows = [line.split()[:3] for line in rest]
    assert [["0", pids["0"], "running"], ["1", pids["1"], "running"]] == rows[-2:]
    schemas("metrics.md")[0].validate(status_of(sockets, job))
    assert " running " in asked("ps")[1]
    assert asked("logs")[0] == 0
    code, text = asked("stacks")
    stack = re.match(r"ranks 0, 1  sigwait \(signal.py:\d+\) <- load \(worker.py:8\)", text)
    assert (code, stack is None) == (0, False), text
    for limit in ("SIGNAL_LIMIT", "ANSWER_LIMIT"):
        monkeypatch.setattr(f"elasticrs._engine.cli.control.{limit}", 0.2)
    code, text = asked("stop")
    assert (code, "carries out orders only when it goes on" in text, "no answer" in text) == (1, True, True)
    os.kill(int(pids["1"]), signal.SIGKILL)
    wait_until(lambda: asked("status")[1], lambda text: "ranks 0, 1: exited" in text)
    os.close(os.open(gate, os.O_WRONLY))
    assert job.wait() == 1


def test_a_node_whose_loop_is_stuck_shows_its_own_ranks_and_that_it_has_not_asked_the_others(
    launch, worker_script, sockets, sticky, tmp_path, asked
):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    env = sticky(gate, "status.START")
    options = (*meeting(), "--redirects=2", "--event-log-handler=mine", worker_script(WORKS, "worker.py"))
    job, other = launch(*options, env=env), launch(*options, env={**env, "GATE": ""})
    job.wait_for_line("stuck", "stderr")
    ((rank, pid),) = [match.groups() for match in job.wait_for_lines(r"here (\d+) (\d+)\.", 1)]
    code, text = asked("status", f"--job={job.pid}")
    assert (code, f"{rank}     {pid}" in text) == (0, True), text
    assert "and 1 rank on other nodes, which only the agent's loop can ask" in text
    code, text = asked("stacks", f"--job={job.pid}")
    assert (code, f"rank {rank}  sigwait" in text) == (0, True), text
    assert "1 rank on other nodes: not asked, because the agent's loop is stuck" in text
    assert "ended" not in text
    os.close(os.open(gate, os.O_WRONLY))
    wait_until(lambda: asked("stop", "--now", f"--job={job.pid}")[0], (0).__eq__)
    assert [job.wait(), other.wait()] == [1, 1]


def test_an_agent_that_is_stuck_after_a_replacement_shows_the_new_worker(
    launch, worker_script, sockets, sticky, tmp_path
):
    gate = tmp_path / "gate"
    options = ("--nproc-per-node=2", "--on-failure=replace", "--max-restarts=2", "--event-log-handler=mine")
    os.mkfifo(gate)
    # The agent records the failure when it has replaced the worker.
    job = launch(*options, worker_script(WAITS), env=sticky(gate, "status.FAILED"))
    pids = {match[1]: int(match[2]) for match in job.wait_for_lines(r"here (\d+) (\d+)\.", 2)}
    os.kill(pids["1"], signal.SIGKILL)
    job.wait_for_line("stuck", "stderr")
    pids["1"] = int(job.wait_for_lines(r"here (\d+) (\d+)\.", 3)[2][2])
    found = status_of(sockets, job)
    shown = [(each["rank"], each["pid"], each["state"]) for each in found["workers"]]
    assert shown == [(0, pids["0"], "RUNNING"), (1, pids["1"], "RUNNING")]
    assert found["restarts"] == 1
    os.close(os.open(gate, os.O_WRONLY))
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0


def test_the_watch_shows_the_job_on_the_terminal_and_its_keys_act(start, sockets, asked):
    job = start(source=WORKS, nproc=2)
    terminal = Terminal("status", "--watch", sockets=sockets)
    terminal.until("worker.py (job ")
    terminal.until("running with 2 ranks")
    terminal.until("t stacks")
    terminal.type("t")
    terminal.until("load (worker.py:8)")
    terminal.type("r")
    terminal.until("restart this job?")
    terminal.type("n")
    terminal.until("t stacks")
    assert status_of(sockets, job)["round"] == 1
    terminal.type("q")
    assert terminal.end() == (0, True)
    terminal = Terminal("status", "--watch", sockets=sockets)
    terminal.until("t stacks")
    terminal.type("sy")
    terminal.until("stopping the job")
    terminal.until("has ended: stopped")
    assert job.wait() == 1
    assert terminal.end() == (0, True)
    assert asked("status", "--watch")[0] in (2, 4)


def test_help_names_the_commands_if_its_topic_is_not_one(asked):
    code, text = asked("--help", "nosuch")
    assert (code, "ps, status, logs" in text) == (2, True)
    with pytest.raises(SystemExit) as ended:
        asked("--help", "stop")
    assert ended.value.code == 0


MOVES = """
import os, signal
from elasticrs._engine.inside.flight import answer_with_record

signalled = []
signal.signal(signal.SIGUSR1, lambda *_: signalled.append(1))
answer_with_record()

def first():
    os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
    while not signalled:
        signal.pause()

def second():
    while True:
        signal.pause()

first()
second()
"""


def test_the_watch_renews_what_a_key_has_shown_and_asks_before_it_acts(start, sockets):
    job = start(source=MOVES, nproc=1)
    terminal = Terminal("status", "--watch", sockets=sockets)
    terminal.until("t stacks")
    terminal.type("t")
    terminal.until("first (worker.py:")
    os.kill(status_of(sockets, job)["workers"][0]["pid"], signal.SIGUSR1)
    terminal.until("second (worker.py:")
    terminal.type("c")
    terminal.until("checkpoint this job?")
    terminal.type("y")
    terminal.until("SIGUSR1 sent to 1 rank")
    terminal.type("d")
    terminal.until("which node leaves the job? _")
    terminal.type("n12\x7f")
    terminal.until("which node leaves the job? n1_")
    terminal.type("\n")
    terminal.until("this job has no other node that could continue")
    terminal.type("dq")
    terminal.until("which node leaves the job? q_")
    terminal.type("\x1bsy")
    terminal.until("has ended: stopped")
    assert job.wait() == 1
    assert terminal.end() == (0, True)


def test_the_watch_of_a_job_that_fails_tells_the_cause(start, sockets):
    job = start(source=WAITS + "raise ValueError('on request')", nproc=1)
    terminal = Terminal("status", "--watch", sockets=sockets)
    terminal.until("t stacks")
    os.kill(status_of(sockets, job)["workers"][0]["pid"], signal.SIGUSR1)
    terminal.until("has ended: failed; rank 0 (pid ")
    terminal.until("ValueError: on request")
    assert job.wait() == 1
    assert terminal.end() == (1, True)


@pytest.mark.privileged
def test_another_user_is_refused(start, sockets, asked):
    job = start()
    program = (
        "import http.client, socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(sys.argv[1])\n"
        'sock.sendall(b\'POST /do HTTP/1.1\\r\\nContent-Length: 13\\r\\n\\r\\n{"do":"stop"}\')\n'
        "print(sock.recv(4096).decode())\n"
    )
    # Let another user connect to the socket, because the agent is to check the user id by itself.
    for path in (sockets, *sockets.parents):
        if path == Path("/tmp"):
            break
        path.chmod(0o755)
    socket_of(sockets, job).chmod(0o666)
    command = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", program]
    done = procs.run_program([*command, str(socket_of(sockets, job))], check=True)
    assert done.stdout.startswith("HTTP/1.1 403 ")
    sockets.chmod(0o700)
    assert asked("stop", "--now")[0] == 0


def test_orders_that_are_wrong_get_an_answer(start, sockets, asked):
    job = start()
    for body, status, code in (
        (b"{}", 200, 2),
        (b"[" * 4000, 200, 2),
        (b'{"do": "dance"}', 200, 2),
        (b"\xff", 200, 2),
        (b"x" * 4097, 413, None),
    ):
        with closing(Connection(str(socket_of(sockets, job)), procs.HANG)) as connection:
            connection.request("POST", "/do", body)
            response = connection.getresponse()
            assert response.status == status
            assert code is None or json.loads(response.read())["code"] == code
    # A connection that ends in the middle of a request does not disturb the next request.
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.connect(str(socket_of(sockets, job)))
        sock.sendall(b"POST /do HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    assert asked("stop", "--now")[0] == 0
