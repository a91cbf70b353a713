"""If imports do not finish within ``--warm-timeout``, the workers start without them."""

import os
import signal

import pytest
from helpers import procs
from helpers.said import line_with

pytestmark = pytest.mark.beyond_torchrun

SLOW = """
import os
open("importing", "w").close()
os.close(os.open("never", os.O_RDONLY))
"""
"""Its import reports that it runs, and hangs, because no process opens the FIFO for writing."""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["hangs", "is stopped"])
def test_an_import_over_the_time_limit_is_named_and_workers_start_cold(launch, tmp_path, is_stopped):
    (tmp_path / "slow.py").write_text(SLOW)
    os.mkfifo(tmp_path / "never")
    script = tmp_path / "script" / "worker.py"
    script.parent.mkdir()
    script.write_text("import os\nos.write(1, b'RUNS\\n')")
    options = ("--nproc-per-node=2", "--warm=colorsys,slow", "--warm-timeout=5")
    job = launch(*options, script, env={"PYTHONPATH": str(tmp_path)})
    if is_stopped:
        procs.wait_until((tmp_path / "importing").exists)
        nursery = next(child for child in procs.children(job.pid) if str(script) in child.command)
        os.kill(nursery.pid, signal.SIGSTOP)
    job.exits(0)
    assert job.stdout.count("RUNS") == 2
    line_with(job.stderr, "elasticrs: warm: ", "cold", " slow ", "5 s")
    assert "; 0 restarts" in job.stderr
