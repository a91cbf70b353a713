"""Programs that launch function workers from a main module without a ``__name__`` guard."""

import sys

import pytest
from helpers import procs
from helpers.launcher import clean_environment
from helpers.procs import run_program

from elasticrs.multiprocessing.api import _UNGUARDED

LAUNCH = """
from elasticrs.launcher import LaunchConfig, elastic_launch

def function():
    return 1

config = LaunchConfig(1, 1, 2, run_id="job", max_restarts=0, rdzv_backend="c10d", start_method={method!r})
elastic_launch(config, function)()
"""
CONTEXT = """
from elasticrs.multiprocessing import DefaultLogsSpecs, start_processes

def function():
    return 1

two = {{0: (), 1: ()}}, {{0: {{}}, 1: {{}}}}
context = start_processes("job", function, *two, DefaultLogsSpecs(), start_method={method!r})
failures = context.wait().failures
assert not failures, failures
"""


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("program", [LAUNCH, CONTEXT], ids=["launch", "context"])
def test_a_launch_without_a_main_guard_is_refused_without_worker_tracebacks(tmp_path, program, method):
    script = tmp_path / "script.py"
    script.write_text(program.format(method=method))
    done = run_program([sys.executable, script], env=clean_environment())
    # Reap the resource tracker, which exits shortly after the program.
    procs.reap_adopted()
    assert done.returncode == 1
    assert done.stderr.count(_UNGUARDED) in (1, 2)
    # Only the program itself prints a traceback, not its workers.
    assert done.stderr.count("Traceback") == 1
    assert "bootstrapping" not in done.stderr
