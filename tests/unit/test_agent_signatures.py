"""Names, arguments and defaults of the agents and the launcher, compared with the installed release
of torch.
"""

import dataclasses
import importlib
import inspect
import json

import pytest

from elasticrs.job.config import UnresolvedSettings, WorkerSettings

pytestmark = pytest.mark.torch

LOCAL = "agent.server.local_elastic_agent"
MODULES = {
    "torch.distributed.elastic.agent.server.api": "elasticrs.agent.server.api",
    f"torch.distributed.elastic.{LOCAL}": f"elasticrs.{LOCAL}",
    "torch.distributed.launcher.api": "elasticrs.launcher.api",
    "torch.distributed.run": "elasticrs.run",
}

CLASSES = (
    "WorkerSpec", "Worker", "WorkerState", "WorkerGroup", "RunResult", "ElasticAgent", "SimpleElasticAgent",
    "LocalElasticAgent", "LaunchConfig", "elastic_launch", "_RoleInstanceInfo",
)  # fmt: skip
FUNCTIONS = (
    "launch_agent", "_get_entrypoint_name", "_get_addr_and_port", "config_from_args", "run", "main",
    "determine_local_world_size", "get_args_parser", "parse_args", "parse_min_max_nnodes", "get_use_env",
    "get_rdzv_endpoint", "run_script_path", "_get_logs_specs_class", "_get_fq_hostname",
)  # fmt: skip

DIFFERENT = {
    # If not given, these timeouts come from the environment, as in the newest sources of torch.
    "SimpleElasticAgent.__init__": {"exit_barrier_timeout": "None", "shutdown_timeout": "None"},
    "LocalElasticAgent.__init__": {"exit_barrier_timeout": "None", "shutdown_timeout": "None"},
}
SETTINGS = {*WorkerSettings.__annotations__, *UnresolvedSettings.__annotations__}
MORE = {
    "WorkerSpec.__init__": SETTINGS,
    "LocalElasticAgent.__init__": {"signals_to_handle"},
    "LaunchConfig.__init__": {"exit_barrier_timeout", *SETTINGS},
    "RunResult.__init__": {"verdict", "exit_code", "reason"},
}

HOOKS_OF_OTHERS = {
    # The core serves a single timer FIFO instead. See TORCHELASTIC_ENABLE_FILE_TIMER.
    "_setup_local_watchdog", "_log_watchdog_event",
    "_setup_healthcheck", "_get_alive_time", "_get_current_time_secs",
    # The environment of workers is made in one place, for all kinds of agents.
    "_set_local_rank_env", "_get_fq_hostname",
    "_check_uninterruptible_state_timeout", "_update_uninterruptible_dwell",
}  # fmt: skip

DESCRIBE = """
import dataclasses, importlib, inspect, json, sys

def parameters(function):
    return [[p.name, p.kind.name, repr(p.default)] for p in inspect.signature(function).parameters.values()]

def describe(modules, classes, functions):
    found = {}
    for name in modules:
        module = importlib.import_module(name)
        for each in functions:
            if hasattr(module, each):
                found[each] = parameters(getattr(module, each))
        for each in classes:
            kind = getattr(module, each, None)
            for method, value in vars(kind).items() if kind is not None else ():
                if inspect.isfunction(value) and (method == "__init__" or not method.startswith("__")):
                    found[f"{each}.{method}"] = parameters(value)
    return found
"""


@pytest.fixture(scope="module")
def torchs(torch_programs):
    program = DESCRIBE + "print(json.dumps(describe(*json.loads(sys.argv[1]))))"
    wanted = json.dumps([list(MODULES), CLASSES, FUNCTIONS])
    return json.loads(torch_programs.checked(program, wanted).splitlines()[-1])


def ours(qualified):
    owner, _, method = qualified.rpartition(".")
    for name in MODULES.values():
        module = importlib.import_module(name)
        found = getattr(module, owner or method, None)
        if found is not None:
            found = getattr(found, method) if owner else found
            return {p.name: p for p in inspect.signature(found).parameters.values()}
    raise AssertionError(f"{qualified} is not there")


def test_every_argument_of_torchs_is_there_with_its_default(torchs):
    assert len(torchs) > 60
    for qualified, expected in torchs.items():
        if qualified.rpartition(".")[2] in HOOKS_OF_OTHERS:
            continue
        found = ours(qualified)
        assert list(found)[: len(expected)] == [name for name, _, _ in expected], qualified
        for name, kind, default in expected:
            wanted = DIFFERENT.get(qualified, {}).get(name, default)
            assert (found[name].kind.name, repr(found[name].default)) == (kind, wanted), (qualified, name)
        more = {name for name, parameter in found.items() if parameter.default is not inspect.Parameter.empty}
        assert more - {name for name, _, _ in expected} <= MORE.get(qualified, set()), qualified


def test_a_launch_configuration_has_torchs_fields_in_order(torchs):
    from elasticrs.launcher import LaunchConfig

    names = [field.name for field in dataclasses.fields(LaunchConfig)]
    theirs = [name for name, _, _ in torchs["LaunchConfig.__init__"]][1:]
    assert names[: len(theirs) + 1] == [*theirs, "exit_barrier_timeout"]
    assert set(names[len(theirs) + 1 :]) == SETTINGS
