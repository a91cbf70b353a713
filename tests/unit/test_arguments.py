"""The command line: its grammar, and defaults from the environment. Invalid command lines are tested in
test_usage_errors.py.
"""

import os
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.cli.help import COMMON, WIDTH, help_text
from elasticrs._engine.cli.parser import get_args_parser
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, OURS, TOPICS, TextRequested, parse
from elasticrs._engine.nodes.transport import etcd_site
from elasticrs._engine.nodes.transport.settings import KEYS
from elasticrs._engine.workers.process import PythonCommand, parse_python

ENV = {"PATH": "/usr/bin:/bin"}


def launch(*argv, **environ):
    return resolve(parse(argv, environ), {**ENV, **environ})


@pytest.mark.parametrize("argv", [["-r3"], ["-r", "3"], ["-r=3"], ["--redirect=3"], ["-mr3"]])
def test_short_options_take_their_value_in_every_form(argv):
    assert parse([*argv, "x.py"], {}).redirects == 3


@pytest.mark.parametrize("variable", [{}, {"PET_NODE_CHECK": "false"}])
def test_a_repeated_option_collects_its_values_and_overrides_its_variable(variable, monkeypatch):
    argv = ["--node-check", "true", "--node-check=sh -c 'exit 0'", "x.py"]
    values = ("true", "sh -c 'exit 0'")
    assert parse(argv, variable).node_check == values
    assert parse(["x.py"], variable).node_check == (("false",) if variable else None)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    parser = get_args_parser()
    assert tuple(parser.parse_args(argv).node_check) == values
    assert parser.parse_args(["x.py"]).node_check == (["false"] if variable else None)


@pytest.mark.parametrize("text", ["a=1,b=2", "'a=1,b=2'", '"a=1,b=2"', " 'a=1,b=2' "])
def test_quotes_around_the_whole_rdzv_conf_are_removed(text):
    # In a YAML list of arguments, such quotes become part of the argument.
    assert parse([f"--rdzv-conf={text}", "x.py"], {}).rdzv_conf == {"a": "1", "b": "2"}


@pytest.mark.parametrize("text", ["'a=1", "a='1'", "'a'='1'"])
def test_quotes_inside_rdzv_conf_are_kept(text):
    key, _, value = text.partition("=")
    assert parse([f"--rdzv-conf={text}", "x.py"], {}).rdzv_conf == {key: value}


def test_the_last_of_several_values_counts():
    assert parse(["--max-restarts=3", "--max-r=2", "x.py"], {}).max_restarts == 2


def test_a_double_dash_ends_the_options():
    assert parse(["--", "--script"], {}).training_script == "--script"


def test_an_option_overrides_its_environment_variable():
    environ = {"PET_MAX_RESTARTS": "3", "PET_STANDALONE": "1", "PET_MODULE": "0", "PET_ROLE": "r"}
    args = parse(["--max-restarts=1", "x.py"], environ)
    assert (args.max_restarts, args.standalone, args.module, args.role) == (1, True, False, "r")


def test_an_invalid_variable_is_ignored_if_its_option_is_given():
    assert parse(["--max-restarts=1", "x"], {"PET_MAX_RESTARTS": "many"}).max_restarts == 1


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("2", True), ("-1", True), ("0", False), (" 1 ", True)]
)
def test_the_environment_variable_of_a_flag_is_read_as_a_number(text, value):
    assert parse(["x"], {"PET_RUN_PATH": text}).run_path is value


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.has_variable], ids=lambda o: o.name
)
def test_every_option_can_be_set_by_its_environment_variable(option):
    texts = ["1", "2", "bad", "SIGTERM", "fork", "node", "k=v", "worker", "replace", "time", "file:x"]
    found = [value for text in texts if (value := _default_by(option, text)) is not option]
    assert found
    assert any(value != option.default for value in found)


def _default_by(option, text):
    """Return the option's value if its variable has this text, or the option itself if it refuses
    the text.
    """
    try:
        return getattr(parse(["x"], {option.variable: text}), option.dest)
    except UsageError:
        return option


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ([], "worker"),
        (["--run-path"], "worker"),
        (["--no-python"], "group"),
        (["--no-python", "--stop-scope", "worker"], "worker"),
        (["--stop-scope=group"], "group"),
    ],
)
def test_the_default_stop_scope_is_worker_for_python_and_group_otherwise(options, scope, script):
    program = "true" if "--no-python" in options else script
    assert launch(*options, program).stop_scope == scope


@pytest.mark.parametrize(
    ("options", "signals"),
    [
        ([], [signal.SIGUSR1, signal.SIGUSR2]),
        (["--signals-to-forward", "sigusr2,WINCH"], [signal.SIGUSR2, signal.SIGWINCH]),
        (["--signals-to-forward="], []),
        (["--signals-to-handle", "SIGTERM,SIGUSR1"], [signal.SIGUSR2]),
    ],
)
def test_the_forwarded_signals_follow_the_signal_options(options, signals, script):
    assert list(launch(*options, script).forwarded) == signals


def test_abbreviations_accepted_by_torchrun_stay_unambiguous():
    assert parse(["--e", "null", "x"], {}).event_log_handler == "null"
    assert parse(["--v", "x"], {}).virtual_local_rank
    assert parse(["--exit", "3", "x"], {}).exit_barrier_timeout == 3


def test_a_double_comma_in_a_filter_is_a_literal_comma():
    args = parse(["--duplicate-stdout-filters", "a,,b,c,", "x"], {"PET_DUPLICATE_STDERR_FILTERS": "loss"})
    assert args.duplicate_stdout_filters == ("a,b", "c")
    assert args.duplicate_stderr_filters == ("loss",)


def test_duplicate_filters_without_tee_are_reported(script):
    argv = ("--duplicate-stdout-filters=a", "--duplicate-stderr-filters=a", script)
    assert [notice.split()[0] for notice in launch("--tee=0:1,1:0", *argv).notices] == [
        "--duplicate-stderr-filters"
    ]
    assert launch("--tee=3", *argv).notices == []
    assert launch("--tee=1", "--capture-stderr", *argv).notices == []


def test_run_path_overrides_no_python(script):
    made = launch("--run-path", "--no-python", script, "a", PYTHON_EXEC="/no/python")
    assert made.run_path
    assert made.command == [script, "a"]
    assert made.notices == []
    assert launch("--run-path", "--start-method=fork", script).start_method == "fork"
    with pytest.raises(UsageError, match=r"/no/script\.py"):
        launch("--run-path", "/no/script.py")


def test_virtual_local_rank_with_too_few_devices_is_refused(script):
    argv = ("--virtual-local-rank", "--nproc-per-node=3", script)
    assert launch(*argv, CUDA_VISIBLE_DEVICES="0,1,2").virtual_local_rank
    with pytest.raises(UsageError, match=r"--virtual-local-rank.*HIP_VISIBLE_DEVICES=4,5"):
        launch(*argv, CUDA_VISIBLE_DEVICES="0,1,2", HIP_VISIBLE_DEVICES="4,5")


def test_tee_accepts_ranks_with_two_digits():
    assert parse(["-t", "0:1,12:3", "x.py"], {}).tee == {0: 1, 12: 3}


def test_a_folder_can_be_run_only_if_it_contains_a_main_file(tmp_path):
    with pytest.raises(UsageError, match=r"__main__\.py"):
        launch(str(tmp_path))
    (tmp_path / "__main__.py").touch()
    assert launch(str(tmp_path)).command[-1] == str(tmp_path)


def test_the_worker_command_runs_python_unbuffered(script):
    assert launch(script, "-a").command == [sys.executable, "-u", script, "-a"]
    assert launch("-m", "json.tool").command == [sys.executable, "-u", "-m", "json.tool"]
    assert launch("--no-python", "ls", "-l").command == ["ls", "-l"]


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "CODE", "a", "--b"],
        ["-X", "faulthandler", "SCRIPT", "-c"],
        ["-W", "error", "SCRIPT"],
        ["-O", "-m", "pdb", "SCRIPT"],
        ["-", "a"],
    ],
)
def test_options_of_python_may_take_the_place_of_the_script(script, words):
    words = [word.replace("SCRIPT", script) for word in words]
    assert launch("--nproc-per-node=2", "--", *words).command == [sys.executable, "-u", *words]


def test_a_script_may_have_the_name_of_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-c").touch()
    assert launch("--", "-c", "a").command == [sys.executable, "-u", "./-c", "a"]


def test_each_of_several_workers_gets_one_openmp_thread_by_default(script):
    several = launch("--nproc-per-node=2", script)
    assert several.variables["OMP_NUM_THREADS"] == "1"
    assert len(several.notices) == 1
    assert "OMP_NUM_THREADS" not in launch("--nproc-per-node=2", script, OMP_NUM_THREADS="4").variables
    assert launch(script).notices == []


def test_far_more_workers_than_cpus_are_reported(script, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    quiet = {"OMP_NUM_THREADS": "1"}
    assert launch("--nproc-per-node=64", script, **quiet).notices == []
    (notice,) = launch("--nproc-per-node=65", script, **quiet).notices
    assert re.search(r"--nproc-per-node\b.*\b65\b.*\b2 CPUs", notice)


def test_run_ids_and_master_addresses_follow_the_rules_of_torch(script):
    def where(*argv):
        job = launch(*argv, script)
        return job.run_id, job.master_addr, job.master_port

    assert where()[1:] == ("localhost", None)
    assert len(where("--standalone", "--rdzv-id=x")[0]) == 36
    assert where("--master-port=29501", "--rdzv-id=j") == ("j", "127.0.0.1", 29501)
    assert where("--master-port=29501", "--master-addr=[::1]") == ("none", "::1", 29501)
    assert where("--rdzv-endpoint=host:1234") == ("none", "host", 1234)
    assert where("--rdzv-backend=c10d", "--rdzv-endpoint=host:1234", "--rdzv-id=j") == (
        "j",
        "localhost",
        None,
    )
    assert where("--standalone", "--local-addr=10.0.0.1")[1:] == ("10.0.0.1", None)


def test_the_shutdown_timeout_option_overrides_its_environment_variable(script):
    assert launch(script).shutdown_timeout == 30
    assert launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout == 7
    assert launch("--shutdown-timeout=2", script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout == 2


def test_handled_signals_are_parsed_and_passed_to_workers_by_name(script):
    job = launch("--signals-to-handle=SIGTERM,SIGUSR1", script)
    assert job.signals == (signal.SIGTERM, signal.SIGUSR1)
    assert job.variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"
    assert launch(script).signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def test_linger_is_configurable_and_off_with_keep_descendants(script):
    assert launch(script).linger == 5
    assert launch("--linger=0", script).linger == 0
    assert launch("--keep-descendants", script).linger is None


@pytest.mark.parametrize("argv", [["-h"], ["--help"], ["--he"], ["--h"], ["--role", "x", "-h"], ["-mh"]])
def test_every_spelling_of_the_help_option_requests_help(argv):
    with pytest.raises(TextRequested):
        parse(argv, {})


@pytest.mark.parametrize(
    ("argv", "topic"),
    [
        (["--help", "train.py"], ()),
        (["--help", "all"], ("all",)),
        (["--help=rdzv"], ("rdzv",)),
        (["-h", "rdzv"], ("rdzv",)),
        (["-hrdzv"], ("rdzv",)),
    ],
)
def test_the_help_option_accepts_a_topic(argv, topic):
    with pytest.raises(TextRequested) as request:
        parse(argv, {})
    assert (request.value.what, request.value.words) == ("help", topic)


def heads_in(text):
    """Return the options and settings that have their own row in the help text."""
    heads = [re.match(r"[* ] (?:-\w, )?(--[\w-]+|[a-z]\w+)(?: |$)", line) for line in text.splitlines()]
    return sorted(match[1] for match in heads if match)


def test_help_all_has_a_row_for_every_option():
    names = heads_in(help_text("x", "all"))
    assert names == sorted([*(option.flag for option in OPTIONS), "--help", "--version"])


def test_help_rdzv_has_a_row_for_every_setting():
    settings = [key.name for key in (*KEYS, *etcd_site.KEYS) if key.is_stored or key.default is None]
    assert heads_in(help_text("x", "rdzv")) == sorted(settings)


def test_help_names_every_option_in_at_most_80_lines():
    text = help_text("elasticrun")
    assert all(option.flag in text for option in OPTIONS)
    assert {f"--{name}" for name in COMMON} < set(heads_in(text))
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize("topic", ["", *TOPICS])
def test_help_lines_are_at_most_80_columns_wide(topic):
    assert max(map(len, help_text("elasticrun", topic).splitlines())) <= WIDTH == 80


def test_help_contains_the_help_text_of_every_option():
    flat = " ".join((help_text("elasticrun", "all") + help_text("elasticrun", "rdzv")).split())
    for entry in (*OPTIONS, *(key for key in KEYS if key.is_stored)):
        assert entry.help in flat, entry.name


def test_help_marks_options_that_torchrun_does_not_have():
    marked = set(re.findall(r"(?m)^\* (--[\w-]+)", help_text("x", "all")))
    assert marked == {option.flag for option in OPTIONS if option.group == OURS}


def test_the_examples_in_help_are_valid_commands(script):
    text = help_text("elasticrun").replace("\\\n", "")
    examples = re.findall(r"(?m)^  elasticrun (.*)$", text)
    assert len(examples) == 2
    for example in examples:
        assert parse(example.split(), {}).training_script == "train.py"


def test_help_names_every_rdzv_setting_and_those_without_effect():
    flat = " ".join(help_text("x", "rdzv").split())
    assert all(key.name in flat for key in KEYS)
    without_effect = re.search(r"Torch's ([^.]*) are accepted", flat)[1]
    assert "heartbeat_timeout" in without_effect
    assert "store_type" not in without_effect
    assert "timeout" not in without_effect.replace("_timeout", "")


def test_options_given_on_the_command_line_are_recorded():
    args = parse(["--nnodes=1", "-r3", "--standalone", "x.py"], {"PET_ROLE": "a"})
    assert args.given == {"nnodes", "redirects", "standalone"}


def test_hang_timeouts_can_be_fixed_or_automatic(script):
    assert launch(script).hang_timeout is None
    assert launch(script).exit_timeout == 10.0
    assert launch("--exit-timeout", "0", script).exit_timeout == 0.0
    assert launch("--hang-timeout", "90", script).hang_timeout == 90.0
    job = launch("--hang-timeout", "auto", "--hang-startup-timeout", "600", script)
    assert (job.hang_timeout, job.hang_startup_timeout, job.hang_exit_timeout) == ("auto", 600.0, 1800.0)
    assert launch("--hang-timeout", "9", "--hang-exit-timeout", "0", script).hang_exit_timeout == 0
    assert launch("--hang-timeout", "auto:20", script).hang_timeout == "auto:20"


@pytest.mark.parametrize(
    ("name", "instead"),
    [("ELASTICRS_KUBEFLOW_PROGRESS", "--health-check-port"), ("ELASTICRS_TIMELINE", "--event-log-handler")],
)
def test_a_variable_that_is_gone_is_an_error_that_says_what_to_use(name, instead):
    args = parse(["-m", "this"], {})
    with pytest.raises(UsageError, match=f"{name} .*{instead}"):
        resolve(args, {name: "1"})
    for off in ("", "0"):
        assert not resolve(args, {"PATH": "/bin", name: off}).is_observed


@pytest.mark.parametrize(
    ("words", "kind", "program", "arguments"),
    [
        (["t.py", "-c", "x"], "script", "t.py", ("-c", "x")),
        (["-c", "pass", "a", "--b"], "c", "pass", ("a", "--b")),
        (["-cpass", "a"], "c", "pass", ("a",)),
        (["-uBc", "pass"], "c", "pass", ()),
        (["-X", "faulthandler", "t.py"], "script", "t.py", ()),
        (["-Xfaulthandler", "-W", "error", "t.py", "-W"], "script", "t.py", ("-W",)),
        (["-OWerror", "-m", "pdb", "t.py"], "m", "pdb", ("t.py",)),
        (["-mpdb", "-c", "continue"], "m", "pdb", ("-c", "continue")),
        (["--check-hash-based-pycs", "never", "t.py"], "script", "t.py", ()),
        (["-O", "-", "a"], "stdin", "-", ("a",)),
        (["-O", "--", "-t.py"], "script", "-t.py", ()),
        (["-O"], "", None, ()),
        (["-c"], "c", None, ()),
        (["-m"], "m", None, ()),
        ([], "", None, ()),
    ],
)
def test_the_program_and_its_arguments_are_found(words, kind, program, arguments):
    found = parse_python(words)
    assert (found.kind, found.program, found.arguments) == (kind, program, arguments)
    assert found.unknown is None


@pytest.mark.parametrize("option", ["-z", "--lr", "-uz", "--lr=1"])
def test_an_option_that_python_does_not_have_is_named(option):
    assert parse_python(["-u", option, "t.py"]).unknown == option


@given(st.lists(st.text(max_size=4) | st.sampled_from(["-c", "-m", "-", "--", "-X", "-W", "-u"])))
def test_all_words_are_parsed(words):
    found = parse_python(words)
    assert isinstance(found, PythonCommand)
    assert list(found.arguments) == words[len(words) - len(found.arguments) :]


@pytest.mark.parametrize(
    "words", [["-c", "CODE", "a", "-u"], ["-X", "dev", "-c", "CODE"], ["-OOWerror", "-BcCODE", "--", "a"]]
)
def test_the_interpreter_agrees(words):
    code = "import sys; print(sys.argv)"
    words = [word.replace("CODE", code) for word in words]
    done = subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(["-c", *parse_python(words).arguments])
