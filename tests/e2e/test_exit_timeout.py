"""Ranks that raised an exception but do not exit fail after ``--exit-timeout``. Programs that continue do not
fail.
"""

import re
import signal
import sys
import textwrap

import pytest
from helpers.nodes import meeting

pytestmark = pytest.mark.beyond_torchrun

HOLDS = {
    "thread": """
        import threading
        def upload():
            os.read(reader, 1)
        threading.Thread(target=upload).start()
    """,
    "atexit": """
        import atexit
        def upload():
            os.write(1, b"HELD\\n")
            os.read(reader, 1)
        atexit.register(upload)
    """,
    "destructor": """
        class Group:
            def __del__(self, read=os.read, reader=reader):
                def upload():
                    read(reader, 1)
                upload()
        group = Group()
    """,
    # A rank that hangs in its exit is killed without a grace period, so its SIGTERM handler cannot delay the
    # restart.
    "deaf": """
        import atexit, signal
        def upload():
            while True:
                os.read(reader, 1)
        atexit.register(upload)
        signal.signal(signal.SIGTERM, lambda *args: None)
    """,
}
FAILING = """
    import os
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    reader, writer = os.pipe()
    if attempt == 0 and rank == 1:
        exec({holds!r})
        raise ValueError("no such batch")
    if attempt == 0:
        os.read(reader, 1)
    os.write(1, b"DONE\\n")
"""


def failing(how):
    return FAILING.format(holds=textwrap.dedent(HOLDS[how]))


@pytest.mark.parametrize("how", HOLDS)
def test_a_rank_that_raised_but_does_not_exit_fails_after_the_exit_timeout(
    launch, worker_script, tmp_path, how
):
    logs = tmp_path / "logs"
    options = ("--nproc-per-node=2", "--exit-timeout=2", "--max-restarts=1", f"--log-dir={logs}")
    # Turn off the fast exit for destructors, because they are called only in the teardown of the interpreter.
    env = {"ELASTICRS_FAST_EXIT": "0" if how == "destructor" else "1"}
    launched = launch(*options, worker_script(failing(how)), env=env).exits(0)
    assert launched.stdout.count("DONE\n") == 2
    assert re.search(r"rank 1 \(pid \d+\): .*raised.*2 s.*restarting", launched.stderr)
    (kept,) = logs.glob("*/attempt_0/1/hang.txt")
    assert "in upload" in kept.read_text()


def test_the_report_shows_the_exception_and_the_stack_that_blocks_the_exit(launch, worker_script):
    launched = launch("--nproc-per-node=2", "--exit-timeout=2", worker_script(failing("thread"))).exits(1)
    report = launched.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in report
    assert "exitcode  : -9" in report
    assert "ValueError: no such batch" in report
    assert "in _shutdown" in report, "where its main thread is"
    assert "in upload" in report, "the thread that holds it"
    assert re.search(r"raised.* 2 s", report)
    assert "rank 0 (SIGTERM)" in launched.stderr


def test_stopping_a_job_with_a_rank_that_raised_prints_the_report(launch, worker_script):
    script = worker_script(failing("atexit"))
    launched = launch("--nproc-per-node=2", "--exit-timeout=0", script)
    launched.wait_for_line("HELD")
    launched.signal(signal.SIGTERM)
    assert launched.wait() != 0
    report = launched.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in report
    assert "ValueError: no such batch" in report


LIVES = {
    "a caught exception of record": """
        from elasticrs.multiprocessing.errors import record
        @record
        def train():
            raise ValueError
        try:
            train()
        except ValueError:
            pass
    """,
    "a call of the hook": """
        try:
            raise ValueError
        except ValueError:
            sys.excepthook(*sys.exc_info())
    """,
    "a call of the hook in a thread": """
        import threading
        def run():
            try:
                raise ValueError
            except ValueError:
                sys.excepthook(*sys.exc_info())
        thread = threading.Thread(target=run)
        thread.start(); thread.join()
    """,
    "an exception in a thread": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start(); thread.join()
    """,
    "a failing child": """
        if os.fork() == 0:
            raise ValueError
        os.wait()
    """,
}


@pytest.mark.parametrize("how", LIVES)
def test_a_program_that_continues_after_an_exception_is_not_killed(launch, worker_script, how):
    script = worker_script(
        "import os, select, sys\n" + "exec(" + repr(textwrap.dedent(LIVES[how])) + ")\n"
        # Wait much longer than --exit-timeout.
        "select.select([], [], [], 1.0)\nprint('WENT ON')\n"
    )
    launched = launch("--exit-timeout=0.05", script).exits(0)
    assert "WENT ON" in launched.stdout


def test_a_shell_that_reruns_its_failed_program_is_not_killed(launch, worker_script, tmp_path):
    script = worker_script("""
        import os, select
        try:
            os.mkdir("first")
        except FileExistsError:
            select.select([], [], [], 2.0)
        else:
            raise ValueError("again")
    """)
    loop = f"until {sys.executable} {script}; do :; done; echo WENT ON"
    launched = launch("--exit-timeout=1", "--no-python", "/bin/sh", "-c", loop).exits(0)
    assert "WENT ON" in launched.stdout


def test_a_program_that_raised_but_does_not_exit_also_fails_under_a_shell(launch, worker_script):
    script = worker_script(failing("thread"))
    command = ("--no-python", "/bin/sh", "-c", f"{sys.executable} {script}; exit 3")
    launched = launch("--nproc-per-node=2", "--exit-timeout=2", *command).exits(1)
    report = launched.stderr.partition("Root Cause")[2]
    assert "ValueError: no such batch" in report
    assert "in upload" in report


def test_an_exit_timeout_of_0_kills_no_worker(launch, worker_script):
    script = worker_script("""
        import os, select, threading
        reader, writer = os.pipe()
        def upload():
            select.select([], [], [], 1.0)
            os.write(1, b"UPLOADED\\n")
        threading.Thread(target=upload).start()
        raise ValueError
    """)
    launched = launch("--exit-timeout=0", script).exits(1)
    assert "UPLOADED" in launched.stdout
    assert "exitcode  : 1" in launched.stderr


def test_all_nodes_report_the_exception_of_a_rank_that_does_not_exit(launch, worker_script):
    options, script = (*meeting(), "--exit-timeout=2"), worker_script(failing("thread"))
    agents = [
        launch(*options, f"--node-rank={rank}", f"--rdzv-conf=is_host={1 - rank}", script) for rank in (0, 1)
    ]
    for agent in agents:
        assert agent.wait() == 1, agent.stderr
        report = agent.stderr.partition("Root Cause")[2]
        assert "rank      : 1" in report
        assert "ValueError: no such batch" in report
