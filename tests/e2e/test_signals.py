"""The launcher forwards signals, stops the workers within a time limit, and leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import ports, procs
from helpers.launcher import launcher_with
from helpers.lines import long_lines
from helpers.nodes import meeting
from helpers.procs import wait_until

TALKATIVE = """
    import os, signal

    # Blocked and taken: between a handler and a wait there is always a moment at which a signal is missed.
    signals = [signal.Signals["SIG" + name] for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    os.write(1, f"READY {os.getpid()}\\n".encode())
    taken = signal.Signals(signal.sigwait(signals))
    os.write(1, f"GOT {taken.name} {os.environ['RANK']}\\n".encode())
"""
STUBBORN = """
    import os, signal
    signals = [signal.SIGTERM, signal.SIGINT]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    os.write(1, f"READY {os.getpid()}\\n".encode())
    while True:
        signal.sigwait(signals)
        os.write(1, b"IGNORED\\n")
"""
N = 3


@pytest.fixture
def running(launch, worker_script):
    """Return a function that launches N workers, and returns the launcher and the workers' pids once all
    workers are ready.
    """

    def run(source, *args, **how):
        launched = launch("--nproc-per-node", str(N), *args, worker_script(source), **how)
        return launched, [int(match[1]) for match in launched.wait_for_lines(r"READY (\d+)", N)]

    return run


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_forwarded_to_all_workers(running, signum):
    launched, _ = running(TALKATIVE)
    launched.signal(signum)
    launched.exits(1)
    ranks = [match[1] for match in launched.wait_for_lines(rf"GOT {signal.Signals(signum).name} (\d)", N)]
    assert sorted(ranks) == ["0", "1", "2"]
    # What torchrun says instead, in a traceback.
    assert re.search(rf"{signum.name} received|got signal: {signum.value}\b", launched.stderr)


def test_signals_named_in_signals_to_handle_stop_the_job(running):
    launched, _ = running(TALKATIVE, "--signals-to-handle", "SIGUSR1,SIGUSR2")
    launched.signal(signal.SIGUSR2)
    launched.exits(1)
    launched.wait_for_lines("GOT SIGUSR2", N)


def test_a_stop_signal_causes_no_restart(running):
    launched, _ = running(TALKATIVE, "--max-restarts", "3")
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert launched.stdout.count("READY") == N


def test_workers_that_ignore_sigterm_are_killed_after_the_shutdown_timeout(running):
    launched, _ = running(STUBBORN, "--shutdown-timeout", "1")
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    launched.wait_for_lines("IGNORED", N)
    assert long_lines(launched.stderr) == []


@pytest.mark.beyond_torchrun
def test_a_second_sigint_kills_the_workers_at_once(running):
    # The grace period is much longer than a test may take, so only the second signal can stop the workers.
    launched, _ = running(STUBBORN, "--shutdown-timeout", "3000")
    launched.signal(signal.SIGINT)
    launched.wait_for_lines("IGNORED", N)
    launched.insist(signal.SIGINT)
    launched.exits(1)
    assert re.search(r"\bsecond\b.*SIGKILL", launched.stderr)
    assert "after SIGINT" not in launched.stderr, "not a timeout"


SAVES = """
    import os, select, signal

    def save(signum, frame):
        os.write(1, b"SAVING\\n")
        select.select([], [], [], 0.3)
        os.write(1, b"SAVED\\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    os.write(1, f"READY {os.getpid()}\\n".encode())
    while True:
        signal.sigtimedwait([], 0.05)
"""


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_in_quick_succession_are_one_stop_request(running, second):
    # Two signals arrive together if `timeout` and a wrapper both send SIGTERM, if systemd uses SendSIGHUP, or
    # if a terminal closes while a scheduler stops the job. This test may be slower than they are, so the
    # launcher waits longer for the second signal.
    launched, _ = running(SAVES, argv=launcher_with("_engine.process.signals", ECHO=procs.HANG))
    launched.signal(signal.SIGTERM)
    launched.wait_for_line("SIGTERM received", "stderr")
    launched.signal(second)
    launched.exits(1)
    launched.wait_for_lines("SAVED", N)


@pytest.mark.beyond_torchrun
def test_a_sigterm_that_a_wrapper_passes_on_late_leaves_the_workers_time_to_save(running):
    argv = launcher_with("_engine.process.signals", RELAY=procs.HANG)
    launched, _ = running(SAVES.replace("0.3)", "1)"), argv=argv)
    launched.signal(signal.SIGTERM)
    launched.wait_for_lines("SAVING", N)
    launched.read_for(0.15)
    launched.signal(signal.SIGTERM)
    launched.wait_for_line("SIGTERM counts as the stop request", "stderr")
    launched.exits(1)
    assert launched.stdout.count("SAVED") == N
    assert launched.stdout.count("SAVING") == N
    assert long_lines(launched.stderr) == []


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize(
    ("second", "saves"), [(signal.SIGHUP, True), (signal.SIGTERM, False), (signal.SIGQUIT, False)]
)
def test_a_later_sigterm_or_sigquit_ends_the_grace_period_but_sighup_does_not(running, second, saves):
    program = SAVES.replace("0.3)", "3000)" if not saves else "0.5)")
    launched, _ = running(program, argv=launcher_with("_engine.process.signals", RELAY=0.1))
    launched.signal(signal.SIGTERM)
    launched.wait_for_lines("SAVING", N)
    launched.read_for(0.15)
    launched.signal(second)
    launched.exits(1)
    assert launched.stdout.count("SAVED") == (N if saves else 0)
    assert launched.stderr.count(f"ranks 0-{N - 1} were killed") == (not saves)


@pytest.mark.beyond_torchrun
def test_a_signal_before_the_workers_start_stops_the_launcher(launch, worker_script):
    launched = launch("--nproc-per-node", str(N), worker_script(TALKATIVE))
    procs.wait_until(lambda: _catches(launched.pid, signal.SIGTERM))
    launched.signal(signal.SIGTERM)
    launched.exits(1)


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("module", ["elasticrs", "elasticrs.launch"])
def test_sigint_before_handlers_are_installed_prints_no_traceback(launch, worker_script, tmp_path, module):
    # This module shadows the standard `signal` module, and is imported before the launcher can catch an
    # exception.
    (tmp_path / "signal.py").write_text("import os; os.write(1, b'IMPORTS\\n'); os.read(0, 1)\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), *sys.path)))
    argv = (sys.executable, "-S", "-m", module)
    launched = launch(worker_script(""), argv=argv, env={"PYTHONPATH": path}, stdin=subprocess.PIPE)
    launched.wait_for_line("IMPORTS")
    launched.signal(signal.SIGINT)
    launched.exits(-signal.SIGINT)
    assert launched.stderr == ""


def _catches(pid, signum):
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        (mask,) = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    return int(mask, 16) >> (signum - 1) & 1


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGUSR1])
def test_workers_do_not_outlive_a_killed_launcher(running, signum):
    launched, pids = running(STUBBORN, "--signals-to-forward=")
    launched.signal(signum)
    launched.exits(-signum)
    procs.reap_adopted()
    procs.assert_gone(pids)


PASSES_ON = """
    import os, signal

    signals = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    os.write(1, f"READY {os.getpid()}\\n".encode())
    while (taken := signal.Signals(signal.sigwait(signals))) != signal.SIGTERM:
        os.write(1, f"GOT {taken.name}\\n".encode())
"""


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("how", [(), ("--run-path", "--start-method", "fork")])
def test_sigusr1_and_sigusr2_are_forwarded_and_the_job_continues(running, how):
    launched, _ = running(PASSES_ON, *how)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        launched.signal(signum)
        launched.wait_for_lines(f"GOT {signum.name}", N)
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert launched.stdout.count("READY") == N


@pytest.mark.beyond_torchrun
def test_sigusr1_is_held_until_the_worker_has_a_handler(running, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    launched, pids = running(
        PASSES_ON.replace(
            "signal.pthread_sigmask",
            f"""if os.environ["RANK"] == "1":
        os.write(1, f"READY {{os.getpid()}}\\n".encode())
        open({str(gate)!r}).close()
    signal.pthread_sigmask""",
        )
    )
    # While a worker enters `sigwait`, the kernel lists the signal neither as blocked nor as awaited.
    wait_until(
        lambda: [Path(f"/proc/{pid}/wchan").read_text() for pid in pids],
        lambda places: sum(place.startswith("do_sigtimedwait") for place in places) == N - 1,
    )
    launched.signal(signal.SIGUSR1)
    launched.wait_for_line("SIGUSR1 .*local rank 1 ", "stderr")
    launched.wait_for_lines("GOT SIGUSR1", N - 1)
    with gate.open("w"):
        launched.wait_for_lines("GOT SIGUSR1", N)
    launched.signal(signal.SIGTERM)
    launched.exits(1)


@pytest.mark.beyond_torchrun
def test_sigusr1_for_workers_without_a_handler_is_dropped_and_reported(running, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    launched, _ = running(f"""
        import os
        os.write(1, f"READY {{os.getpid()}}\\n".encode())
        open({str(gate)!r}).close()
    """)
    launched.signal(signal.SIGUSR1)
    launched.wait_for_line("SIGUSR1 .*local ranks 0-2", "stderr")
    with gate.open("w"):
        launched.exits(0)
    assert re.search("SIGUSR1 .*dropped", launched.stderr)


@pytest.mark.beyond_torchrun
def test_sigusr1_while_workers_are_being_started_reaches_all_of_them(launch, tmp_path):
    script = tmp_path / "worker.sh"
    script.write_text("""#!/bin/sh
        trap 'kill $!; exit 0' USR1
        test "$LOCAL_RANK" -gt 0 || kill -USR1 "$AGENT"
        tail -f /dev/null & wait
    """)
    script.chmod(0o755)
    argv = ["sh", "-c", 'AGENT=$$ exec "$@"', "sh", sys.executable, "-m", "elasticrs.launch"]
    launch("--nproc-per-node=48", "--no-python", str(script), argv=argv).exits(0)


@pytest.mark.beyond_torchrun
def test_a_stream_of_sigusr1_kills_no_worker_at_its_start_or_end(launch, worker_script):
    launched = launch(
        *("--nproc-per-node=2", "--max-restarts=2"),
        worker_script("""
            import os, signal, sys
            got = []
            signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
            while not got:
                signal.sigtimedwait([signal.SIGUSR2], 0.01)
            import decimal, http.client, xml.dom
            sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] != "2" and os.environ["RANK"] == "1")
        """),
    )
    procs.wait_until(lambda: _catches(launched.pid, signal.SIGUSR1))
    while not launched.has_exited:
        launched.signal(signal.SIGUSR1)
        launched.read_for(0.002)
    launched.exits(0)


@pytest.mark.beyond_torchrun
def test_sigusr1_without_running_workers_is_ignored(launch, worker_script):
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    launched = launch(*meeting, worker_script("print('never')"))
    procs.wait_until(lambda: _catches(launched.pid, signal.SIGUSR1))
    launched.signal(signal.SIGUSR1)
    launched.wait_for_line("SIGUSR1 .*no workers", "stderr")
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert launched.stdout == ""


@pytest.mark.beyond_torchrun
def test_ctrl_z_pauses_the_workers_and_the_launcher_and_fg_resumes_them(running):
    launched, pids = running("""
        import os, signal
        signals = [signal.SIGCONT, signal.SIGTERM]
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        os.write(1, f"READY {os.getpid()}\\n".encode())
        while signal.sigwait(signals) == signal.SIGCONT:
            os.write(1, b"RESUMED\\n")
    """)
    launched.signal(signal.SIGTSTP)
    launched.wait_stopped()
    for pid in pids:
        procs.wait_state(pid, "T")
    launched.signal(signal.SIGCONT)
    launched.wait_for_lines("RESUMED", N)
    launched.signal(signal.SIGTERM)
    launched.exits(1)


@pytest.mark.beyond_torchrun
def test_a_worker_paused_by_sigstop_is_reported_and_can_be_terminated(running):
    launched, pids = running(TALKATIVE)
    os.kill(pids[1], signal.SIGSTOP)
    launched.wait_for_line(str(pids[1]), "stderr")
    assert not launched.has_exited
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    # The launcher resumed the worker for the signal, and the worker's handler ran.
    launched.wait_for_lines("GOT SIGTERM", N)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_during_the_first_imports_ends_the_launcher_with_1(launch, worker_script, signum):
    """Send the signal as early as the launcher can handle it: before its first module is imported."""
    program = f"""
        import os, sys
        class Sends:
            def find_spec(self, name, path=None, target=None):
                if name == "elasticrs._engine":
                    os.kill(os.getpid(), {int(signum)})
        sys.meta_path.insert(0, Sends())
        sys.argv = ["/elasticrun", *sys.argv[1:]]
        from elasticrs.launch import main
        main()
    """
    argv = (sys.executable, "-c", textwrap.dedent(program))
    job = launch(worker_script("print('started')"), argv=argv)
    job.exits(1)
    assert job.stdout == ""
    assert f"stopped by {signal.Signals(signum).name}" in job.stderr


def test_a_node_whose_job_is_ending_does_not_say_that_it_leaves(launch, worker_script):
    options = (
        *meeting("2", port := ports.free()),
        "--rdzv-conf=last_call_timeout=60",
        worker_script(STUBBORN),
    )
    agents = [launch("--shutdown-timeout=60", *options) for _ in range(2)]
    for agent in agents:
        agent.wait_for_line("READY")
    hosts, other = sorted(agents, key=lambda agent: not ports.listens(agent.pid, port))
    hosts.signal(signal.SIGTERM)
    other.wait_for_line("stopping round 1", "stderr")
    other.signal(signal.SIGTERM)
    other.wait_for_line("SIGTERM received: the job is ending already", "stderr")
    assert "leaves" not in other.stderr
    for agent in agents:
        agent.insist(signal.SIGINT)
        agent.exits(1)
