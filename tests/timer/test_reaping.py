"""Workers with timers under the command line: torch's own client, and records written by hand."""

import os
import re
import signal
import subprocess

from helpers.procs import wait_readable

ENABLED = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}

TORCH_CLIENT = """
    import os, signal
    from torch.distributed.elastic import timer
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60, scope="all of it"):
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with timer.expires(after=0.1, scope="epoch"):
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


def test_a_hung_rank_of_torchs_client_is_restarted_and_the_agent_lives(launch, worker_script):
    launched = launch(
        "--nproc-per-node", "2", "--max-restarts", "1", worker_script(TORCH_CLIENT), env=ENABLED
    )
    assert launched.wait() == 0, launched.stderr
    assert launched.stdout.count("DONE\n") >= 2
    line = r"rank 1 \(pid \d+\): timer expired: scope 'epoch', deadline [\d:]{8}\.\d{3}, 1 other timer live"
    assert re.search(line + r"(; 1 sibling stopped)?; restarting \(0 of 1 restarts left\)", launched.stderr)


def test_our_client_says_where_it_was(launch, worker_script):
    script = worker_script("""
        import os, signal
        from elasticrs import timer
        client = timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"])
        timer.configure(client)
        with timer.expires(after=60):
            with timer.expires(after=0.05, scope="epoch"):
                signal.pause()
    """)
    launched = launch("--nproc-per-node", "1", script, env=ENABLED)
    assert launched.wait() == 1
    where = r"scope 'epoch' at worker\.py#7, deadline [\d:]{8}\.\d{3}, 1 other timer live"
    assert re.search(f"timer expired: {where}", launched.stderr), launched.stderr


def test_the_report_names_the_timer_whatever_the_worker_exits_with(launch, worker_script):
    script = worker_script(BY_HAND + """
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
        acquire(os.getpid(), "step 7", 0, signal.SIGUSR1)
    signal.pause()
""")  # fmt: skip
    launched = launch("--nproc-per-node", "2", script, env=ENABLED)
    assert launched.wait() == 1
    assert re.search(r"timer expired: scope 'step 7', deadline \d\d:\d\d:\d\d\.\d{3}$", launched.stderr, re.M)
    assert "rank      : 1 (local_rank: 1)" in launched.stderr


def test_a_record_in_the_name_of_somebody_else_is_refused_and_told(launch, worker_script):
    other = subprocess.Popen(["sleep", "1000"])
    script = worker_script(BY_HAND + f"""
    acquire({other.pid}, "not mine", -1)
    acquire(os.getppid(), "the nursery", -1)
    acquire(os.getpid(), "mine", -1, 0)
    os.read(0, 1)
""")  # fmt: skip
    reader, writer = os.pipe()
    try:
        launched = launch("--nproc-per-node", "1", script, env=ENABLED, stdin=reader)
        launched.wait_for_line(r"rank 0 \(pid \d+\): timer expired: scope 'mine'")
        os.close(writer)
        assert launched.wait() == 0, launched.stderr
        assert "a timer record was refused, because its pid is no worker of this job" in launched.stderr
        assert '"scope_id": "not mine"' in launched.stderr
        assert other.poll() is None
    finally:
        os.close(reader)
        other.kill()
        other.wait()


def test_what_was_released_while_the_agent_was_stopped_does_not_expire(launch, worker_script):
    script = worker_script(BY_HAND + """
    acquire(os.getpid(), "step", 0.2)
    os.write(1, b"ACQUIRED\\n")
    os.read(0, 1)
    with open(path, "w") as fifo:
        fields = {"version": 1, "pid": os.getpid(), "scope_id": "step", "expiration_time": -1, "signal": 0}
        fifo.write(json.dumps(fields) + "\\n")
    os.write(1, b"RELEASED\\n")
    os.read(0, 1)
""")  # fmt: skip
    reader, writer = os.pipe()
    launched = launch("--nproc-per-node", "1", script, env=ENABLED, stdin=reader)
    os.close(reader)
    launched.wait_for_line("ACQUIRED")
    launched.signal(signal.SIGSTOP)
    os.write(writer, b"x")
    launched.wait_for_line("RELEASED")
    # Until the deadline has passed; nothing tells that.
    assert not wait_readable(launched.pidfd, 0.4)
    launched.signal(signal.SIGCONT)
    os.write(writer, b"x")
    assert launched.wait() == 0, launched.stderr
    os.close(writer)
    assert "timer expired" not in launched.stderr


def test_a_file_that_is_there_already_stays(launch, worker_script, tmp_path):
    path = tmp_path / "timers"
    path.write_text("precious")
    env = {**ENABLED, "TORCHELASTIC_TIMER_FILE": str(path)}
    launched = launch("--nproc-per-node", "1", worker_script(""), env=env)
    assert launched.wait() == 1
    assert f"could not watch timers at {path}: File exists" in launched.stderr
    assert path.read_text() == "precious"


def test_nothing_is_left_of_a_fifo_that_the_user_named(launch, worker_script, tmp_path):
    path = tmp_path / "timers"
    script = worker_script("""
        import os, stat
        path = os.environ["TORCHELASTIC_TIMER_FILE"]
        found = os.stat(path)
        assert stat.S_ISFIFO(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
        os.write(1, path.encode() + b"\\n")
    """)
    launched = launch("--nproc-per-node", "1", script, env={**ENABLED, "TORCHELASTIC_TIMER_FILE": str(path)})
    assert launched.wait() == 0, launched.stderr
    assert launched.stdout == f"{path}\n"
    assert not path.exists()
