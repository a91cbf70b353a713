"""The failure report that the launcher prints for workers without `@record` and without redirected output."""

import os
import re


def test_an_exit_without_an_error_record_is_the_cause_of_a_lost_peer_error(launch, worker_script, tmp_path):
    os.mkfifo(tmp_path / "recorded")
    script = worker_script(f"""
        import atexit, os, signal
        recorded = {str(tmp_path / "recorded")!r}
        if os.environ["RANK"] == "1":
            open(recorded).read(1)
            os._exit(7)

        @atexit.register
        def tell():
            with open(recorded, "w") as file:
                file.write("x")
            signal.pause()

        raise ConnectionResetError(104, "Connection reset by peer")
    """)
    job = launch("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert job.wait() == 1
    assert re.search(r"rank 1 \(pid \d+\) .*\b7; 1 other .*; restarting", job.stderr)
    root = job.stderr[job.stderr.index("Root Cause") :]
    assert "  rank      : 1 (local_rank: 1)\n" in root


def test_an_error_file_that_could_not_be_written_is_reported_as_empty(launch, worker_script, tmp_path):
    # The worker can open the error file but not write to it, as on a full disk.
    script = worker_script(
        """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise ValueError("no such batch")
    """
    )
    job = launch("--standalone", "--log-dir", tmp_path / "logs", script).exits(1)
    root = job.stderr[job.stderr.index("Root Cause") :]
    assert re.search("  traceback : exit code 1; .*error file.*empty", root)
    (error_file,) = (tmp_path / "logs").rglob("error.json*")
    assert error_file.read_text() == ""


def test_control_characters_in_an_exception_text_are_escaped(launch, worker_script):
    script = worker_script("""
        raise ValueError("\\x1b]0;title\\x07\\x1b[2J")
    """)
    job = launch("--redirects=3", "--role=a\x1b[1mb", "--max-restarts=1", script)
    assert job.wait() == 1
    assert "\x1b" not in job.stderr
    assert "\x07" not in job.stderr
    assert "\\x1b]0;title\\x07" in job.stderr
