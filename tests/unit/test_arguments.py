"""The command line: its grammar, defaults from the environment, and settings without effect. Invalid command
lines are tested in test_usage_errors.py.
"""

import os
import re
import signal
import subprocess
import sys
import zipfile

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


FLAGS = {"max_restarts": 1, "standalone": True, "module": False, "role": "r"}
CONF = {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("argv", "environ", "values"),
    [
        # Short options take their value in every form.
        *((argv, {}, {"redirects": 3}) for argv in ("-r3", "-r 3", "-r=3", "--redirect=3", "-mr3")),
        ("-t 0:1,12:3", {}, {"tee": {0: 1, 12: 3}}),
        # The last of several values counts.
        ("--max-restarts=3 --max-r=2", {}, {"max_restarts": 2}),
        # An option overrides its variable, which may then be invalid.
        ("--max-restarts=1", {"PET_MAX_RESTARTS": "many"}, {"max_restarts": 1}),
        ("--max-restarts=1", {"PET_STANDALONE": "1", "PET_MODULE": "0", "PET_ROLE": "r"}, FLAGS),
        ("-r3 --nnodes=1 --standalone", {"PET_ROLE": "a"}, {"given": {"nnodes", "redirects", "standalone"}}),
        # The variable of a flag is a number.
        *(("", {"PET_RUN_PATH": text}, {"run_path": text != "0"}) for text in ("1", "2", "-1", "0", " 1 ")),
        # Abbreviations that torchrun accepts stay unambiguous.
        ("--e null", {}, {"event_log_handler": "null"}),
        ("--v", {}, {"virtual_local_rank": True}),
        ("--exit 3", {}, {"exit_barrier_timeout": 3}),
        # In a YAML list of arguments, quotes become part of the argument.
        *((f"--rdzv-conf={text}", {}, {"rdzv_conf": CONF}) for text in ("a=1,b=2", "'a=1,b=2'", '"a=1,b=2"')),
        ("--rdzv-conf='a=1", {}, {"rdzv_conf": {"'a": "1"}}),
        ("--rdzv-conf=a='1'", {}, {"rdzv_conf": {"a": "'1'"}}),
        ("--rdzv-conf='a'='1'", {}, {"rdzv_conf": {"'a'": "'1'"}}),
        # A double comma in a filter is a literal comma.
        ("--duplicate-stdout-filters a,,b,c,", {}, {"duplicate_stdout_filters": ("a,b", "c")}),
        ("", {"PET_DUPLICATE_STDERR_FILTERS": "loss"}, {"duplicate_stderr_filters": ("loss",)}),
    ],
)
def test_words_and_variables_become_values(argv, environ, values):
    args = parse([*argv.split(), "x.py"], environ)
    assert {name: getattr(args, name) for name in values} == values


def test_spaces_around_the_quotes_of_rdzv_conf_are_removed():
    assert parse(["--rdzv-conf= 'a=1,b=2' ", "x.py"], {}).rdzv_conf == CONF


def test_a_double_dash_ends_the_options():
    assert parse(["--", "--script"], {}).training_script == "--script"


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


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.has_variable], ids=lambda o: o.name
)
def test_every_option_can_be_set_by_its_environment_variable(option):
    texts = ["1", "2", "5M", "bad", "SIGTERM", "fork", "node", "k=v", "worker", "replace", "time", "file:x"]
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


STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SEVEN = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}


@pytest.mark.parametrize(
    ("options", "environ", "field", "value"),
    [
        # The default stop scope is worker for Python, and group for other programs.
        ([], {}, "stop_scope", "worker"),
        (["--run-path"], {}, "stop_scope", "worker"),
        (["--no-python"], {}, "stop_scope", "group"),
        (["--no-python", "--stop-scope", "worker"], {}, "stop_scope", "worker"),
        (["--stop-scope=group"], {}, "stop_scope", "group"),
        # The signals that are passed on are those that do not stop the job.
        ([], {}, "forwarded", (signal.SIGUSR1, signal.SIGUSR2)),
        (["--signals-to-forward", "sigusr2,WINCH"], {}, "forwarded", (signal.SIGUSR2, signal.SIGWINCH)),
        (["--signals-to-forward="], {}, "forwarded", ()),
        (["--signals-to-handle", "SIGTERM,SIGUSR1"], {}, "forwarded", (signal.SIGUSR2,)),
        ([], {}, "signals", STOP),
        (["--signals-to-handle=SIGTERM,SIGUSR1"], {}, "signals", (signal.SIGTERM, signal.SIGUSR1)),
        ([], {}, "shutdown_timeout", 30),
        ([], SEVEN, "shutdown_timeout", 7),
        (["--shutdown-timeout=2"], SEVEN, "shutdown_timeout", 2),
        ([], {}, "linger", 5),
        (["--linger=0"], {}, "linger", 0),
        (["--keep-descendants"], {}, "linger", None),
        ([], {}, "hang_timeout", None),
        (["--hang-timeout", "90"], {}, "hang_timeout", 90.0),
        (["--hang-timeout", "auto"], {}, "hang_timeout", "auto"),
        (["--hang-timeout", "auto:20"], {}, "hang_timeout", "auto:20"),
        (["--hang-timeout", "auto"], {}, "hang_exit_timeout", 1800.0),
        (["--hang-timeout", "9", "--hang-exit-timeout", "0"], {}, "hang_exit_timeout", 0),
        (["--hang-timeout", "auto", "--hang-startup-timeout", "600"], {}, "hang_startup_timeout", 600.0),
        ([], {}, "exit_timeout", 10.0),
        (["--exit-timeout", "0"], {}, "exit_timeout", 0.0),
        (["--run-path", "--start-method=fork"], {}, "start_method", "fork"),
    ],
)
def test_options_and_variables_reach_the_job(options, environ, field, value, script):
    program = "true" if "--no-python" in options else script
    assert getattr(launch(*options, program, **environ), field) == value


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
    with pytest.raises(UsageError, match=r"/no/script\.py"):
        launch("--run-path", "/no/script.py")


def test_virtual_local_rank_with_too_few_devices_is_refused(script):
    argv = ("--virtual-local-rank", "--nproc-per-node=3", script)
    assert launch(*argv, CUDA_VISIBLE_DEVICES="0,1,2").virtual_local_rank
    with pytest.raises(UsageError, match=r"--virtual-local-rank.*HIP_VISIBLE_DEVICES=4,5"):
        launch(*argv, CUDA_VISIBLE_DEVICES="0,1,2", HIP_VISIBLE_DEVICES="4,5")


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


def test_handled_signals_are_passed_to_workers_by_name(script):
    job = launch("--signals-to-handle=SIGTERM,SIGUSR1", script)
    assert job.variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"


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


@pytest.mark.parametrize("option", ["--help", "-h", "--help="])
def test_an_unknown_topic_of_the_help_option_is_a_usage_error(option):
    words = [f"{option}nosuch"] if option.endswith("=") else [option, "nosuch"]
    with pytest.raises(UsageError, match="--help: got 'nosuch', expected all or rdzv"):
        parse(words, {})


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
    shown = set(heads_in(text))
    assert {f"--{name}" for name in COMMON} < shown
    assert {"--warm", "--keep", "--keep-save", "--hang-timeout"} <= shown
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


SEVERAL = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--rdzv-id=x")
BY_HANDLER = ("--rdzv-backend=c10d", "--rdzv-endpoint=/tmp/x", "--rdzv-conf=store_type=file")


def notices(*argv, **environ):
    return launch(*argv, **environ).notices


@pytest.mark.parametrize(
    ("before", "after", "environ", "named"),
    [
        ((), ("--nproc_per_node=4", "--lr", "3"), {}, ["--nproc_per_node"]),
        ((), ("--max-restarts", "3", "--rdzv-id", "x"), {}, ["--max-restarts", "--rdzv-id"]),
        ((), ("--", "--max-restarts", "3"), {}, []),
        # These names are not reported, because a script may have options with the same names.
        ((), ("--log-dir", "x", "--role=y", "--tee", "-m", "nnodes"), {}, []),
        (("--local-ranks-filter=0,1",), (), {}, ["--local-ranks-filter:"]),
        (("--local-ranks-filter=0",), (), {}, []),
        ((), (), {"PET_MAX_RESTART": "3", "PET_ROLE": "x", "PET_X": ""}, ["PET_MAX_RESTART", "PET_X"]),
        ((), (), {"PET_LOGS_SPECS": "x"}, ["PET_LOGS_SPECS"]),
        (("--log-line-prefix-template=${rank}${node}",), (), {}, ["--log-line-prefix-template:"]),
        (("--log-line-prefix-template=${rank} $x {y",), (), {}, []),
        (("--standalone", "--rdzv-endpoint=a:1", "--rdzv-id=x"), (), {}, ["--rdzv-endpoint", "--rdzv-id"]),
        (("--standalone",), (), {}, []),
        (
            (
                *BY_HANDLER,
                "--report=file:r",
                "--exit-codes=worker",
                "--fatal-exit-codes=3",
                "--node-check=true",
            ),
            (),
            {"PET_MAX_SAME_FAILURES": "5", "PET_MAX_RESTARTS": "3/1h", "PET_RESTART_DELAY": "1s"},
            [],
        ),
        (BY_HANDLER, (), {}, []),
        (("--on-failure=replace", "--restart-delay=1s"), (), {}, ["--restart-delay"]),
        ((*SEVERAL, "--on-failure=replace", "--restart-delay=1s"), (), {}, []),
        ((*SEVERAL, "--on-failure=replace", "--max-excluded-nodes=9"), (), {}, ["--max-excluded-nodes"]),
        ((*BY_HANDLER, "--max-excluded-nodes=9"), (), {}, ["--max-excluded-nodes"]),
    ],
)
def test_a_setting_without_effect_is_reported(script, before, after, environ, named):
    assert [line.split()[0] for line in notices(*before, script, *after, **environ)] == named


def test_a_misspelled_variable_gets_a_hint(script):
    (line,) = notices(script, PET_MAX_RESTART="3")
    assert line.endswith("PET_MAX_RESTARTS?")


def test_a_local_ranks_filter_without_a_match_is_reported(script):
    (line,) = notices("--local-ranks-filter=7", script)
    assert line.startswith("--local-ranks-filter: ")
    assert "7" in line


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["train.py --lr 3"], "separate words"),
        (["no.py --lr 3"], None),
        (["\u2013nproc-per-node", "2", "train.py"], "type --nproc-per-node"),
        (["\u2014\u2014standalone", "train.py"], "type --standalone"),
    ],
)
def test_a_missing_script_gets_a_hint(script, monkeypatch, argv, hint):
    monkeypatch.chdir(os.path.dirname(script))
    with pytest.raises(UsageError) as raised:
        notices(*argv)
    text = str(raised.value)
    assert ";" not in text if hint is None else hint in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.py", "-m"),
        ("no_such_module", "'no_such_module'"),
        ("package.no_such", "'package.no_such'"),
        ("package", "__main__"),
        ("train", None),
        ("package.inner", None),
        ("open.anything", None),
        ("namespace.inner", None),
        ("json.tool", None),
        ("os.path", None),
    ],
)
def test_a_missing_module_is_a_usage_error(script, monkeypatch, name, said):
    folder = os.path.dirname(script)
    monkeypatch.chdir(folder)
    for path, text in {
        "package/__init__.py": "raise RuntimeError('imported')",
        "package/inner.py": "",
        "open/__init__.py": "__path__.append('elsewhere')",
        "namespace/inner.py": "",
    }.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    if said is None:
        assert notices("-m", name) == []
        return
    with pytest.raises(UsageError) as raised:
        notices("-m", name)
    assert said in str(raised.value)


def test_a_module_in_a_zip_archive_is_not_checked(script, monkeypatch):
    monkeypatch.chdir(os.path.dirname(script))
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/inner.py", "")
    monkeypatch.syspath_prepend("archive.zip")
    assert notices("-m", "zipped.inner") == []
