"""The same command lines under torchrun and elasticrun: the workers' environment, the outcome and the
remaining files.

What may differ is listed here, and nothing else may.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from helpers import ports, procs
from helpers.launcher import LAUNCHERS

pytestmark = [
    pytest.mark.torch,
    pytest.mark.beyond_torchrun,  # the test itself starts both launchers, regardless of --launcher
]

SHOW = """
    import json, os, sys
    shown = {"argv": sys.argv[1:], "env": dict(os.environ), "name": __name__}
    folder = os.environ["SHOWN"]
    name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}.json"
    with open(os.path.join(folder, name), "w") as file:
        json.dump(shown, file)
    os.write(1, f"out {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
    os.write(2, f"err {os.environ['RANK']}\\n".encode())
    """

IN_TURN = (
    "rank = int(os.environ['RANK']); turn = os.open(os.environ['TURN'], (os.O_WRONLY, os.O_RDONLY)[rank]); "
    "rank and os.read(turn, 1); sys.exit(7 * rank)"
)
"""Rank 1 fails when rank 0 has ended: nobody is stopped before it has shown what it sees."""

OURS = {"ELASTICRS_KEEP", "ELASTICRS_NOTICES", "ELASTICRS_ROUND", "TORCH_FR_DUMP_TEMP_FILE"}
"""Variables that only our workers have."""

TORCHS = {"TORCH_FR_BUFFER_SIZE", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Variables that importing torch puts into the agent's environment, and workers inherit."""


DIFFERENT = {"--master-port": "/workers/0-0/env/TORCHELASTIC_USE_AGENT_STORE"}
"""What differs on purpose: a port of the user's is rank 0's to listen on."""


@pytest.fixture
def how(torch_programs):
    """Return how each launcher is started. torchrun is a fork of a process that has imported torch."""
    return {
        "elasticrs": {"argv": LAUNCHERS["elasticrs"]},
        "torchrun": {"argv": (sys.executable, *LAUNCHERS["torchrun"]), "start": torch_programs.popen},
    }


def show(launch, worker_script, tmp_path, launcher, how, arguments, body, env):
    """Run one of the launchers, and return everything that can be observed, in comparable form."""
    home = tmp_path / launcher
    (home / "shown").mkdir(parents=True)
    (home / "tmp").mkdir()
    os.mkfifo(home / "turn")
    # SHOW has the indentation of a worker in a test. The body is a single line.
    script = worker_script(SHOW + body)
    launched = launch(
        *(argument.format(logs=home / "logs") for argument in arguments),
        script,
        "one",
        "--two",
        **how[launcher],
        env={"SHOWN": str(home / "shown"), "TURN": str(home / "turn"), "TMPDIR": str(home / "tmp"), **env},
        cwd=home,
    )
    code = launched.wait()
    if launcher == "torchrun":
        procs.kill_adopted(keep=[launched.pid])
    shown = {file.stem: json.loads(file.read_text()) for file in (home / "shown").iterdir()}
    for each in shown.values():
        each["env"] = comparable(each["env"], str(home))
    console = sorted(line for line in launched.stdout.splitlines() if "out" in line)
    return {"code": code, "workers": shown, "stdout": console, "files": tree(home / "logs")}, launched.stderr


def comparable(env, home):
    """Return the environment without random values and without intentional differences."""
    env = {name: value.replace(home, "HOME") for name, value in env.items() if name not in OURS | TORCHS}
    # The startup hook removes its folder from the path before the script runs.
    assert "inside/hook" not in env.get("PYTHONPATH", "")
    assert env.pop("MASTER_PORT").isdecimal()
    env["MASTER_ADDR"] = "here" if env["MASTER_ADDR"] in ("localhost", "127.0.0.1") else env["MASTER_ADDR"]
    run_id = env["TORCHELASTIC_RUN_ID"]
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run_id):
        env["TORCHELASTIC_RUN_ID"] = "random"
    error_file = Path(env["TORCHELASTIC_ERROR_FILE"])
    env["TORCHELASTIC_ERROR_FILE"] = "/".join(error_file.parts[-3:])
    return env


def tree(logs):
    """Return the content of the files in the run's folder, keyed by relative path. Error files are listed
    without content.
    """
    if not logs.is_dir():
        return None
    (run,) = logs.iterdir()
    # Both launchers append an underscore and eight random characters, some of which may be underscores.
    # elasticrs inserts the host name before them.
    found = {"run": run.name[:-9].removesuffix(f"_{os.uname().nodename}")}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if path.is_file() and path.name != "error.json":
            found[name] = sorted(path.read_text().splitlines())
        else:
            found[name] = None
    return found


ONE_NODE = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job7"]
LOGGED = ["--log-dir={logs}", "--rdzv-id=job7", *ONE_NODE[:2]]


def case(name, *arguments, body="", env=None, code=0):
    return pytest.param(arguments, body, env or {}, code, id=name)


SEGFAULT = "os.kill(os.getpid(), 11)"
FAILS_ONCE = "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
QUICK = [
    case("two that succeed", "--nproc-per-node=2", *LOGGED, "--tee=3", "--max-restarts=3"),
    case("one fails", "--nproc_per_node=2", *LOGGED, "-r", "3", body=IN_TURN, code=1),
]
COPIED = ("--duplicate-stdout-filters=of 2,x", "--duplicate-stderr-filters=err 1")
BY_USER = {"OMP_NUM_THREADS": "5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
VARIABLES = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r", "PET_STANDALONE": "1", "PET_TEE": "0:1"}
PREFIX = "--log-line-prefix-template=${{hostname}}/${{rank}}> "
TWO, THREE = "--nproc-per-node=2", "--nproc-per-node=3"
SLOW = [
    case("standalone", "--standalone", "--nproc-per-node", "3"),
    case("nothing said"),
    case("set by the user", TWO, env=BY_USER),
    case("restarted", *LOGGED, "-t1", "--max-restarts=1", body=FAILS_ONCE),
    case("streams by rank", *LOGGED, "-r", "0:1,1:2", "-t", "1:2", THREE),
    case("filtered ranks", *LOGGED, "--tee=3", "--local-ranks-filter=1", TWO),
    case("copied lines", *LOGGED, "--tee=3", *COPIED, TWO),
    case(
        "copied lines of filtered ranks",
        *(*LOGGED, "-t3", "--local-ranks-filter=1,2", "-r=0:3", "--duplicate-stdout-filters=out", THREE),
    ),
    case("null device", "--log-dir=/dev/null", *ONE_NODE, "-r=3", TWO),
    case("virtual local ranks", "--virtual-local-rank", TWO, env={"HIP_VISIBLE_DEVICES": "5,6"}),
    case("role", "--role=reader", "--nnodes=1:1", *ONE_NODE),
    case("static", "--nnodes=1", "--master-addr=127.0.0.1", "--master-port={port}"),
    case("prefix", PREFIX, *LOGGED, "--tee=1"),
    case("signals", "--signals-to-handle=SIGTERM,SIGUSR1", *ONE_NODE),
    case("run-path", "--run-path", TWO, *LOGGED, "--redirects=1"),
    case("variables", env=VARIABLES),
    case("abbreviated", "--max-r=2", "--event-l=null", "--stand"),
    case("segmentation fault", *ONE_NODE, body=SEGFAULT, code=1),
    case("exception", *ONE_NODE, body="raise ValueError", code=1),
]


def flat(value, path=""):
    """Flatten nested dictionaries, so that each difference is named by its path."""
    if isinstance(value, dict):
        return {
            name: leaf for key, each in value.items() for name, leaf in flat(each, f"{path}/{key}").items()
        }
    return {path: value}


@pytest.mark.parametrize(
    ("arguments", "body", "env", "code"),
    [*QUICK, *(pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in SLOW)],
)
def test_elasticrun_and_torchrun_give_the_same_results(
    launch, worker_script, tmp_path, how, arguments, body, env, code
):
    arguments = [argument.replace("{port}", str(ports.free())) for argument in arguments]
    theirs, their_stderr = show(launch, worker_script, tmp_path, "torchrun", how, arguments, body, env)
    assert theirs["code"] == code, their_stderr
    ours, our_stderr = show(launch, worker_script, tmp_path, "elasticrs", how, arguments, body, env)
    ours, theirs = flat(ours), flat(theirs)
    for name in DIFFERENT.keys() & {argument.partition("=")[0] for argument in arguments}:
        assert ours.pop(DIFFERENT[name]) != theirs.pop(DIFFERENT[name])
    assert ours == theirs, our_stderr
    assert any("/workers/" in name for name in theirs)
