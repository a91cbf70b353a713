"""If workers hang in the kernel, the job fails and is not restarted."""

import os
import re

import pytest

pytestmark = pytest.mark.beyond_torchrun

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
