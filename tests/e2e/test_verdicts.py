"""Consequences of a failure: restarts, the exit code, the JSON report and the termination message."""

import errno
import json
import os
import signal

import pytest
from helpers import ports, procs
from helpers.ended import Ended, report_of
from helpers.said import says

from elasticrs._engine.cli.command_line import conclude_stopped
from elasticrs._engine.job.config import JobSpec
from elasticrs._engine.supervise.attempt import JobResult

pytestmark = pytest.mark.beyond_torchrun

MARKED = """
    import os, signal
    from elasticrs.errors import NonRetryable
    class BadConfig(NonRetryable): pass
    if os.environ["RANK"] == "1":
        raise BadConfig("no")
    signal.pause()
"""
MARKED_CAUSE = """
    from elasticrs.errors import NonRetryable
    try:
        raise NonRetryable("no")
    except NonRetryable as error:
        raise RuntimeError("the trainer failed") from error
"""
MARKED_MEMBER = """
    from elasticrs.errors import NonRetryable
    raise ExceptionGroup("two errors", [ValueError("x"), NonRetryable("no")])
"""
OWN_ERROR_FILE = """
    import json, os, sys
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": "no", "timestamp": 1, "retryable": False}, file)
    sys.exit(1)
"""
LAZY_IMPORT = """
    def main():
        import there_is_no_such_module
    main()
"""
LIBRARY_IMPORT = """
    import pkgutil
    pkgutil.resolve_name("there_is_no_such_module:name")  # A function of a library imports the module.
"""
BAD_DATA = """
    from xml.etree import ElementTree
    ElementTree.fromstring("<a>")  # Its error is a subclass of SyntaxError.
"""
REJECTS = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.parse_args()
"""
CATCHES_THE_REJECTION = """
    import argparse, os, sys
    try:
        argparse.ArgumentParser().parse_args(["--unknown"])
    except SystemExit:
        os.write(1, b"the defaults are used")
    sys.exit(2)
"""
LOSES_A_SERVICE = """
    import logging, sys
    logging.basicConfig(level=logging.INFO)
    logging.info("step 1")
    logging.error("the service is lost")
    sys.exit(2)
"""
SAME_AGAIN = "raise ValueError('x')"
GROUPS = """
    import os
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < 3:
        raise ExceptionGroup("errors", [[ValueError, KeyError, OSError][attempt]("x")])
"""
ONE_EPOCH_AN_ATTEMPT = """
    import os
    from elasticrs.timer import heartbeat
    done = int(open("done").read()) if os.path.exists("done") else 0
    for step in range(20):
        heartbeat(step)
    open("done", "w").write(str(done + 1))
    if done < 5:
        raise RuntimeError("a transient fault")
"""
NO_PROGRESS = """
    import os, signal
    from elasticrs.timer import heartbeat
    for step in range(6):
        heartbeat(step, across_restarts={across_restarts})
    {fails}
"""
MODULE_IS_GONE_FOR_A_MOMENT = """
    import os
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt in (1, 2):
        import there_is_no_such_module
    if attempt == 0:
        raise RuntimeError("a transient fault")
"""


@pytest.fixture
def run(launch, worker_script, tmp_path):
    """Return a function that runs a script with these options and ``--max-restarts 3``."""

    def run(script, *options, nproc=2, **how):
        report = tmp_path / "report.json"
        arguments = ("--nproc-per-node", str(nproc), "--max-restarts", "3", "--report", f"file:{report}")
        return Ended(launch(*arguments, *options, worker_script(script), **how), report)

    return run


MISSING = "import there_is_no_such_module"
PERMANENT = {
    "marked": (MARKED, ()),
    "marked cause": (MARKED_CAUSE, ()),
    "marked member": (MARKED_MEMBER, ()),
    "own error file": (OWN_ERROR_FILE, ()),
    "exit code": ("import sys; sys.exit(42)", ("--fatal-exit-codes", "3,40-49")),
    "import": (MISSING, ()),
    "import of a path": (MISSING, ("--run-path",)),
    "import in a fork": (MISSING, ("--run-path", "--start-method", "fork")),
    "import in a warm worker": (MISSING, ("--warm", "sys")),
    "syntax": ("def f(:", ()),
    "usage in a warm worker": (REJECTS, ("--warm", "argparse")),
    "usage": (REJECTS, ()),
    "usage of a path": (REJECTS, ("--run-path",)),
    "usage in a fork": (REJECTS, ("--run-path", "--start-method", "fork")),
    "usage in a fork server": (REJECTS, ("--run-path", "--start-method", "forkserver")),
}
RESTARTED = {
    "signal": ("import os; os.kill(os.getpid(), 9)", ("--fatal-exit-codes", "9,137")),
    "lost service": (LOSES_A_SERVICE, ("-r", "3", "--log-dir", "logs")),
    "caught": (CATCHES_THE_REJECTION, ()),
    "lazy import": (LAZY_IMPORT, ("--max-same-failures", "0")),
    "import by a library": (LIBRARY_IMPORT, ("--max-same-failures", "0")),
    "data": (BAD_DATA, ("--max-same-failures", "0")),
}


@pytest.mark.parametrize(("script", "options"), PERMANENT.values(), ids=PERMANENT)
def test_a_permanent_failure_ends_the_job_without_a_restart(run, script, options):
    ended = run(script, "--exit-codes", "verdict", *options)
    assert (ended.code, ended.report["verdict"], ended.restarts) == (93, "permanent", 0)
    assert ended.report["reason"] in ended.stderr


@pytest.mark.parametrize(("script", "options"), RESTARTED.values(), ids=RESTARTED)
def test_other_failures_are_restarted_until_the_budget_is_used_up(run, script, options):
    ended = run(script, "--exit-codes", "verdict", *options, nproc=1)
    assert (ended.code, ended.report["verdict"], ended.restarts) == (1, "failed", 3)


def test_the_third_equal_failure_ends_the_job(run):
    ended = run(SAME_AGAIN)
    assert (ended.code, ended.report["verdict"], ended.restarts) == (1, "permanent", 2)


def test_different_exception_groups_at_the_same_place_are_different_failures(run):
    ended = run(GROUPS, nproc=1)
    assert (ended.code, ended.restarts) == (0, 3)


def test_a_job_that_finishes_an_epoch_in_each_attempt_is_not_permanent(run):
    ended = run(ONE_EPOCH_AN_ATTEMPT, "--max-restarts=9", "--hang-timeout=60", nproc=1)
    assert (ended.code, ended.restarts) == (0, 5)


@pytest.mark.parametrize("across_restarts", [True, False])
@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("while True: signal.pause()", ["hang", "step 5"]),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ["SIGSEGV", "step 5"]),
    ],
    ids=["hang", "crash"],
)
def test_the_same_hang_or_crash_in_the_same_step_ends_a_job_with_a_window(run, fails, words, across_restarts):
    # The third failure ends the job in both cases. If steps are not counted across restarts, the job may have
    # three times as many equal failures as the option allows, so set the option to 1.
    most = 3 if across_restarts else 1
    script = NO_PROGRESS.format(fails=fails, across_restarts=across_restarts)
    options = ("--hang-timeout=1", "--max-restarts=1/0.1s", "--restart-delay=0.2s")
    ended = run(script, *options, f"--max-same-failures={most}", nproc=1)
    assert (ended.code, ended.report["verdict"], ended.restarts) == (1, "permanent", 2)
    says(ended.report["reason"], *words, "3 times")


def test_a_module_that_is_missing_for_a_moment_does_not_end_the_job(run):
    ended = run(MODULE_IS_GONE_FOR_A_MOMENT)
    assert (ended.code, ended.restarts) == (0, 3)


def test_a_stopped_rank_does_not_hide_the_first_failure(run):
    ended = run(MARKED)
    assert ended.report["root_cause"] == 1
    first, other = sorted(ended.report["failures"], key=lambda each: each["was_stopped"])
    assert (first["rank"], first["exception"], first["place"]) == (1, "__main__.BadConfig", "worker.py:6")
    assert (other["rank"], other["was_stopped"], other["signal"]) == (0, True, "SIGTERM")
    assert first["time"] < other["time"]


def test_a_signal_during_the_restart_delay_ends_the_job(launch, worker_script):
    script = worker_script("import sys; sys.exit(1)")
    launched = launch("--max-restarts", "5", "--restart-delay", "1h", script)
    launched.wait_for_line(r"restarting in \d+ min")
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    # During the restart delay, no worker is running. The launcher exits without another attempt.
    assert launched.stderr.count(" exited with code 1; restarting in") == 1
    last = launched.stderr.splitlines()[-1]
    says(last, "stopped by SIGTERM", "rank 0 of 1 exited with code 1", "1 of 5 restarts charged")
    assert "verdict: " not in launched.stderr


SAVES_WHEN_ANOTHER_FAILS = """
    import os, signal, sys
    if os.environ["RANK"] == "0":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        open("waits", "w").close()
        signal.sigwait([signal.SIGTERM])
        sys.exit(0)
    while not os.path.exists("waits"):
        signal.sigtimedwait([], 0.01)
    sys.exit(3)
"""


def test_the_report_lists_all_exits_and_the_cause_of_the_last_attempt(run):
    report = run(SAVES_WHEN_ANOTHER_FAILS, "--max-restarts=0").report
    (attempt,) = report["attempts"]
    assert attempt["cause"] == report["headline"] is not None
    found = {each["rank"]: (each["exit_code"], each["was_stopped"]) for each in attempt["exits"]}
    assert found == {0: (0, True), 1: (3, False)}
    assert [each["rank"] for each in report["failures"]] == [1]
    (attempt,) = run("pass").report["attempts"]
    assert attempt["cause"] is None


@pytest.mark.parametrize(
    ("codes", "how", "code"),
    [
        ("torchrun", "sys.exit(42)", 1),
        ("worker", "os.kill(os.getpid(), 9)", 137),
        ("verdict:7,8", MISSING, 7),
    ],
)
def test_the_exit_codes_option_sets_the_exit_code(launch, worker_script, codes, how, code):
    script = worker_script(f"import os, sys\n{how}\n")
    launch("--exit-codes", codes, script).exits(code)


def test_all_nodes_exit_with_the_same_code_if_a_worker_kills_its_nursery(launch, worker_script):
    script = worker_script("""
        import os, signal
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    """)
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{ports.free()}", "--exit-codes=worker")
    nodes = [launch("--nnodes=2", *where, script) for _ in range(2)]
    for node in nodes:
        node.exits(1)
        says(node.stderr.splitlines()[-1], "rank 1 of 2", "the nursery died by SIGKILL")


def test_successful_and_stopped_jobs_also_write_a_report(run, launch, worker_script, tmp_path):
    ended = run("pass")
    assert (ended.code, ended.report["outcome"], ended.report["verdict"]) == (0, "succeeded", None)
    report = tmp_path / "stopped.json"
    script = worker_script("import os, signal; os.write(1, b'UP\\n'); signal.pause()")
    launched = launch("--report", f"file:{report}", "--exit-codes", "verdict", script)
    launched.wait_for_line("UP")
    launched.signal(signal.SIGTERM)
    ended = Ended(launched, report)
    assert (ended.code, ended.report["outcome"], ended.report["signal"]) == (1, "stopped", signal.SIGTERM)


def test_a_worker_without_an_exception_has_no_message_in_the_report(run):
    (failure,) = run("raise SystemExit(3)", nproc=1).report["failures"]
    assert (failure["exit_code"], failure["message"]) == (3, None)


class TestTerminationLog:
    @pytest.fixture
    def log(self, tmp_path):
        path = tmp_path / "termination-log"
        path.touch()
        return path

    def test_a_failed_job_writes_its_verdict(self, launch, worker_script, log):
        script = worker_script("raise ValueError('x' * 10_000)")
        launch(script, env={"ELASTICRS_TERMINATION_LOG": str(log)}).exits(1)
        text = log.read_bytes()
        assert text.startswith(b"failed: ")
        assert b"ValueError" in text
        assert len(text) <= 4096

    def test_a_worker_without_an_exception_is_described_by_its_exit(self, launch, worker_script, log):
        script = worker_script("raise SystemExit(3)")
        launch(script, env={"ELASTICRS_TERMINATION_LOG": str(log)}).exits(1)
        assert "exit code 3" in log.read_text()
        assert "None" not in log.read_text()

    @pytest.mark.parametrize("how", ["success", "no file", "empty", "error file"])
    def test_no_verdict_is_written_on_success_or_without_a_separate_file(
        self, launch, worker_script, log, how
    ):
        script = worker_script("pass" if how == "success" else "raise ValueError('x')")
        env = {"ELASTICRS_TERMINATION_LOG": "" if how == "empty" else str(log)}
        if how == "no file":
            log.unlink()
        if how == "error file":
            env["TORCHELASTIC_ERROR_FILE"] = str(log)
        launch(script, env=env).exits(0 if how == "success" else 1)
        if how == "no file":
            assert not log.exists()
        elif how == "error file":
            assert "message" in json.loads(log.read_text())
        else:
            assert log.read_bytes() == b""


class TestNodeCheck:
    FAILS_ONCE = """
        import os, sys
        sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
    """
    OPTIONS = ("--max-restarts", "1", "--exit-codes", "verdict", "--node-check")

    def test_a_node_that_is_unfit_at_the_start_runs_no_worker(self, launch, worker_script, tmp_path):
        script = worker_script("open('ran', 'w')")
        launched = launch(*self.OPTIONS, "sh -c 'echo row remap failure; exit 4'", script).exits(193)
        assert "row remap failure" in launched.stderr
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("rendezvous", [(), ("--nnodes=1", "--rdzv-backend=c10d")], ids=["none", "c10d"])
    def test_a_node_that_became_unfit_is_not_used_for_a_restart(self, launch, worker_script, rendezvous):
        once = "sh -c 'test ! -e checked; code=$?; touch checked; exit $code'"
        endpoint = (f"--rdzv-endpoint=127.0.0.1:{ports.free()}",) if rendezvous else ()
        options = (*self.OPTIONS, once, *rendezvous, *endpoint)
        launched = launch(*options, worker_script(self.FAILS_ONCE)).exits(193)
        assert "0 of 1 restarts charged" in launched.stderr

    @pytest.mark.parametrize(
        ("check", "limit"), [("true", "60"), ("sleep 600", "0.37")], ids=["fit", "hangs"]
    )
    def test_a_passing_or_hanging_check_does_not_prevent_a_restart(self, launch, worker_script, check, limit):
        options = (*self.OPTIONS, check, "--node-check-timeout", limit)
        launched = launch(*options, worker_script(self.FAILS_ONCE)).exits(0)
        assert ("within 0.37 s" in launched.stderr) == (check != "true")

    def test_each_check_is_reported_and_one_failed_check_makes_the_node_unfit(self, launch, worker_script):
        options = (*self.OPTIONS, "true", "--node-check", "sh -c 'kill -9 $$'")
        launched = launch(*options, worker_script("pass")).exits(0)
        assert "SIGKILL" in launched.stderr
        assert "counts as passed" in launched.stderr
        launched = launch(*options, "--node-check", "false", worker_script("pass")).exits(193)
        assert "the node check exited with code 1" in launched.stderr

    @pytest.mark.parametrize("when", ["before joining", "after a failure"])
    def test_a_signal_during_a_node_check_ends_the_check_and_the_job(
        self, launch, worker_script, tmp_path, when
    ):
        first = "test -e checked" if when == "after a failure" else "true"
        check = f"sh -c '{first} || {{ touch checked; exit 0; }}; echo $$ >pid; echo >fifo; sleep 600'"
        os.mkfifo(tmp_path / "fifo")
        launched = launch(*self.OPTIONS, check, worker_script(self.FAILS_ONCE))
        (tmp_path / "fifo").read_text()
        launched.signal(signal.SIGTERM)
        launched.exits(1)
        assert "SIGTERM" in launched.stderr
        assert ("no workers are running" in launched.stderr) == (when == "after a failure")
        assert "counts as passed" not in launched.stderr
        assert procs.wait_gone(int((tmp_path / "pid").read_text()))
        procs.reap_adopted()


def test_an_unwritable_report_file_is_reported_and_does_not_fail_the_job(launch, worker_script, tmp_path):
    path = tmp_path / "report.json"
    # A folder that exists before the job starts is a usage error.
    script = worker_script("import os, sys; os.mkdir(sys.argv[1])")
    launched = launch("--report", f"file:{path}", script, path).exits(0)
    assert str(path) in launched.stderr
    assert os.strerror(errno.EISDIR) in launched.stderr


def test_the_folder_of_the_report_is_created_before_the_job_runs(launch, worker_script, tmp_path):
    path = tmp_path / "new" / "folder" / "report.json"
    told = f"--report: the folder {path.parent} did not exist, and was created"
    assert told in launch("--report", path, worker_script("pass")).exits(0).stderr
    assert report_of(path)["outcome"] == "succeeded"
    assert "did not exist" not in launch("--report", path, worker_script("pass")).exits(0).stderr
    refused = launch("--report", path / "more.json", worker_script("raise SystemExit(3)")).exits(2)
    assert "--report" in refused.stderr


def test_a_report_pipe_without_a_reader_does_not_block_the_job(launch, worker_script, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    launched = launch("--report", f"file:{tmp_path / 'pipe'}", worker_script("pass")).exits(0)
    assert os.strerror(errno.ENXIO) in launched.stderr


def test_a_supervisor_failure_writes_a_report(tmp_path):
    path, said = tmp_path / "report.json", []
    job = JobSpec(1, "job42", name="train.py", report=str(path))
    assert conclude_stopped(job, JobResult(), "no free file descriptor", said.append) == 1
    report = report_of(path)
    assert (report["outcome"], report["reason"]) == ("failed", "no free file descriptor")
    assert not said


def test_charged_restarts_are_shown_with_the_limit_per_window(run):
    script = """
        import os, select, sys
        select.select([], [], [], 0.3)  # Longer than the window.
        sys.exit(7 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "3" else 1)
    """
    ended = run(script, "--max-restarts", "1/0.2s", "--fatal-exit-codes", "7", nproc=1)
    assert ended.report["restarts"] == {"charged": 3, "max": 1, "window": 0.2}
    assert "3 restarts charged (at most 1 in 0.2 s)" in ended.stderr
