"""Timestamps in the prefix of the launcher's messages."""

import errno
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest
from helpers.launcher import LAUNCHERS, NO_TIME, clean_environment
from helpers.nodes import meeting
from helpers.procs import HANG, run_program

pytestmark = pytest.mark.beyond_torchrun

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(?:Z|[+-]\d\d:\d\d)"
FAILS_ONCE = """
    import os
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise KeyError("x")
"""
JOB = ("--nproc-per-node=2", "--max-restarts=1")


@pytest.fixture
def environment(tmp_path):
    """Return the environment of a user who has not set any variable for elasticrs."""
    found = clean_environment({"TMPDIR": str(tmp_path)})
    for name in NO_TIME:
        del found[name]
    return found


@pytest.fixture
def run(environment, worker_script):
    """Return a function that runs the launcher with a pipe or ``stderr`` as its stderr, and returns the lines
    in the pipe.
    """

    def call(*args, env=None, stderr=subprocess.PIPE, script=FAILS_ONCE, code=0):
        command = [*LAUNCHERS["elasticrs"], *args, worker_script(script)]
        env = {**environment, **(env or {})}
        done = subprocess.run(command, stderr=stderr, env=env, timeout=HANG, text=True, check=False)
        assert done.returncode == code, done.stderr
        return own_lines(done.stderr or "")

    return call


def own_lines(text):
    return [line for line in text.splitlines() if line.startswith("elasticrs")]


def assert_times(lines, identity=""):
    times = [re.match(rf"elasticrs\[({TIME}){identity}\]: \S", line)[1] for line in lines]
    assert times == sorted(times)
    assert times


def test_every_launcher_message_in_a_pipe_has_a_timestamp(run):
    lines = run(*JOB)
    assert_times(lines)
    assert any("restarting" in line for line in lines)
    assert "succeeded after" in lines[-1]


def test_every_line_around_a_report_carries_the_time(run):
    lines = run(*JOB, script="raise KeyError('x')", code=1)
    assert_times(lines)
    # The summary below the report also has a timestamp.
    assert re.search(r"\]: failed after .*: rank \d of 2: KeyError", lines[-1])


def read_terminal(descriptor):
    """Return the remaining output of a terminal whose other side is closed. Each read may return only a part
    of it.
    """
    pieces = []
    while True:
        try:
            pieces.append(os.read(descriptor, 1 << 16))
        except OSError as error:  # Linux reports the end of a terminal's output with EIO
            if error.errno != errno.EIO:
                raise
            return b"".join(pieces)


def test_messages_on_a_terminal_have_no_timestamp_unless_requested(run):
    for args, has_time in (((), False), (("--log-prefix=time",), True)):
        ours, theirs = os.openpty()
        try:
            # All output of the job fits into the terminal's buffer, so read it after the job has finished.
            try:
                run(*JOB, *args, stderr=theirs)
            finally:
                os.close(theirs)
            lines = own_lines(read_terminal(ours).decode())
        finally:
            os.close(ours)
        assert [line.startswith("elasticrs: ") for line in lines] == [not has_time] * len(lines)
        if has_time:
            assert_times(lines)


def test_the_log_prefix_option_or_variable_removes_the_timestamp(run):
    for how in ({"args": ["--log-prefix=none"]}, {"env": {"PET_LOG_PREFIX": "none"}}):
        lines = run(*JOB, *how.get("args", ()), env=how.get("env"))
        assert [line for line in lines if not line.startswith("elasticrs: ")] == []


def test_usage_errors_have_a_timestamp_unless_log_prefix_removes_it(run):
    (line,) = run("--max-restarts=x", code=2)
    assert_times([line])
    (line,) = run("--log-prefix=sometimes", code=2)
    assert_times([line])
    assert "--log-prefix: got 'sometimes'" in line
    (line,) = run("--no-python", "--module", "--log-prefix=none", code=2)
    assert line.startswith("elasticrs: ")


def test_multi_node_messages_have_a_timestamp_and_the_node_identity(run):
    lines = run(*meeting("1:2"), "--rdzv-conf=last_call_timeout=0", *JOB)
    assert_times(lines, rf" {re.escape(os.uname().nodename)}:\d+( group 0)?")
    assert any(" group 0]: " in line for line in lines)


def test_all_dates_of_a_failed_job_are_local_times_with_their_offset(environment, worker_script):
    script = worker_script("import os; raise KeyError(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    command = [*LAUNCHERS["elasticrs"], "--nproc-per-node=1", "--max-restarts=1", script]
    begun = datetime.now(timezone.utc)
    new_york = {"TZ": "EST5EDT,M3.2.0,M11.1.0"}
    done = subprocess.run(
        command, stderr=subprocess.PIPE, env={**environment, **new_york}, timeout=HANG, text=True, check=False
    )
    dates = re.findall(r"\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d[^\s)\]]*", done.stderr)
    assert {date[10] for date in dates} == {"T", "_"}, done.stderr
    for date in dates:
        parsed = datetime.fromisoformat(date)
        assert parsed.utcoffset() in (timedelta(hours=-5), timedelta(hours=-4)), date
        assert abs(parsed - begun) < timedelta(minutes=5), date


PROGRAM = """
from elasticrs.launcher.api import LaunchConfig, elastic_launch

config = LaunchConfig(
    1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1, log_prefix={log_prefix!r}
)
elastic_launch(config, {python!r})({script!r})
"""


@pytest.mark.parametrize(
    ("log_prefix", "variable", "has_time"),
    [("none", "time", False), (None, "", True), (None, "sometimes", None)],
)
def test_a_program_can_choose_the_log_prefix(environment, worker_script, log_prefix, variable, has_time):
    script = str(worker_script(FAILS_ONCE))
    program = PROGRAM.format(log_prefix=log_prefix, python=sys.executable, script=script)
    done = run_program([sys.executable, "-c", program], env={**environment, "PET_LOG_PREFIX": variable})
    if has_time is None:
        assert done.returncode == 1
        assert "PET_LOG_PREFIX: got 'sometimes'" in done.stderr.splitlines()[-1]
        return
    assert done.returncode == 0, done.stderr
    lines = own_lines(done.stderr)
    assert [bool(re.match(rf"elasticrs\[{TIME}\]: ", line)) for line in lines] == [has_time] * len(lines)
    assert lines


def test_an_invalid_log_prefix_in_launch_config_is_an_error():
    from elasticrs.launcher import LaunchConfig

    with pytest.raises(ValueError, match=r"log_prefix .*got 'always'"):
        LaunchConfig(1, 1, 1, log_prefix="always")
