"""Outcomes of jobs, and exit codes of the launcher."""

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


@pytest.mark.parametrize(("failures", "restarts"), [(1, 1), (3, 3), (99, 2)])
def test_a_job_is_restarted_until_it_succeeds_or_the_budget_is_used_up(
    launch, worker_script, failures, restarts
):
    arguments = ("--nproc-per-node", "2", "--max-restarts", str(restarts))
    launched = launch(*arguments, worker_script(FAIL_ONCE), str(failures)).exits(failures > restarts)
    # Rank 0 may be stopped before it prints its first line.
    starts = [match[1] for match in launched.wait_for_lines(r"START 1 (\d)", restarts + 1)]
    assert starts == [str(attempt) for attempt in range(restarts + 1)]
    assert launched.stdout.count("START 1") == len(starts)
    if failures == restarts:
        launched.wait_for_line(f"START 0 {failures}")
