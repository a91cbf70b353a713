"""Command-line jobs whose workers use timers, through torch's own client or through handwritten records."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers.launcher import launcher_with_py_spy
from helpers.procs import run_program, wait_readable
from helpers.said import says

ENABLED = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}

TORCH_CLIENT = """
    import os, signal
    from torch.distributed.elastic import timer
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60, scope="all of it"):
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with timer.expires(after=0.1, scope="epoch"):
                while True:
                    signal.pause()
    os.write(1, b"DONE\\n")
"""

BY_HAND = """
    import json, os, signal, time
    path = os.environ["TORCHELASTIC_TIMER_FILE"]
    def acquire(pid, scope, after, signum=9):
        fields = {"version": 1, "pid": pid, "scope_id": scope, "signal": signum}
        fields["expiration_time"] = time.time() + after
        with open(path, "w") as fifo:
            fifo.write(json.dumps(fields) + "\\n")
"""


@pytest.fixture
def run(launch, worker_script):
    """Return a function that launches workers with this source and with timers enabled."""

    def run(source, *options, nproc=1, env=None, launch=launch, **how):
        env = {**ENABLED, **(env or {})}
        return launch(f"--nproc-per-node={nproc}", *options, worker_script(source), env=env, **how)

    return run


def test_a_rank_whose_torch_timer_expired_is_restarted(run, launch_with_torch):
    launched = run(TORCH_CLIENT, "--max-restarts=1", nproc=2, launch=launch_with_torch).exits(0)
    assert launched.stdout.count("DONE\n") >= 2
    line = r"rank 1 \(pid \d+\): timer expired: scope 'epoch', deadline [\d:]{8}\.\d{3}, 1 other timer live"
    assert re.search(line + r"; restarting\D* 1 of 1\b", launched.stderr)


def test_the_report_names_the_expired_timer_whatever_the_exit_code(run):
    source = BY_HAND + """
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
        acquire(os.getpid(), "step 7", 0, signal.SIGUSR1)
    while True:
        signal.sigtimedwait([], 0.05)
"""  # fmt: skip
    launched = run(source, nproc=2).exits(1)
    assert re.search(r"timer expired: scope 'step 7', deadline \d\d:\d\d:\d\d\.\d{3}$", launched.stderr, re.M)
    assert "rank      : 1 (local_rank: 1)" in launched.stderr


def test_evidence_of_an_expired_timer_is_collected_although_another_rank_exits(
    launch, worker_script, tmp_path
):
    body = "echo \"seen in state $(cut -d ' ' -f 3 /proc/$4/stat)\""
    # Rank 1 catches the request for its stacks without answering it, so the agent runs `py-spy` after 1.2 s.
    script = worker_script(BY_HAND + """
    if os.environ["RANK"] == "0":
        # The handler is in C, so `pause` returns.
        signal.pause()
    else:
        signal.signal(signal.SIGRTMIN + 12, lambda *_: None)
        acquire(os.getpid(), "step", 0.3)
        while True:
            os.read(os.pipe()[0], 1)
""")  # fmt: skip
    logs = tmp_path / "logs"
    spied = launcher_with_py_spy(tmp_path, body, **ENABLED)
    launched = launch("--nproc-per-node=2", f"--log-dir={logs}", script, **spied).exits(1)
    assert re.search(r"traceback : timer expired: scope 'step'", launched.stderr), launched.stderr
    (kept,) = logs.glob("*/attempt_0/1/hang.txt")
    assert "seen in state S" in kept.read_text()


def test_a_timer_that_was_released_while_the_agent_was_stopped_does_not_expire(run):
    source = BY_HAND + """
    acquire(os.getpid(), "step", 2)
    os.write(1, b"ACQUIRED\\n")
    os.read(0, 1)
    with open(path, "w") as fifo:
        fields = {"version": 1, "pid": os.getpid(), "scope_id": "step", "expiration_time": -1, "signal": 0}
        fifo.write(json.dumps(fields) + "\\n")
    os.write(1, b"RELEASED\\n")
    os.read(0, 1)
"""  # fmt: skip
    launched = run(source, stdin=subprocess.PIPE)
    launched.wait_for_line("ACQUIRED")
    launched.signal(signal.SIGSTOP)
    launched.feed(b"x")
    launched.wait_for_line("RELEASED")
    # Wait until the deadline has passed, for which there is no notification.
    assert not wait_readable(launched.pidfd, 2)
    launched.signal(signal.SIGCONT)
    launched.feed(b"x")
    launched.exits(0)
    assert "timer expired" not in launched.stderr


def refusal_of(launch, worker_script, path):
    env = {**ENABLED, "TORCHELASTIC_TIMER_FILE": str(path)}
    launched = launch("--nproc-per-node", "1", worker_script(""), env=env).exits(2)
    (line,) = (line for line in launched.stderr.splitlines() if "TORCHELASTIC_TIMER_FILE" in line)
    return line


def test_an_existing_timer_file_is_kept_and_refused(launch, worker_script, tmp_path):
    path = tmp_path / "timers"
    path.write_text("precious")
    says(refusal_of(launch, worker_script, path), f"elasticrs: TORCHELASTIC_TIMER_FILE='{path}'", "exists")
    assert path.read_text() == "precious"


@pytest.mark.parametrize("module", ["debug_info_logging", "file_based_local_timer"])
@pytest.mark.parametrize("body", ["said.append((run_id, timers))", "raise ValueError('no')"])
def test_expired_timers_are_passed_to_a_replaced_log_function(tmp_path, worker_script, body, module):
    script = worker_script(BY_HAND + """
    acquire(os.getpid(), "step 7", -1)
    while True:
        signal.pause()
""")  # fmt: skip
    program = tmp_path / "program.py"
    program.write_text(f"""
import json, os, sys
from elasticrs import LaunchConfig, elastic_launch
from elasticrs.multiprocessing import DefaultLogsSpecs
from elasticrs.multiprocessing.errors import ChildFailedError
from elasticrs.timer import {module}
said = []
def told(run_id, timers):
    said.append(sorted(timers))
    {body}
{module}.log_debug_info_for_expired_timers = told
config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", run_id="job", max_restarts=0,
                      logs_specs=DefaultLogsSpecs(os.getcwd()))
try:
    elastic_launch(config, sys.executable)({str(script)!r})
except ChildFailedError as error:
    (failure,) = error.failures.values()
    assert said[0] == [failure.pid] and "timer expired" in failure.message, (said, failure)
    for run_id, timers in said[1:]:
        (record,) = timers[failure.pid]
        record = json.loads(record)
        assert (run_id, record["pid"], record["scope_id"]) == ("job", failure.pid, "step 7")
        assert record["signal"] == 9
    print("told", len(said))
""")
    ran = run_program([sys.executable, program], cwd=tmp_path, env={**os.environ, **ENABLED})
    assert ran.stdout.splitlines()[-1:] == [f"told {2 if 'append' in body else 1}"], ran.stderr
    assert ("log_debug_info_for_expired_timers failed" in ran.stderr) == ("raise" in body)


def test_a_timer_fifo_at_a_path_of_the_user_is_removed_at_the_end(launch, worker_script, tmp_path):
    path = tmp_path / "timers"
    script = worker_script("""
        import os, stat
        path = os.environ["TORCHELASTIC_TIMER_FILE"]
        found = os.stat(path)
        assert stat.S_ISFIFO(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
        os.write(1, path.encode() + b"\\n")
    """)
    launched = launch(
        "--nproc-per-node", "1", script, env={**ENABLED, "TORCHELASTIC_TIMER_FILE": str(path)}
    ).exits(0)
    assert launched.stdout == f"{path}\n"
    assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="a pid namespace needs root")
def test_a_record_of_an_earlier_agents_worker_with_the_same_pid_is_refused(launch, worker_script, tmp_path):
    path = tmp_path / "timers"
    script = worker_script("""
        import os
        fields = open("/proc/self/stat").read().rpartition(")")[2].split()
        os.write(1, f"UP {os.getpid()} {fields[19]}\\n".encode())
        os.read(0, 1)
    """)
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
    reader, writer = os.pipe()
    ups = []
    for _ in range(2):
        launched = launch(
            *("--nproc-per-node", "1", script),
            env={**ENABLED, "TORCHELASTIC_TIMER_FILE": str(path)},
            prefix=prefix,
            stdin=reader,
        )
        ups.append(launched.wait_for_line(r"UP (\d+) (\d+)"))
        if len(ups) == 1:
            # Kill the agent with its whole container, so that it cannot clean up.
            (agent,) = (each for each in launched.descendants() if each.ppid == launched.pid)
            os.kill(agent.pid, signal.SIGKILL)
            launched.wait()
            assert path.exists()
    assert ups[0][1] == ups[1][1], "pids repeat in a namespace"
    for up in ups:
        fields = {
            "version": 1,
            "pid": int(up[1]),
            "scope_id": f"of {up[2]}",
            "expiration_time": 1,
            "signal": 9,
        }
        path.write_text(json.dumps({**fields, "deadline_ns": 0, "start_time": int(up[2])}) + "\n")
    launched.exits(1)
    assert f"timer expired: scope 'of {ups[1][2]}'" in launched.stderr
    assert f"scope 'of {ups[0][2]}'" not in launched.stderr
    says(launched.stderr, "refused", "another process")
    os.close(reader)
    os.close(writer)


def test_the_report_has_the_stack_of_a_worker_whose_timer_expired(run, tmp_path):
    # The timer starts when the other rank runs, too.
    os.mkfifo(tmp_path / "gate")
    source = """
        import os
        from elasticrs import timer
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        pipe = os.pipe()
        def evaluate():
            with timer.expires(after=60), timer.expires(after=0.2, scope="evaluation"):
                os.read(pipe[0], 1)
        with open("gate", "r" if os.environ["RANK"] == "1" else "w"):
            evaluate() if os.environ["RANK"] == "1" else os.read(pipe[0], 1)
    """
    launched = run(source, nproc=2).exits(1)
    where = r"scope 'evaluation' at worker\.py#7, deadline [\d:]{8}\.\d{3}, 1 other timer live"
    assert re.search(f"timer expired: {where}", launched.stderr), launched.stderr
    assert re.search(r'    File ".*worker.py", line 8 in evaluate$', launched.stderr, re.M), launched.stderr
    kept = re.search(r"  hang      : (.*/attempt_0/1/hang.txt)$", launched.stderr, re.M)
    assert kept
    with open(kept[1], encoding="utf-8") as file:
        text = file.read()
    says(text.partition("\n")[0], "local rank 1", "'evaluation'")
    # The agent also requests the stacks of the other ranks.
    with open(kept[1].replace("/1/hang", "/0/hang"), encoding="utf-8") as file:
        assert "in <module>" in file.read()
