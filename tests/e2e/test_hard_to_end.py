"""Processes that seem to have exited, or that cannot be killed."""

import os
import re

import pytest
from helpers import held, procs
from helpers.lines import leftovers

pytestmark = pytest.mark.beyond_torchrun

HEADLESS = f"""
    import os, subprocess, sys
    python = [sys.executable, "-c", {procs.HEADLESS!r}]
    daemon = subprocess.Popen(python, start_new_session=True, stdout=subprocess.PIPE)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"ATTEMPT {{attempt}} ".encode() + daemon.stdout.readline())
    os._exit(3)
"""


def test_a_process_without_its_main_thread_does_not_prevent_a_restart(launch, worker_script):
    launched = launch("--max-restarts=1", worker_script(HEADLESS))
    left = [int(match[1]) for match in launched.wait_for_lines(r"ATTEMPT \d HEADLESS (\d+)", 2)]
    launched.exits(1)
    assert leftovers(launched.stderr, "could not kill") == []
    procs.assert_gone(left)


TRACED = """
    import os, sys
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    os.write(1, b"ATTEMPT %d PID %d\\n" % (attempt, os.getpid()))
    if attempt == 0:
        open(sys.argv[1]).read()
    os._exit(0 if attempt else int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_whose_exit_is_held_by_a_tracer_counts_as_exited(launch, worker_script, tmp_path, code):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    launched = launch("--max-restarts=1", worker_script(TRACED), fifo, str(code))
    pid = int(launched.wait_for_line(r"ATTEMPT 0 PID (\d+)")[1])
    held.trace(pid)
    os.close(os.open(fifo, os.O_WRONLY))
    try:
        launched.exits(0)
    finally:
        os.waitpid(pid, 0)
    assert f"(pid {pid}) has exited" in launched.stderr
    assert f"(pid {os.getpid()}) traces it" in launched.stderr
    assert "hung" not in launched.stderr
    assert ("ATTEMPT 1" in launched.stdout) == (code != 0)


SLEEPER = """
    import os, signal, sys
    os.write(1, "ATTEMPT {RANK} {TORCHELASTIC_RESTART_COUNT}\\n".format(**os.environ).encode())
    if os.environ["RANK"] == "1":
        # The child of a vfork waits for a writer, and this process for the child, in state D.
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 5, sys.argv[1], 0, 0)])
    signal.pause()
"""

LIMIT = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.4"}

AGENT = """
    import os, sys
    from elasticrs.agent.server import LocalElasticAgent, WorkerSpec
    from elasticrs.multiprocessing import DefaultLogsSpecs
    from elasticrs.rendezvous import RendezvousParameters
    from elasticrs.rendezvous.registry import get_rendezvous_handler

    class Mine(LocalElasticAgent):
        def _stop_workers(self, group):
            super()._stop_workers(group)

    handler = get_rendezvous_handler(RendezvousParameters("c10d", "", "job", 1, 1))
    spec = WorkerSpec("trainer", 2, handler, entrypoint=sys.executable, args=tuple(sys.argv[1:]))
    result = Mine(spec, DefaultLogsSpecs(os.environ["TMPDIR"] + "/logs"), shutdown_timeout=0.2).run()
    handler.shutdown()
    print("RESULT", result.state.value, result.is_failed(), sorted(result.failures))
"""


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_worker_in_uninterruptible_sleep_fails_the_job_without_a_restart(launch, worker_script, fifo):
    script = worker_script(SLEEPER)
    options = ("--nproc-per-node=2", "--max-restarts=3", "--shutdown-timeout=0.2")
    launched = launch(*options, script, fifo, env=LIMIT).exits(1)
    assert "local rank(s) 1 (" in launched.stderr
    said = r"\(state D\).* 0\.4 s .*; "
    assert re.search(f"{said}stopping", launched.stderr)
    assert re.search(f"{said}.*restart", launched.stderr)
    # Rank 0 may be stopped before it prints anything.
    assert {*launched.stdout.splitlines()} | {"ATTEMPT 0 0"} == {"ATTEMPT 0 0", "ATTEMPT 1 0"}


def test_a_negative_limit_disables_the_check_for_uninterruptible_sleep(launch, worker_script, fifo):
    script = worker_script(SLEEPER)
    launched = launch("--nproc-per-node=2", script, fifo, env={**LIMIT, next(iter(LIMIT)): "-1"})
    launched.wait_for_lines("ATTEMPT", 2)
    # Opening the FIFO for writing releases the child, and with it the worker.
    os.close(os.open(fifo, os.O_WRONLY))
    launched.signal(15)
    launched.exits(1)
    assert "uninterruptible" not in launched.stderr


def test_a_polling_agent_also_fails_if_a_worker_is_in_uninterruptible_sleep(launch, worker_script, fifo):
    import sys

    agent, script = worker_script(AGENT, "agent.py"), worker_script(SLEEPER)
    launched = launch(agent, script, fifo, argv=[sys.executable], env=LIMIT).exits(0)
    assert "RESULT FAILED True [0, 1]" in launched.stdout
    assert "ATTEMPT 1 1" not in launched.stdout
