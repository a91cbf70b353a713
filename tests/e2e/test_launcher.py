"""End-to-end tests of the command line: usage errors, environment, restarts and signals."""

import errno
import json
import os
import re
import signal

import pytest
from helpers import procs
from helpers.launcher import launcher_with
from helpers.lines import leftovers
from helpers.procs import assert_gone, process, reap_adopted

WAITS = """
    import os, signal
    os.write(1, b"READY %s %d\\n" % (os.environb[b"RANK"], os.getpid()))
    while True:
        signal.pause()
"""

STUBBORN = """
    import os, signal
    # Not with handlers: between two of Python's looks at them, a signal may come and pause() not return.
    mine = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, mine)
    os.write(1, b"READY %s %d\\n" % (os.environb[b"RANK"], os.getpid()))
    while True:
        os.write(1, b"GOT %d\\n" % signal.sigwait(mine))  # one piece: the workers share the pipe
"""


def ready(job, count):
    """Wait until all workers are ready, and return their pids."""
    return [int(match[1]) for match in job.wait_for_lines(r"^READY \d+ (\d+)$", count)]


def test_workers_get_all_variables(launch, worker_script):
    script = worker_script("""
        import json, os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID",
                 "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE")
        sys.stdout.write(json.dumps([sys.argv[1:], {n: os.environ[n] for n in names}]) + "\\n")
    """)
    job = launch(
        "--nproc-per-node=2", "--rdzv-id=job", "--master-port=0", "--role=r", script, "a", "--b"
    ).exits(0)
    seen = sorted((json.loads(line) for line in job.stdout.splitlines()), key=lambda each: each[1]["RANK"])
    assert seen[1] == [
        ["a", "--b"],
        {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "ROLE_NAME": "r",
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        },
    ]


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("options", [(), ("--logs-specs=default",)])
def test_nothing_is_left_in_the_temporary_directory(launch, worker_script, tmp_path, options):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    launch("--nproc-per-node=2", *options, worker_script("pass"), env={"TMPDIR": str(temporary)}).exits(0)
    assert os.listdir(temporary) == []


@pytest.mark.beyond_torchrun
def test_a_killed_worker_is_restarted_with_a_fresh_port(launch, worker_script):
    script = worker_script("""
        import os, signal, sys
        sys.stdout.write(f"PORT {os.environ['MASTER_PORT']}\\n")
        sys.stdout.flush()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
    """)
    job = launch("--nproc-per-node=2", "--max-restarts=3", script).exits(0)
    job.wait_for_line(r"rank 1 \(pid \d+\) died by SIGKILL; 1 other .*restarting\D* 2 of 3\b", "stderr")
    job.wait_for_line(r"attempt 1 .*\d+\.\d ms after", "stderr")
    assert len({match[0] for match in job.wait_for_lines(r"^PORT \d+$", 3)}) == 2


@pytest.mark.beyond_torchrun
@pytest.mark.beyond_torchrun
def test_the_root_cause_is_handed_to_the_launchers_own_error_file(launch, worker_script, tmp_path):
    mine = tmp_path / "mine.json"
    launch(
        worker_script("raise ValueError('it is broken')"), env={"TORCHELASTIC_ERROR_FILE": str(mine)}
    ).exits(1)
    assert json.loads(mine.read_text())["message"]["message"] == "ValueError: it is broken"


@pytest.mark.beyond_torchrun
def test_the_launchers_own_error_file_names_a_root_cause_without_an_error_file(
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
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_passed_on_and_the_exit_code_is_1(launch, worker_script, signum):
    job = launch("--nproc-per-node=2", worker_script(WAITS))
    workers = ready(job, 2)
    job.signal(signum)
    assert job.wait() == 1
    assert_gone(workers)
    assert f"{signum.name} received" in job.stderr


@pytest.mark.beyond_torchrun
def test_the_second_signal_kills(launch, worker_script):
    job = launch("--nproc-per-node=2", worker_script(STUBBORN))
    workers = ready(job, 2)
    job.signal(signal.SIGINT)
    job.wait_for_lines("^GOT 2$", 2)
    job.insist(signal.SIGINT)
    assert job.wait() == 1
    assert_gone(workers)
    assert re.search(r"\bsecond\b.*SIGKILL", job.stderr)


@pytest.mark.beyond_torchrun
def test_the_grace_ends_with_sigkill(launch, worker_script):
    job = launch("--shutdown-timeout=0.2", worker_script(STUBBORN))
    workers = ready(job, 1)
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    assert_gone(workers)
    assert job.stdout.endswith("GOT 15\n")


def test_further_signals_can_be_handled(launch, worker_script):
    job = launch("--signals-to-handle=SIGUSR1", worker_script(WAITS))
    workers = ready(job, 1)
    job.signal(signal.SIGUSR1)
    assert job.wait() == 1
    assert_gone(workers)


@pytest.mark.beyond_torchrun
def test_an_ignored_hangup_stays_ignored(launch, worker_script):
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


@pytest.mark.beyond_torchrun
def test_control_z_stops_the_workers_and_continuing_reverses_it(launch, worker_script):
    # The launcher leads a session here, so SIGTSTP has no default effect. Its handler sends SIGSTOP instead.
    job = launch("--nproc-per-node=2", worker_script(STUBBORN))
    workers = ready(job, 2)
    job.signal(signal.SIGTSTP)
    os.waitid(os.P_PIDFD, job.pidfd, os.WSTOPPED | os.WNOWAIT)
    for pid in workers:
        procs.wait_state(pid, "T")
    job.signal(signal.SIGCONT)
    job.signal(signal.SIGTERM)
    job.wait_for_lines("^GOT 15$", 2)
    job.insist(signal.SIGTERM)
    assert job.wait() == 1


def test_a_program_that_cannot_be_executed_fails_at_once(launch, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    job = launch("--nproc-per-node=3", "--max-restarts=5", "--no-python", script).exits(1)
    assert os.strerror(errno.ENOENT) in job.stderr
    assert "restarting" not in job.stderr


def test_console_lines_have_their_prefix(launch, worker_script):
    script = worker_script("import os; print('hello', os.environ['RANK'])")
    job = launch("--nproc-per-node=2", "-t", "1", "--role=r", "--local-ranks-filter=1", script).exits(0)
    assert job.stdout == "[r1]:hello 1\n"


@pytest.mark.beyond_torchrun
def test_the_death_of_the_nursery_costs_one_restart(launch, worker_script):
    job = launch("--nproc-per-node=2", "--max-restarts=1", worker_script(WAITS))
    first = ready(job, 2)
    (nursery,) = {process(pid).ppid for pid in first}
    assert nursery != job.pid
    os.kill(nursery, signal.SIGKILL)
    second = [int(match[1]) for match in job.wait_for_lines(r"^READY \d+ (\d+)$", 4)][2:]
    assert_gone(first)
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    assert_gone(second)
    assert "nursery died by SIGKILL" in job.stderr
    assert re.search(r"restarting\D* 0 of 1\b", job.stderr)


@pytest.mark.beyond_torchrun
def test_an_unread_console_delays_no_restart(launch, worker_script, tmp_path):
    script = worker_script("""
        import os, signal, sys
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if not first:
            open(sys.argv[1], "w").close()
            sys.exit()
        for _ in range(20_000):
            sys.stdout.write("a line that nobody reads\\n" * 10)
        sys.stdout.flush()
        os._exit(1)
    """)
    reached = tmp_path / "reached"
    os.mkfifo(reached)
    job = launch("--max-restarts=1", "-t", "1", script, reached)
    # Opening the FIFO blocks until the restarted worker opens it. Until then, nothing reads the launcher's
    # pipes.
    with open(reached):
        pass
    assert job.wait() == 0
    assert job.stdout.count("a line that nobody reads\n") == 200_000


@pytest.mark.beyond_torchrun
def test_an_unread_console_does_not_fail_a_job(launch, worker_script, tmp_path):
    script = worker_script("""
        import sys
        sys.stdout.write("a line that nobody reads\\n" * 100_000)
    """)
    short = launcher_with("agent.tracker", DRAIN_TIMEOUT=0.2)
    job = launch("-t", "1", "--log-dir", tmp_path / "logs", script, argv=short)
    # Do not read the launcher's stdout before it has exited.
    assert procs.wait_readable(job.pidfd, 30)
    assert job.wait() == 0
    (log,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert re.search(rf"\bconsole\b.* 0\.2 s; .*{log}\n", job.stderr)


@pytest.mark.beyond_torchrun
def test_sigkill_of_the_launcher_leaves_nothing(launch, worker_script):
    script = worker_script("""
        import os, signal, subprocess
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        os.write(1, b"READY 0 %d\\nREADY 1 %d\\n" % (os.getpid(), child.pid))
        signal.pause()
    """)
    job = launch(script)
    processes = ready(job, 2)
    job.signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert_gone(processes)
    reap_adopted()


@pytest.mark.beyond_torchrun
def test_leftover_processes_of_successful_workers_are_killed_and_named(launch, worker_script):
    script = worker_script("""
        import os, subprocess
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        os.write(1, b"READY 0 %d\\n" % child.pid)
    """)
    job = launch("--linger=0.1", script)
    left = ready(job, 1)
    assert job.wait() == 0
    assert_gone(left)
    assert leftovers(job.stderr) == left


@pytest.mark.beyond_torchrun
def test_a_port_that_was_taken_is_replaced_without_a_charge(launch, worker_script):
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


def test_a_port_that_the_user_chose_is_not_replaced(launch, worker_script):
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


def test_modules_and_other_programs_are_run(launch, tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:], flush=True)")
    module = launch(
        "-m", "train", "x", env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ).exits(0)
    assert module.stdout == "['x']\n"
    program = launch("--no-python", "echo", "${local_rank}", "$$").exits(0)
    assert program.stdout == "0 $\n"
