"""A mistake is one clear line and exit code 2; nothing is started."""

import os

import pytest
from helpers.launcher import launcher_with
from helpers.procs import HANG

pytestmark = pytest.mark.beyond_torchrun

MARK = "print('STARTED')"
PATIENT = launcher_with("host.devices", SLOW=HANG)
"""On a loaded machine, the import of torch takes so long that a second line says so."""


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        (["--nproc-per-node", "0", "{script}"], {}, "--nproc-per-node: got '0'"),
        (["--nproc-per-node", "-1", "{script}"], {}, "nproc-per-node"),
        (["--nproc-per-node", "1000000", "{script}"], {}, "--nproc-per-node: got 1000000: "),
        (["--nproc-per-node", "many", "{script}"], {}, "many"),
        (["--max-restarts=-1", "{script}"], {}, "--max-restarts: got '-1'"),
        (["--max-restart5=1", "{script}"], {}, "(did you mean --max-restarts?)"),
        (["--max-restarts", "x", "{script}"], {}, "max-restarts"),
        (["--no-such-flag", "{script}"], {}, "no-such-flag"),
        (["--nnodes", "2:1", "{script}"], {}, "nnodes"),
        (["--nnodes", "a", "{script}"], {}, "nnodes"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "{script}"], {}, "--rdzv-endpoint is needed"),
        (["--nnodes", "2", "--node-rank", "2", "{script}"], {}, "node-rank"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "{script}"], {}, "--rdzv-endpoint is needed"),
        (["--rdzv-conf", "jion_timeout=3", "{script}"], {}, "join_timeout"),
        (["{script}"], {"PET_RDZV_CONF": "join_timeout=soon"}, "soon"),
        (["--shutdown-timeout", "-1", "{script}"], {}, "shutdown-timeout"),
        (["--shutdown-timeout", "1e300", "{script}"], {}, "shutdown-timeout"),
        (["--linger", "1e300", "{script}"], {}, "linger"),
        (["-m", ""], {}, "-m"),
        (["--signals-to-handle", "SIGWHAT", "{script}"], {}, "SIGWHAT"),
        (["--tee", "9", "{script}"], {}, "tee"),
        (["--redirects", "0:x", "{script}"], {}, "redirects"),
        (["--local-ranks-filter", "a", "{script}"], {}, "local-ranks-filter"),
        (["-m", "--no-python", "{script}"], {}, "no-python"),
        ([], {}, "no script given"),
        (["{script}"], {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE: got '0'"),
        (["{script}"], {"PET_MAX_RESTARTS": "-3"}, "PET_MAX_RESTARTS"),
        (["{script}"], {"PET_STANDALONE": "maybe"}, "PET_STANDALONE"),
        (["no/such/script.py"], {}, "script 'no/such/script.py' does not exist"),
        (["--no-python", "no-such-program"], {}, "no-such-program"),
        (["--no-python", "{script}"], {}, "is not executable"),
        (["--log-dir={script}", "{script}"], {}, "--log-dir: cannot write to {script}: File exists"),
        (
            ["--log-dir", "/proc/nothing", "--tee", "3", "{script}"],
            {},
            "--log-dir: cannot write to /proc/nothing",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_told_in_one_line(launch, worker_script, tmp_path, args, env, says):
    script = str(worker_script(MARK))
    launched = launch(*(arg.format(script=script) for arg in args), env=env, argv=PATIENT).exits(2)
    assert launched.stdout == ""
    (line,) = launched.stderr.splitlines()
    assert line.startswith("elasticrs: ")
    assert says.format(script=script) in line
    assert os.listdir(tmp_path) == ["worker.py"]


def test_help_and_version_are_no_mistakes(launch):
    for flag, shows in (("--help", "--nproc-per-node"), ("--version", "elasticrs ")):
        launched = launch(flag).exits(0)
        assert shows in launched.stdout
        assert not launched.stderr
