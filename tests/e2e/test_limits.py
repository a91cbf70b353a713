"""At limits of the machine or the user, the job either runs or fails with one line, and no process is left
behind.

Processes and descriptors are seen to by the guard around every test.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import elasticrs

pytestmark = pytest.mark.beyond_torchrun

PACKAGE = Path(elasticrs.__file__).parent
UID = 20_000 + os.getpid() % 40_000
"""Nobody's, not even that of another process that runs tests: its limit of processes counts ours alone."""

SAY = """
    import os
    os.write(1, f"RUNS {os.environ['RANK']}\\n".encode())
"""


NO_PROCESS = ("create", "limit on processes")
"""Words of the line about a worker for which the kernel has no process."""


def assert_clear(launched, code, *words):
    """Assert that the launcher exited with this code, and printed a line with all these words but no
    traceback.
    """
    launched.exits(code)
    lines = [line for line in launched.stderr.splitlines() if all(word in line for word in words)]
    assert lines, launched.stderr
    assert "Traceback" not in launched.stderr
    assert "panicked" not in launched.stderr


# --- descriptors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [8, 20, 40, 60, 79, 95])
def test_too_few_descriptors_are_reported_before_the_start(launch, worker_script, tmp_path, limit):
    prefix = ("prlimit", f"--nofile={limit}")
    arguments = ("--nproc-per-node", "8", "--log-dir", tmp_path / "logs", "--tee", "3")
    launched = launch(*arguments, worker_script(SAY), prefix=prefix)
    assert_clear(launched, 2, "8 workers and 16 log files", "96", f"RLIMIT_NOFILE allows {limit}")
    assert "RUNS" not in launched.stdout


@pytest.mark.parametrize(("options", "limit"), [(("--tee", "3"), 96), ((), 80)], ids=["log files", "none"])
def test_eight_workers_run_with_exactly_the_required_descriptors(launch, worker_script, options, limit):
    prefix = ("prlimit", f"--nofile={limit}")
    launched = launch("--nproc-per-node", "8", *options, worker_script(SAY), prefix=prefix).exits(0)
    launched.wait_for_lines("RUNS", 8)


def test_the_descriptor_check_counts_heartbeat_pages_exactly(launch):
    arguments = ("--nproc-per-node", "46", "--hang-timeout", "600", "--no-python", "true")
    refused = launch(*arguments, prefix=("prlimit", "--nofile=247"))
    assert_clear(refused, 2, "needs 248 descriptors")
    launch(*arguments, prefix=("prlimit", "--nofile=248")).exits(0)


def test_a_worker_with_a_low_descriptor_limit_sends_heartbeats(launch, worker_script):
    script = worker_script("""
        from elasticrs.timer import heartbeat
        heartbeat(1)
        raise SystemExit(3)
    """)
    launched = launch("--hang-timeout=600", script, prefix=("prlimit", "--nofile=100")).exits(1)
    assert "last heartbeat" in launched.stderr, launched.stderr


def test_the_agent_raises_its_descriptor_limit_and_workers_keep_theirs(launch, worker_script):
    script = worker_script("""
        import os, resource, signal
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.write(1, f"LIMITS {soft} {hard}\\n".encode())
        signal.pause()
    """)
    launched = launch("--nproc-per-node", "8", script, prefix=("prlimit", "--nofile=50:400"))
    launched.wait_for_lines("LIMITS", 8)
    assert launched.stdout.count("LIMITS 50 400") == 8, launched.stdout
    assert resource.prlimit(launched.pid, resource.RLIMIT_NOFILE) == (400, 400)
    launched.signal(signal.SIGTERM)
    launched.exits(1)


# --- processes -----------------------------------------------------------------------------------------


def as_user():
    # `setpriv` still has root's capabilities at its exec, so run `env`. Its exec is the first without them.
    return ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env")


def old_enough(interpreter):
    program = "import sys; sys.exit(sys.version_info < (3, 10))"
    command = [*as_user(), interpreter, "-c", program]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def unprivileged(launch):
    """Return a function that starts the launcher as a user without privileges, in a directory that this user
    can read.
    """
    interpreters = (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3")
    interpreter = next(filter(old_enough, interpreters), None)
    if interpreter is None:
        pytest.skip("no Python >= 3.10 that another user can execute")
    # Do not use pytest's temporary directory, because only the user who runs pytest can enter it.
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        shutil.copytree(PACKAGE, home / "python" / "elasticrs", ignore=shutil.ignore_patterns("__pycache__"))
        (home / "tmp").mkdir()
        for each in (home, *home.rglob("*")):
            each.chmod(0o755)
        os.chown(home / "tmp", UID, UID)

        def start(*args, script=SAY, limits=(), **how):
            path = home / "worker.py"
            path.write_text("".join(line.removeprefix("    ") for line in script.splitlines(keepends=True)))
            user = as_user()
            limited = ("prlimit", *limits) if limits else ()
            env = {"PYTHONPATH": str(home / "python"), "TMPDIR": str(home / "tmp")}
            argv = (*user, *limited, interpreter, "-m", "elasticrs.launch", *args, path)
            return launch(argv=argv, env=env, cwd=home, **how)

        start.home = home
        yield start


@pytest.mark.privileged
def test_an_unprivileged_user_can_launch_a_job(unprivileged):
    logs = unprivileged.home / "tmp" / "logs"
    launched = unprivileged("--nproc-per-node", "2", "--log-dir", logs, "--tee", "3").exits(0)
    launched.wait_for_lines("RUNS", 2)


@pytest.mark.privileged
def test_more_workers_than_rlimit_nproc_are_a_usage_error(unprivileged):
    launched = unprivileged("--nproc-per-node", "8", limits=("--nproc=4",))
    assert_clear(launched, 2, "8 processes", "RLIMIT_NPROC", "(4)")
    assert "RUNS" not in launched.stdout


@pytest.mark.privileged
@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_reaching_rlimit_nproc_fails_the_job_with_a_clear_message(unprivileged, limit, restarts):
    # The limit also counts the launcher, its threads and the nursery. So the launcher's check passes, but
    # there are not enough processes for all workers.
    arguments = ("--nproc-per-node", str(min(limit, 6)), "--max-restarts", str(restarts))
    launched = unprivileged(*arguments, limits=(f"--nproc={limit}",))
    if limit == 1:
        assert_clear(launched, 1, "resources")
    else:
        assert_clear(launched, 1, *NO_PROCESS)
        # The launcher tries to restart, because other processes may have exited in the meantime. With a limit
        # of 3, not even the nursery can be started, because a thread of its own starts it.
        assert launched.stderr.count("restarting") == (restarts if limit > 3 else 0)


# --- a control group -----------------------------------------------------------------------------------


@pytest.fixture
def pids_group(tmp_path):
    """Return a function that creates a control group with a limit on processes, and returns a command prefix
    that enters it.
    """
    made = []

    def make(limit):
        for root in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
            group = root / f"elasticrs-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            made.append(group)
            try:
                (group / "pids.max").write_text(str(limit))
            except OSError:
                continue
            return ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))
        pytest.skip("no control group for pids can be made")

    yield make
    for group in made:
        group.rmdir()


@pytest.mark.privileged
def test_more_workers_than_the_cgroup_pids_limit_are_a_usage_error(launch, worker_script, pids_group):
    launched = launch("--nproc-per-node", "8", worker_script(SAY), prefix=pids_group(6))
    assert_clear(launched, 2, "8 processes", "pids.max", "(6)")
    assert "RUNS" not in launched.stdout


@pytest.mark.privileged
@pytest.mark.parametrize("limit", [2, 3, 5, 8])
def test_reaching_the_cgroup_pids_limit_fails_the_job_with_a_clear_message(
    launch, worker_script, pids_group, limit
):
    prefix = pids_group(limit)
    launched = launch("--nproc-per-node", str(min(limit, 6)), worker_script(SAY), prefix=prefix)
    assert_clear(launched, 1, *NO_PROCESS)


# --- the environment -----------------------------------------------------------------------------------


def test_an_oversized_environment_variable_fails_the_job_with_the_error(launch, worker_script):
    # The kernel limits a string to 128 KiB. PYTHONPATH is just short enough, and the launcher exceeds the
    # limit by adding to it.
    length = 32 * resource.getpagesize() - len("PYTHONPATH=") - 1
    entries = f"{PACKAGE.parent}{os.pathsep}"
    launched = launch(worker_script(SAY), env={"PYTHONPATH": entries + "x" * (length - len(entries))})
    assert_clear(launched, 1, "Argument list too long")


def test_large_environment_variables_reach_the_workers(launch, worker_script):
    script = worker_script("""
        import os
        assert all(os.environ[f"LARGE_{number}"] == "x" * 100_000 for number in range(10))
        os.write(1, b"RUNS\\n")
    """)
    launched = launch(script, env={f"LARGE_{number}": "x" * 100_000 for number in range(10)}).exits(0)
    launched.wait_for_line("RUNS")


def test_an_argument_at_the_length_limit_may_contain_a_macro(launch, worker_script):
    launched = launch("--nproc-per-node", "2", worker_script(SAY), "${local_rank}" + "x" * 131_058)
    # The rank is shorter than "${local_rank}", so an argument that fits the launcher's command line also fits
    # the worker's.
    launched.exits(0)


# --- temporary files -----------------------------------------------------------------------------------


def test_a_missing_temporary_directory_does_not_fail_the_job(launch, worker_script, tmp_path):
    launched = launch(worker_script(SAY), env={"TMPDIR": str(tmp_path / "missing")}).exits(0)
    launched.wait_for_line("RUNS")


@pytest.mark.privileged
def test_a_launch_without_a_writable_temporary_directory_is_a_usage_error(unprivileged):
    everything = ("unshare", "--mount", "--", "sh", "-c")
    # The user cannot write to the working directory either.
    setup = (
        'for d in /tmp /var/tmp "$0"; do mount --bind $d $d && mount -o remount,bind,ro $d; done; exec "$@"'
    )
    prefix = (*everything, setup, str(unprivileged.home / "tmp"))
    launched = unprivileged(prefix=prefix)
    assert_clear(launched, 2, "temporary directory")
    assert len(launched.stderr.splitlines()) == 1


@pytest.mark.privileged
@pytest.mark.parametrize("how", ["0", "1"])
def test_the_exit_code_is_kept_if_the_temporary_directory_becomes_read_only(
    launch, worker_script, tmp_path, how
):
    script = worker_script("""
        import os, subprocess, sys
        directory = os.environ["TMPDIR"]
        subprocess.run(["mount", "--bind", directory, directory], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        os._exit(int(sys.argv[1]))
    """)
    (tmp_path / "own").mkdir()
    prefix = ("unshare", "--mount", "--")
    launched = launch(script, how, env={"TMPDIR": str(tmp_path / "own")}, prefix=prefix)
    assert launched.wait() == int(how), launched.stderr
    assert "Traceback" not in launched.stderr
