"""Each setting is declared once and appears in the command line, LaunchConfig, WorkerSpec and JobSpec."""

import dataclasses
import os

import pytest

from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.job import options
from elasticrs._engine.job.config import (
    JobSpec,
    LogSettings,
    UnresolvedSettings,
    WorkerSettings,
)
from elasticrs._engine.job.options import parse
from elasticrs._engine.job.value import defaults_of
from elasticrs.agent.server import LocalElasticAgent, WorkerSpec
from elasticrs.launcher import LaunchConfig, api
from elasticrs.multiprocessing.api import DefaultLogsSpecs
from elasticrs.rendezvous.api import RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler

DECLARED = {**defaults_of(WorkerSettings), **defaults_of(UnresolvedSettings)}
BY_DEST = {option.dest: option for option in options.OPTIONS}

VALUES = {
    "hang_timeout": 7.0,
    "hang_startup_timeout": 8.0,
    "hang_exit_timeout": 9.0,
    "exit_timeout": 3.0,
    "warm_timeout": 4.0,
    "on_failure": "replace",
    "restart_delay": "1s..5m",
    "max_same_failures": 5,
    "max_excluded_nodes": 2,
    "fatal_exit_codes": "3,40-49",
    "exit_codes": "verdict:7,8",
    "keep": True,
    "keep_memory": "20G",
    "keep_grace": 6.0,
    "keep_peers": 1,
    "keep_bandwidth": "500M",
    "keep_save": "/saved",
    "log_prefix": "time",
}
"""A value for each setting of `WorkerSettings` that is not its default."""

DERIVED = {
    JobSpec: {
        *("nproc", "run_id", "name", "signals", "forwarded"),
        *("cpus", "uninterruptible_state_timeout", "preload"),
        *("command", "variables", "logs", "notices", "rendezvous", "make_handler", "has_metrics"),
    },
    LogSettings: set(),
}
"""Fields that are no options: the launcher derives their values from options and from the environment."""

LAUNCHER = {
    *("nproc_per_node", "module", "no_python", "numa_binding", "rdzv_id"),
    *("standalone", "node_rank", "drain", "signals_to_handle"),
    *("rdzv_endpoint", "rdzv_conf", "nnodes", "local_addr"),
    *("keep_descendants", "print_completion", "use_env", "check", "no_scheduler"),
}
"""Options that only the launcher uses."""

OWN_DEFAULT = {
    # The default depends on the environment.
    "shutdown_timeout",
    # As in torch, the default is localhost for workers on a single node and 127.0.0.1 for the static
    # rendezvous.
    "master_addr",
    # The default depends on the program.
    "stop_scope",
    # As in torch, the events of a single-node job name c10d as the back end.
    "rdzv_backend",
}


@pytest.fixture
def handler():
    made = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    yield made
    made.shutdown()


@pytest.mark.parametrize("kind", [LaunchConfig, WorkerSpec])
def test_launch_config_and_worker_spec_have_every_setting_as_a_keyword(kind):
    found = {field.name: field for field in dataclasses.fields(kind) if field.kw_only}
    assert {name: field.default for name, field in found.items()} == DECLARED


def test_every_setting_is_an_option_with_the_same_default():
    assert {name: BY_DEST[name].default for name in DECLARED} == DECLARED
    assert {name: JobSpec(1, "job").fields()[name] for name in defaults_of(WorkerSettings)} == defaults_of(
        WorkerSettings
    )


@pytest.mark.parametrize("kind", DERIVED)
def test_every_field_is_an_option_or_derived(kind):
    names = set(kind._names)
    assert names - BY_DEST.keys() == DERIVED[kind]
    for name in names & kind.defaults().keys() & BY_DEST.keys() - OWN_DEFAULT:
        assert kind.defaults()[name] == BY_DEST[name].default, name


def test_every_option_is_a_field_or_used_only_by_the_launcher():
    fields = {*DECLARED, *(name for kind in DERIVED for name in kind._names)}
    assert BY_DEST.keys() - fields == LAUNCHER


def test_command_line_values_reach_the_job():
    assert VALUES.keys() == defaults_of(WorkerSettings).keys()
    argv = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in VALUES.items()
    ]
    job = resolve(parse([*argv, os.__file__], {}), {})
    assert {name: getattr(job, name) for name in VALUES} == VALUES


def test_launch_config_values_reach_the_job(handler, tmp_path):
    config = LaunchConfig(1, 1, 1, logs_specs=DefaultLogsSpecs(str(tmp_path)), **VALUES)
    passed = {name: getattr(config, name) for name in api._OF_WORKERS}
    assert passed.keys() >= DECLARED.keys()
    spec = WorkerSpec(local_world_size=1, rdzv_handler=handler, entrypoint="true", **passed)
    job = LocalElasticAgent(spec, config.logs_specs)._job()
    assert {name: getattr(job, name) for name in VALUES} == VALUES


@pytest.mark.parametrize("name", DECLARED)
def test_launch_config_names_an_invalid_setting(name):
    with pytest.raises(ValueError, match=f"^{name} must be [^,]{{5}}.*, got <object object"):
        LaunchConfig(1, 1, 1, **{name: object()})


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: LaunchConfig(1, 1, 1, **more),
        lambda **more: WorkerSpec("r", 1, rdzv_handler=None, entrypoint="true", **more),
    ],
    ids=["LaunchConfig", "WorkerSpec"],
)
def test_max_restarts_accepts_a_window_as_text(make):
    made = make(max_restarts="3/1h")
    assert (made.max_restarts, made.max_restarts.window) == (3, 3600)
    assert made.max_restarts - 1 == 2
    with pytest.raises(ValueError, match=r"max_restarts must be .*, got '3/'"):
        make(max_restarts="3/")


DURATIONS = [each for each in options.OPTIONS if each.kind and each.kind.metavar.startswith("DURATION")]


@pytest.mark.parametrize("option", DURATIONS, ids=[each.name for each in DURATIONS])
def test_every_option_that_takes_a_duration_accepts_units(option):
    assert option.kind.convert("10m") == option.kind.convert("600") == 600
    assert option.kind.convert("1.5s") == 1.5


def test_no_option_takes_a_number_of_seconds_in_another_way():
    timed = {each.name for each in options.OPTIONS if each.kind and {"seconds", "timeout"} & words(each)}
    assert timed - {each.name for each in DURATIONS} == set()


def words(option):
    return {*option.help.split(), *option.name.split("-")}


def test_the_path_of_the_report_may_be_given_without_a_scheme():
    (report,) = (each for each in options.OPTIONS if each.name == "report")
    assert report.kind.convert("out.json") == report.kind.convert("file:out.json") == "out.json"
