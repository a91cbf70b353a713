"""The command line, end to end: restarts, error files, ports, unread consoles."""

import errno
import json
import os
import re
import signal

import pytest
from helpers import procs
from helpers.launcher import launcher_with


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("options", [(), ("--logs-specs=default",)])
def test_a_job_leaves_nothing_in_the_temporary_directory(launch, worker_script, tmp_path, options):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    launch("--nproc-per-node=2", *options, worker_script("pass"), env={"TMPDIR": str(temporary)}).exits(0)
    assert os.listdir(temporary) == []


@pytest.mark.beyond_torchrun
def test_each_restart_after_a_killed_worker_uses_a_new_master_port(launch, worker_script):
    script = worker_script("""
        import os, signal
        if os.environ["RANK"] == "1":
            os.write(1, b"PORT %s\\n" % os.environb[b"MASTER_PORT"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "3":
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
    """)
    job = launch("--nproc-per-node=2", "--max-restarts=3", script).exits(0)
    job.wait_for_line(r"rank 1 \(pid \d+\) died by SIGKILL; restarting\D* 1 of 3\b", "stderr")
    job.wait_for_line(r"attempt 1 .*\d+\.\d ms after", "stderr")
    assert len({match[0] for match in job.wait_for_lines(r"^PORT \d+$", 4)}) == 4


@pytest.mark.beyond_torchrun
def test_the_launchers_error_file_describes_a_worker_that_wrote_no_error_file(
    launch, worker_script, tmp_path
):
    mine = tmp_path / "mine.json"
    mine.write_text("{}")
    launch(
        worker_script("import os; os.kill(os.getpid(), 9)"), env={"TORCHELASTIC_ERROR_FILE": str(mine)}
    ).exits(1)
    message = json.loads(mine.read_text())["message"]
    assert "SIGKILL" in message["message"]
    assert (message["errorCode"], message["extraInfo"]["rank"]) == (-9, "0")


@pytest.mark.beyond_torchrun
def test_sighup_stays_ignored_if_it_was_ignored_at_the_start(launch, worker_script):
    script = worker_script("""
        import os, signal
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        usual = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        print("READY", int(ignored and usual), os.getpid(), flush=True)
        signal.pause()
    """)
    job = launch(script, ignore=[signal.SIGHUP])
    assert job.wait_for_line(r"^READY (\d)")[1] == "1"
    job.signal(signal.SIGHUP)
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    assert "SIGTERM received" in job.stderr
    assert "SIGHUP" not in job.stderr


def test_a_program_that_cannot_be_executed_fails_without_a_restart(launch, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    job = launch("--nproc-per-node=3", "--max-restarts=5", "--no-python", script).exits(1)
    assert os.strerror(errno.ENOENT) in job.stderr
    assert "restarting" not in job.stderr


@pytest.mark.beyond_torchrun
def test_an_unread_console_does_not_fail_a_job(launch, worker_script, tmp_path):
    script = worker_script("""
        import sys
        sys.stdout.write("a line that nobody reads\\n" * 100_000)
    """)
    short = launcher_with("_engine.supervise.run.tracker", DRAIN_TIMEOUT=0.2)
    job = launch("-t", "1", "--log-dir", tmp_path / "logs", script, argv=short)
    # Do not read the launcher's stdout before it has exited.
    assert procs.wait_readable(job.pidfd)
    assert job.wait() == 0
    (log,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert re.search(rf"\bconsole\b.* 0\.2 s; .*{log}\n", job.stderr)


@pytest.mark.beyond_torchrun
def test_a_taken_master_port_is_replaced_without_charging_a_restart(launch, worker_script):
    script = worker_script("""
        import os, signal
        if os.environ["ELASTICRS_ROUND"] == "1":
            if os.environ["RANK"] == "0":
                raise OSError(f"port: {os.environ['MASTER_PORT']}, name: EADDRINUSE: address already in use")
            signal.pause()
        os.write(1, b"AGAIN %s\\n" % os.environb[b"TORCHELASTIC_RESTART_COUNT"])
    """)
    job = launch("--nproc-per-node=2", script, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}).exits(0)
    assert job.stdout == "AGAIN 0\n" * 2
    assert "taken; trying another" in job.stderr


def test_a_taken_master_port_chosen_by_the_user_is_not_replaced(launch, worker_script):
    script = worker_script("import os; raise OSError(os.environ['MASTER_PORT'] + ': address already in use')")
    job = launch("--master-port=29517", script).exits(1)
    assert "29517: " in job.stderr


@pytest.mark.beyond_torchrun
def test_captured_stderr_is_in_the_report(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        os.write(2, b"the last words\\n")
        os._exit(3)
    """)
    job = launch("--capture-stderr", f"--log-dir={tmp_path}/logs", script).exits(1)
    assert "[default0]:the last words\n" in job.stderr
    assert job.stderr.count("the last words") == 2
