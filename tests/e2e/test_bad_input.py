"""A usage error leads to one line and exit code 2, and nothing starts. unit/test_usage_errors.py checks the
texts.
"""

import os

import pytest
from helpers.launcher import launcher_with
from helpers.procs import HANG

pytestmark = pytest.mark.beyond_torchrun

MARK = "print('STARTED')"
PATIENT = launcher_with("_engine.gpus.devices", SLOW=HANG)
"""On a loaded machine, the import of torch takes so long that a second line says so."""


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        (["--rdzv-conf", "jion_timeout=3", "{script}"], {}, "jion_timeout"),
        (["-m", ""], {}, "-m"),
        (["{script}"], {"PET_MAX_RESTARTS": "-3"}, "PET_MAX_RESTARTS"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_usage_error_prints_one_line_and_starts_no_workers(
    launch, worker_script, tmp_path, args, env, says
):
    script = str(worker_script(MARK))
    launched = launch(*(arg.format(script=script) for arg in args), env=env, argv=PATIENT).exits(2)
    assert launched.stdout == ""
    (line,) = launched.stderr.splitlines()
    assert line.startswith("elasticrs: ")
    assert says.format(script=script) in line
    assert os.listdir(tmp_path) == ["worker.py"]


def test_help_and_version_exit_with_0(launch):
    for flag, shows in (("--help", "--nproc-per-node"), ("--version", "elasticrs ")):
        launched = launch(flag).exits(0)
        assert shows in launched.stdout
        assert not launched.stderr
