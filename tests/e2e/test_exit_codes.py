"""Outcomes of jobs, and exit codes of the launcher."""

import os
import signal

import pytest

FAIL_ONCE = """
    import os, signal, sys
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"START {rank} {attempt}\\n".encode())
    if rank == "1" and int(attempt) < int(sys.argv[1]):
        os._exit(7)
"""


@pytest.mark.parametrize("n", [1, 4])
def test_a_successful_job_exits_with_0(launch, n):
    launch("--nproc-per-node", str(n), "--no-python", "/bin/true").exits(0)


@pytest.mark.parametrize(
    "how", ["sys.exit(7)", "os._exit(255)", "1 / 0", "os.kill(os.getpid(), 9)", "os.abort()"]
)
def test_a_failed_job_exits_with_1(launch, worker_script, how):
    script = worker_script(f"""
        import os, signal, sys
        if os.environ["RANK"] == "1":
            {how}
        signal.pause()
    """)
    launch("--nproc-per-node", "3", script).exits(1)


def test_the_report_names_the_root_cause(launch, worker_script):
    script = worker_script("""
        import os, signal
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()
    """)
    launched = launch("--nproc-per-node", "3", script).exits(1)
    root_cause = launched.stderr.partition("Root Cause")[2]
    assert "rank      : 2 (local_rank: 2)" in root_cause
    assert "exitcode  : -11 (pid: " in root_cause
    assert "SIGSEGV" in root_cause


@pytest.mark.parametrize("failures", [1, 3])
def test_a_job_succeeds_after_restarts_within_the_budget(launch, worker_script, failures):
    arguments = ("--nproc-per-node", "2", "--max-restarts", str(failures))
    launched = launch(*arguments, worker_script(FAIL_ONCE), str(failures)).exits(0)
    # Rank 0 may be stopped before it prints its first line.
    starts = [match[1] for match in launched.wait_for_lines(r"START 1 (\d)", failures + 1)]
    assert starts == [str(attempt) for attempt in range(failures + 1)]
    launched.wait_for_line(f"START 0 {failures}")


def test_workers_are_restarted_exactly_max_restarts_times(launch, worker_script):
    launched = launch("--nproc-per-node", "2", "--max-restarts", "2", worker_script(FAIL_ONCE), "99").exits(1)
    starts = [match[1] for match in launched.wait_for_lines(r"START 1 (\d)", 3)]
    assert starts == ["0", "1", "2"]
    assert launched.stdout.count("START 1") == 3


@pytest.mark.beyond_torchrun
def test_a_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(launch, worker_script, tmp_path):
    os.mkfifo(tmp_path / "ready")
    script = worker_script("""
        import os, signal
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.close(os.open("ready", os.O_WRONLY))
            while True:
                signal.pause()
        os.open("ready", os.O_RDONLY)
        os._exit(3)
    """)
    launched = launch("--nproc-per-node", "2", "--shutdown-timeout", "0.3", script)
    assert launched.wait(timeout=50) == 1


@pytest.mark.beyond_torchrun
def test_leftover_processes_of_a_failed_worker_are_killed(launch, worker_script):
    script = worker_script("""
        import os, signal, subprocess
        left = subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM; echo LEFT $$; exec sleep 1000"])
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))
        os.write(1, f"WORKER {os.getpid()}\\n".encode())
        while True:
            signal.sigtimedwait([], 0.05)
    """)
    launched = launch(script)
    launched.wait_for_line(r"LEFT (\d+)")
    os.kill(int(launched.wait_for_line(r"WORKER (\d+)")[1]), signal.SIGUSR1)
    # Nothing else needs an assertion, because the guard around every test finds leftover processes.
    launched.exits(1)
