"""Tests for the argparse parser, which other programs extend as they extend torchrun's."""

import argparse
import os
import re
import subprocess
import sys

import pytest
from helpers import http_client
from helpers.procs import HANG

import elasticrs.launch as distrib_launch
from elasticrs._engine.job.config import DEFAULT_SIGNALS
from elasticrs._engine.job.options import parse
from elasticrs.multiprocessing import DefaultLogsSpecs, Std
from elasticrs.run import (
    _get_logs_specs_class,
    _values,
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    get_rdzv_endpoint,
    get_use_env,
    parse_args,
    parse_min_max_nnodes,
    run_script_path,
)

ARGV = ["--nproc_per_node=2", "--max-restarts", "3", "-t", "0:1", "-m", "train", "--x", "1"]


def test_the_argparse_parser_and_the_built_in_parser_agree(monkeypatch):
    monkeypatch.delenv("PET_LOG_PREFIX")
    monkeypatch.setenv("PET_ROLE", "reader")
    monkeypatch.setenv("PET_STANDALONE", "1")
    ours = vars(parse(ARGV, {"PET_ROLE": "reader", "PET_STANDALONE": "1"}))
    theirs = vars(_values(get_args_parser().parse_args(ARGV)))
    assert theirs.pop("signals_to_handle") == DEFAULT_SIGNALS
    del ours["signals_to_handle"], ours["given"]
    # torch's default is an empty string, and elasticrs's is `None`.
    theirs["log_line_prefix_template"] = theirs["log_line_prefix_template"] or None
    as_lists = {name: list(ours[name]) for name in ("duplicate_stdout_filters", "duplicate_stderr_filters")}
    assert theirs == {**ours, **as_lists}
    assert (theirs["nproc_per_node"], theirs["role"], theirs["standalone"]) == (2, "reader", True)


def test_a_namespace_holds_strings_where_torchrun_does():
    args = parse_args(["--nnodes=1:2", "--nproc-per-node=2", "-t", "0:1", "--rdzv-conf=a=1", "x"])
    assert (args.nnodes, args.nproc_per_node, args.tee, args.rdzv_conf) == ("1:2", "2", "0:1", "a=1")


@pytest.fixture
def namespace(tmp_path):
    """Return a function that builds a namespace by hand, as a program does that knows only torchrun's
    options.
    """
    return lambda **given: argparse.Namespace(
        **{"training_script": "train.py", "training_script_args": ["--x"], "log_dir": str(tmp_path), **given}
    )


def test_config_from_args_builds_a_launch_config(namespace, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    given = {
        "nnodes": "2:3", "nproc_per_node": 2, "rdzv_backend": "c10d", "rdzv_endpoint": "host:1",
        "rdzv_id": "job", "rdzv_conf": "timeout=7", "node_rank": 1, "tee": "3", "redirects": "0:1",
        "max_restarts": 5, "shutdown_timeout": "4", "duplicate_stdout_filters": ["a,b"],
        "numa_binding": "node", "signals_to_handle": "SIGUSR1", "capture_stderr": False,
        "hang_timeout": "auto:3", "hang_startup_timeout": 7, "hang_exit_timeout": 8, "stop_scope": "group",
        "signals_to_forward": "USR2", "exit_timeout": 3, "warm": "torch",
        "log_prefix": "time",
    }  # fmt: skip
    made, command, arguments = config_from_args(namespace(**given))
    assert (made.min_nodes, made.max_nodes, made.nproc_per_node, made.run_id) == (2, 3, 2, "job")
    assert (made.rdzv_backend, made.rdzv_endpoint) == ("c10d", "host:1")
    assert made.rdzv_configs == {"timeout": "7", "order_hint": 1}
    assert (made.max_restarts, made.shutdown_timeout, made.signals_to_handle) == (5, 4, "SIGUSR1")
    assert made.duplicate_stdout_filters == ["a,b"]
    assert (made.hang_timeout, made.hang_startup_timeout, made.stop_scope) == ("auto:3", 7, "group")
    assert made.signals_to_forward == "USR2"
    assert (made.exit_timeout, made.hang_exit_timeout, made.warm) == (3, 8, "torch")
    assert made.log_prefix == "time"
    assert made.numa_options.affinity_mode.value == "node"
    assert (made.logs_specs._tee, made.logs_specs._redirects) == (Std.ALL, {0: Std.OUT})
    assert (command, arguments) == (sys.executable, ["-u", "train.py", "--x"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"module": True}, (sys.executable, ["-u", "-m", "train.py", "--x"])),
        ({"no_python": True}, ("train.py", ["--x"])),
        ({"run_path": True, "no_python": True}, (run_script_path, ["train.py", "--x"])),
        ({"use_env": False}, (sys.executable, ["-u", "train.py", "--local-rank=${local_rank}", "--x"])),
        ({"use_env": True}, (sys.executable, ["-u", "train.py", "--x"])),
    ],
)
def test_config_from_args_returns_the_same_command_as_torchrun(namespace, monkeypatch, given, expected):
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    assert config_from_args(namespace(**given))[1:] == expected


def test_several_workers_get_one_openmp_thread_each(namespace, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config_from_args(namespace(nproc_per_node="1"))
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    del os.environ["OMP_NUM_THREADS"]
    config_from_args(namespace(nproc_per_node="2"))
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nnodes": "2:1"}, "--nnodes: got '2:1', expected N or MIN:MAX"),
        ({"tee": "9x"}, "--tee: got '9x'"),
        ({"max_restarts": "-1"}, "--max-restarts: got '-1'"),
        ({"nproc_per_node": "tpu9"}, "Unsupported nproc_per_node value: tpu9"),
        ({"module": True, "no_python": True}, "--no-python"),
        ({"logs_specs": "mine"}, "--logs-specs: got 'mine', installed are"),
    ],
)
def test_an_invalid_value_in_a_namespace_is_named(namespace, given, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        config_from_args(namespace(**given))


def test_nnodes_with_three_parts_raises_runtimeerror_as_in_torch(namespace):
    with pytest.raises(RuntimeError, match="1:2:3"):
        config_from_args(namespace(nnodes="1:2:3"))


def test_helper_functions_of_run_behave_as_in_torch(namespace):
    assert parse_min_max_nnodes("2") == (2, 2)
    assert parse_min_max_nnodes("1:4") == (1, 4)
    with pytest.raises(RuntimeError, match='nnodes=1:2:3 is not in "MIN:MAX" format'):
        parse_min_max_nnodes("1:2:3")
    assert [determine_local_world_size(count) for count in ("3", " 3 ", "+3", 3)] == [3] * 4
    assert determine_local_world_size("cpu") == len(os.sched_getaffinity(0))
    static = namespace(rdzv_backend="static", rdzv_endpoint="", master_addr="host", master_port=7)
    assert get_rdzv_endpoint(static) == "host:7"
    assert get_rdzv_endpoint(namespace(rdzv_backend="c10d", rdzv_endpoint="a:1")) == "a:1"
    assert get_use_env(parse_args(["x"]))
    assert _get_logs_specs_class(None) is DefaultLogsSpecs


def test_main_starts_the_health_check_server_on_request(launch, worker_script):
    # The worker blocks on the FIFO until the health check has been answered.
    script = worker_script("import os; os.open(os.environ['GO'], os.O_RDONLY)")
    go = script.parent / "go"
    os.mkfifo(go)
    program = "import sys; from elasticrs.run import main; main(sys.argv[1:])"
    asked = ["--health-check-port=0", "--health-check-timeout=40", script]
    started = launch("-c", program, *asked, argv=[sys.executable], env={"GO": str(go)})
    port = int(started.wait_for_line(r"http://127\.0\.0\.1:(\d+)", stream="stderr")[1])
    assert http_client.get(port, "/healthz")[0] == 200
    go.open("w").close()
    assert started.wait() == 0, started.stderr


PROGRAM = """
import argparse, os, sys
import elasticrs.run as distrib_run
from elasticrs.multiprocessing.errors import ChildFailedError

def accelerates(default, **own):
    # It takes the values that the parser knows from a namespace of its own.
    found, _ = distrib_run.get_args_parser().parse_known_args(default)
    for name, value in own.items():
        if name in vars(found):
            setattr(found, name, value)
    return found

def fails(*options):
    try:
        distrib_run.main(["--standalone", *options, "--log-dir", logs, script, "3"])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print("FAILED", rank, failure.exitcode, flush=True)

if __name__ == "__main__":
    script, logs = sys.argv[1:]
    own = {"nproc_per_node": "2", "training_script_args": ["0"], "log_dir": logs, "use_cpu": True}
    args = accelerates([script], **own)
    distrib_run.run(args)
    print("RUN", args.rdzv_backend, args.rdzv_endpoint, args.master_port, flush=True)
    distrib_run.main(["--nproc-per-node=2", "--log-dir", logs, script, "0"])
    print("MAIN", flush=True)
    fails()
    fails("--run-path")
    import multiprocessing.resource_tracker
    multiprocessing.resource_tracker._resource_tracker._stop()
"""


def test_programs_can_run_jobs_through_the_api_of_torchrun(launch, worker_script):
    script = worker_script("""
        import os, sys
        os.write(1, "RANK {RANK} OF {WORLD_SIZE}\\n".format(**os.environ).encode())
        sys.exit(int(sys.argv[1]))
    """)
    program = worker_script(PROGRAM, "program.py")
    started = launch(program, script, program.parent / "logs", argv=[sys.executable])
    assert started.wait() == 0, started.stderr
    lines = started.stdout.splitlines()
    two = ["RANK 0 OF 2", "RANK 1 OF 2"]
    assert sorted(lines[:2]) == sorted(lines[3:5]) == two
    assert (lines[2], lines[5]) == ("RUN c10d localhost:0 29500", "MAIN")
    assert lines[6:] == ["RANK 0 OF 1", "FAILED 0 3"] * 2


@pytest.mark.parametrize("module", ["elasticrs.run", "elasticrs.launch"])
def test_main_without_arguments_reads_the_command_line(launch, worker_script, module):
    script = worker_script("import sys; sys.exit(int(sys.argv[1]))")
    argv = [sys.executable, "-c", f"import {module} as module; module.main(); print('no failure')"]
    for code, expected in (("4", 1), ("0", 0)):
        started = launch(script, code, argv=argv)
        assert started.wait() == expected
        assert ("no failure" in started.stdout) == (expected == 0)
    missing = launch("no-such-file.py", argv=argv)
    assert missing.wait() == 2
    assert missing.stderr.count("\n") == 1
    assert launch("--help", argv=[sys.executable, "-m", module]).wait() == 0


OLD_PROGRAM = """
import sys
import elasticrs.launch as distrib_launch
from elasticrs._engine.workers import logs

script, *options = sys.argv[1:]
distrib_launch.launch(distrib_launch.parse_args(["--nproc-per-node=2", *options, script, "own"]))
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [((), ["0 --local-rank=0 own", "1 --local-rank=1 own"]), (("--use-env",), ["0 own", "1 own"])],
)
def test_programs_can_run_jobs_through_the_api_of_distributed_launch(launch, worker_script, options, said):
    script = worker_script("""
        import os, sys
        os.write(1, " ".join([os.environ["RANK"], *sys.argv[1:]]).encode() + b"\\n")
    """)
    started = launch(worker_script(OLD_PROGRAM, "program.py"), script, *options, argv=[sys.executable])
    assert started.wait() == 0, started.stderr
    assert sorted(started.stdout.splitlines()) == said


def test_distributed_launch_with_no_python_requires_use_env():
    args = distrib_launch.parse_args(["--no-python", "true"])
    with pytest.raises(ValueError, match=r"--no-python .*--use-env"):
        distrib_launch.launch(args)


def test_an_invalid_option_value_is_named(capsys):
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["--max-restarts=-1", "x"])
    assert "--max-restarts/--max_restarts: got '-1'" in capsys.readouterr().err


def test_a_program_can_add_its_own_options():
    parser = get_args_parser()
    parser.add_argument("--mine")
    assert parser.parse_args(["--mine=1", "train.py"]).mine == "1"


def test_entry_points_can_be_patched_in_run_as_in_torch(monkeypatch):
    monkeypatch.setattr("elasticrs.run.metadata.entry_points", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _get_logs_specs_class("mine")


def test_warnings_as_errors_do_not_stop_a_job_in_a_thread(tmp_path):
    (tmp_path / "job.py").write_text("print('ran')")
    program = """
import sys, threading
from elasticrs import run
arguments = ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", sys.argv[1]]
thread = threading.Thread(target=run.main, args=(arguments,))
thread.start()
thread.join()
"""
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "job.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert "ran" in ended.stdout, ended.stderr
    assert "signals are not handled" in ended.stderr
