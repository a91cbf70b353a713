"""Options of torchrun that change how a worker runs, what it sees, and where its output goes."""

import json
import os
import re
import signal
import subprocess

import pytest
from helpers.packages import install
from helpers.said import says

SHOW = """
    import json, os
    names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    shown = json.dumps({name: os.environ.get(name) for name in names})
    os.write(1, f"{shown}\\n".encode())
"""


VIRTUAL = ("--virtual-local-rank",)


@pytest.mark.parametrize(
    ("options", "env", "expected"),
    [
        (VIRTUAL, {}, [["0", "0", None], ["0", "1", None]]),
        (VIRTUAL, {"CUDA_VISIBLE_DEVICES": "4, GPU-a"}, [["0", "4", None], ["0", "GPU-a", None]]),
        (
            VIRTUAL,
            {"CUDA_VISIBLE_DEVICES": "7,8", "HIP_VISIBLE_DEVICES": "2,3"},
            [["0", "2", "2"], ["0", "3", "3"]],
        ),
        (VIRTUAL, {"HIP_VISIBLE_DEVICES": ""}, [["0", "0", ""], ["0", "1", ""]]),
        ((), {"CUDA_VISIBLE_DEVICES": "4"}, [["0", "4", None], ["1", "4", None]]),
    ],
)
def test_virtual_local_rank_sets_local_rank_0_and_one_visible_device(
    launch, worker_script, options, env, expected
):
    launched = launch(*options, "--nproc-per-node=2", worker_script(SHOW), env=env).exits(0)
    shown = map(json.loads, launched.stdout.splitlines())
    assert [list(each.values())[1:] for each in sorted(shown, key=lambda each: each["RANK"])] == expected


CODE = "import os, sys; print('RAN', os.environ['RANK'], *sys.argv[1:], flush=True)"


@pytest.mark.parametrize(
    "words", [("-c", CODE), ("-X", "dev", "-c", CODE), ("-",)], ids=["code", "option", "stdin"]
)
def test_python_reads_the_program_from_the_command_line_or_from_stdin(launch, words):
    launched = launch("--", *words, "a", "--b", stdin=subprocess.PIPE)
    launched.feed(f"{CODE}\n".encode())
    launched.end_stdin()
    launched.exits(0)
    launched.wait_for_line("^RAN 0 a --b$", "stdout")


@pytest.mark.beyond_torchrun  # torchrun says nothing
def test_a_line_says_that_only_one_worker_can_read_the_program_from_stdin(launch):
    launched = launch("--nproc-per-node=2", "--", "-", stdin=subprocess.PIPE)
    # Send no program, because each worker might read a part of it.
    launched.end_stdin()
    launched.exits(0)
    says(launched.stderr, "one of the 2 workers", "standard input")


# Under torchrun, the fork server and the resource tracker of the first attempt outlive the launcher for a
# moment.
FORKSERVER = pytest.param("forkserver", marks=pytest.mark.beyond_torchrun)
METHODS = pytest.mark.parametrize("method", ["spawn", "fork", FORKSERVER])


@METHODS
def test_run_path_runs_the_script_as_main_in_a_child_process(launch, worker_script, method):
    script = worker_script("""
        import multiprocessing, os, sys
        assert __name__ == "__main__"
        assert multiprocessing.parent_process() is not None
        os.write(1, f"{sys.argv[1:]} {os.environ['RANK']}\\n".encode())
        sys.exit(0)
    """)
    how = ("--run-path", f"--start-method={method}", "--nproc-per-node=2")
    launched = launch(*how, script, "a", "--b", env={"PYTHON_EXEC": "/no/python"}).exits(0)
    assert sorted(launched.stdout.splitlines()) == ["['a', '--b'] 0", "['a', '--b'] 1"]


@pytest.mark.beyond_torchrun  # torchrun accepts only sys.exit(0)
@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "os._exit(0)", ""])
def test_a_run_path_script_succeeds_with_any_kind_of_exit_0(launch, worker_script, end):
    launched = launch("--run-path", worker_script(f"import os, sys\n{end}")).exits(0)
    assert "Traceback" not in launched.stderr


@pytest.mark.beyond_torchrun
@METHODS
def test_a_failed_run_path_script_is_restarted(launch, worker_script, method):
    script = worker_script("import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    launch("--run-path", f"--start-method={method}", "--max-restarts=1", script).exits(0)


@METHODS
def test_a_failed_run_path_script_is_reported_with_its_exception(launch, worker_script, method):
    script = worker_script("raise KeyError('no such thing')")
    launched = launch("--run-path", f"--start-method={method}", script).exits(1)
    assert "KeyError: 'no such thing'" in launched.stderr


@pytest.mark.beyond_torchrun  # torchrun's children have the launcher's signal handlers, which raise
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_forked_run_path_script_has_none_of_the_launchers_signal_handlers(launch, worker_script, method):
    script = worker_script("""
        import os, signal
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1
        os.write(1, b"RUNS\\n")
        signal.pause()
    """)
    launched = launch("--run-path", f"--start-method={method}", script)
    launched.wait_for_line("RUNS")
    launched.signal(signal.SIGTERM)
    launched.exits(1)


def test_lines_matching_a_duplicate_filter_are_copied_with_their_prefix(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        rank = os.environ["RANK"]
        os.write(1, f"loss {rank}\\nother\\n".encode())
        os.write(2, f"a, b {rank}\\na b\\n".encode())
    """)
    arguments = ("--log-dir", tmp_path / "logs", "--tee", "3", "--role", "trainer")
    filters = ("--duplicate-stdout-filters", "loss,nothing", "--duplicate_stderr_filters=a,, b")
    launched = launch("--nproc-per-node=2", *arguments, *filters, script).exits(0)
    (attempt,) = (tmp_path / "logs").glob("*/attempt_0")
    copied = {
        name: sorted((attempt / f"filtered_{name}.log").read_text().splitlines())
        for name in ("stdout", "stderr")
    }
    assert copied == {
        "stdout": ["[trainer0]:loss 0", "[trainer1]:loss 1"],
        "stderr": ["[trainer0]:a, b 0", "[trainer1]:a, b 1"],
    }
    assert len(launched.stdout.splitlines()) == 4


@pytest.mark.beyond_torchrun  # torchrun creates the file but leaves it empty
def test_a_duplicate_filter_without_tee_is_reported_and_has_no_effect(launch, worker_script, tmp_path):
    arguments = ("--log-dir", tmp_path / "logs", "--redirects=3", "--duplicate-stdout-filters=x")
    launched = launch(*arguments, worker_script("print('x')")).exits(0)
    assert "--duplicate-stdout-filters" in launched.stderr
    assert not list((tmp_path / "logs").glob("*/attempt_0/filtered*"))


SPECS = """
import os
from {module} import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

class Renamed(DefaultLogsSpecs):
    def reify(self, envs):
        made = super().reify(envs)
        assert all(env["TORCHELASTIC_RUN_ID"] == "job" for env in envs.values())
        assert all(env["TORCHELASTIC_TIMER_FILE"] for env in envs.values())
        os.makedirs(os.path.join(self.root_log_dir, "mine"), exist_ok=True)
        path = os.path.join(self.root_log_dir, "mine", "{{}}.txt").format
        made.stdouts = {{rank: path(rank) for rank in made.stdouts}}
        made.tee_stdouts = dict(made.stdouts)
        return made

class Broken(LogsSpecs):
    root_log_dir = ""
    def __init__(self, **settings):
        raise OSError("no room")
    def reify(self, envs):
        return LogsDest()
"""


@pytest.fixture
def plugin(tmp_path):
    """Return a function that installs a package with classes for --logs-specs and returns the environment to
    use.
    """

    def plugin(module, group):
        entries = {"renamed": "Renamed", "broken": "Broken", "gone": "Gone"}
        return install(tmp_path / "site", "my_specs", SPECS.format(module=module), group, **entries)

    return plugin


OURS = "elasticrs.multiprocessing.api"
TORCHS = "torch.distributed.elastic.multiprocessing.api"


@pytest.mark.parametrize(
    ("module", "group"),
    [
        pytest.param(OURS, "elasticrs.logs_specs", marks=pytest.mark.beyond_torchrun),
        pytest.param(OURS, "torchrun.logs_specs", marks=pytest.mark.beyond_torchrun),
        pytest.param(TORCHS, "torchrun.logs_specs", marks=pytest.mark.torch),
    ],
)
def test_a_user_defined_logs_specs_class_chooses_the_output_files(
    launch, launch_with_torch, worker_script, tmp_path, plugin, module, group
):
    start = launch_with_torch if module == TORCHS else launch
    env = {**plugin(module, group), "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    arguments = ("--logs-specs=renamed", "--log-dir", tmp_path / "logs", "--tee=1:1", "--rdzv-id=job")
    meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    script = worker_script("import os; os.write(1, f\"hello {os.environ['RANK']}\\n\".encode())")
    launched = start("--nproc-per-node=2", *arguments, *meeting, script, env=env).exits(0)
    assert (tmp_path / "logs" / "mine" / "0.txt").read_text() == "hello 0\n"
    assert "[default1]:hello 1" in launched.stdout.splitlines()


@pytest.mark.beyond_torchrun  # torchrun prints tracebacks
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nothing", "--logs-specs: got 'nothing'.* broken, default, gone, renamed"),
        ("gone", r"--logs-specs: my_specs:Gone .*AttributeError"),
        ("broken", r"--logs-specs: broken .*OSError.*no room"),
    ],
)
def test_a_logs_specs_class_that_cannot_be_loaded_is_a_usage_error(launch, worker_script, plugin, name, line):
    env = plugin(OURS, "elasticrs.logs_specs")
    launched = launch(f"--logs-specs={name}", worker_script("print('ran')"), env=env).exits(2)
    assert re.search(line, launched.stderr)
    assert len(launched.stderr.splitlines()) == 1
    assert launched.stdout == ""


def test_the_default_logs_specs_class_can_be_selected_by_name(launch, worker_script, tmp_path):
    arguments = ("--logs-specs=default", "--log-dir", tmp_path / "logs", "--redirects=1")
    assert launch(*arguments, worker_script("print('x')")).wait() == 0
    (file,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert file.read_text() == "x\n"


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("tee", ["--tee=0", "--tee=0:1"])
def test_capture_stderr_creates_stderr_files_with_logs_specs_default(launch, worker_script, tmp_path, tee):
    arguments = ("--logs-specs=default", "--log-dir", tmp_path / "logs", "--capture-stderr", tee)
    launch("--nproc-per-node=2", *arguments, worker_script("import sys; print('x', file=sys.stderr)")).exits(
        0
    )
    files = {path.relative_to(path.parents[1]) for path in (tmp_path / "logs").rglob("stderr.log")}
    assert sorted(map(str, files)) == ["0/stderr.log", "1/stderr.log"]


SHTAB = """
SUPPORTED_SHELLS = ["bash", "zsh", "tcsh"]
def complete(parser, shell):
    options = [option for action in parser._actions for option in action.option_strings]
    return f"{shell} {parser.prog} {' '.join(options)}"
"""


@pytest.mark.beyond_torchrun  # torchrun's program name differs
def test_print_completion_uses_the_optional_shtab_package(launch, tmp_path):
    (tmp_path / "shtab.py").write_text(SHTAB)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    launched = launch("--print-completion", "zsh", env={"PYTHONPATH": path}).exits(0)
    shell, program, *options = launched.stdout.split()
    assert (shell, program) == ("zsh", "elasticrun")
    assert {"--nproc-per-node", "--nproc_per_node", "-m", "--print-completion", "--help"} <= set(options)


def test_print_completion_without_shtab_names_the_missing_package(launch, tmp_path):
    (tmp_path / "shtab.py").write_text("raise ImportError")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    launched = launch("--print-completion=bash", env={"PYTHONPATH": path}).exits(1)
    assert re.search("--print-completion .*package:? .*pip install", launched.stderr.replace("'", ""))


@pytest.mark.beyond_torchrun
def test_the_automatic_worker_count_is_reported_with_its_source(launch):
    launched = launch("--nproc-per-node=cpu", "--no-python", "true").exits(0)
    count = len(os.sched_getaffinity(0))
    assert f"--nproc-per-node cpu is {count} (cpu, " in launched.stderr


def test_nproc_per_node_cpu_counts_only_the_allowed_cpus(launch, worker_script):
    script = worker_script("import os; print('WORLD', os.environ['WORLD_SIZE'])")
    mine = os.sched_getaffinity(0)
    # Restrict the CPUs, as taskset or a container's cpuset would.
    os.sched_setaffinity(0, {min(mine)})
    try:
        launched = launch("--nproc-per-node=cpu", script)
    finally:
        os.sched_setaffinity(0, mine)
    launched.exits(0)
    assert launched.stdout == "WORLD 1\n"


@pytest.mark.beyond_torchrun
def test_the_use_env_option_of_the_old_launcher_is_accepted(launch, worker_script):
    script = worker_script("import sys; print(sys.argv[1:])")
    launched = launch("--use-env", script, "--local-rank=${local_rank}").exits(0)
    assert launched.stdout == "['--local-rank=0']\n"


BIND = """
import elasticrs._engine.gpus.numa
from elasticrs import LaunchConfig, elastic_launch
from elasticrs._engine.gpus.numa import AffinityMode, NumaOptions

def work():
    return sorted(os.sched_getaffinity(0))
"""
RUN_BOUND = """
cpus = sorted(os.sched_getaffinity(0))
wanted = [[cpus[0]], [cpus[-1]]]
elasticrs._engine.gpus.numa.cpus_by_local_rank = lambda mode, nproc, environ: wanted[:nproc]
config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", numa_options=NumaOptions(AffinityMode.NODE))
assert elastic_launch(config, work)() == dict(enumerate(wanted))
show = "import os; os.write(1, f'{sorted(os.sched_getaffinity(0))}\\\\n'.encode())"
elastic_launch(config, sys.executable)("-c", show)
"""


@pytest.mark.beyond_torchrun
def test_functions_and_programs_run_on_the_chosen_cpus(host_program):
    launched = host_program(BIND, RUN_BOUND).exits(0)
    cpus = sorted(os.sched_getaffinity(0))
    assert sorted(launched.stdout.splitlines()) == sorted([f"[{cpus[0]}]", f"[{cpus[-1]}]"])


FALL_BACK = """
for falls_back in (True, False):
    options = NumaOptions(AffinityMode.SOCKET, should_fall_back_if_binding_fails=falls_back)
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", numa_options=options)
    try:
        elastic_launch(config, "true")()
        print("ran")
    except ValueError as error:
        print("refused:", error)
"""


@pytest.mark.beyond_torchrun
def test_an_impossible_numa_binding_is_skipped_or_refused_as_configured(host_program):
    launched = host_program(BIND, FALL_BACK, env={"CUDA_VISIBLE_DEVICES": ""}).exits(0)
    ran, refused = launched.stdout.splitlines()
    why = refused.removeprefix("refused: ")
    assert "GPUs: 0" in why
    assert ran == "ran"
    assert re.search(rf"\bCPUs: {re.escape(why)}$", launched.stderr, re.MULTILINE)


FROM_PYTHON = """
from elasticrs import LaunchConfig, elastic_launch
from elasticrs.multiprocessing import DefaultLogsSpecs, Std

def work():
    os.write(1, b"loss\\nother\\n")
    return os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]
"""
RUN_VIRTUAL = """
config = LaunchConfig(
    1, 1, 2, rdzv_backend="c10d", virtual_local_rank=True, duplicate_stdout_filters=["loss"],
    logs_specs=DefaultLogsSpecs(sys.argv[1], tee=Std.OUT),
)
assert elastic_launch(config, work)() == {0: ("0", "0"), 1: ("0", "1")}
"""


@pytest.mark.beyond_torchrun
def test_virtual_local_rank_and_duplicate_filters_work_from_python(host_program, tmp_path):
    host_program(FROM_PYTHON, RUN_VIRTUAL, str(tmp_path / "logs")).exits(0)
    (copies,) = (tmp_path / "logs").glob("*/attempt_0/filtered_stdout.log")
    assert sorted(copies.read_text().splitlines()) == ["[default_role0]:loss", "[default_role1]:loss"]
