"""Torch's agent classes, and the configuration of a launch."""

import pytest

from elasticrs.agent.server import (
    LocalElasticAgent,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticrs.launcher import LaunchConfig
from elasticrs.launcher.api import _get_entrypoint_name
from elasticrs.multiprocessing import DefaultLogsSpecs
from elasticrs.rendezvous import RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler


def entrypoint():
    """What workers would run."""


@pytest.fixture
def handler():
    made = get_rendezvous_handler(RendezvousParameters("c10d", "", "job", 1, 1))
    yield made
    made.shutdown()


def spec(handler, **changes):
    values = {"local_world_size": 2, "entrypoint": entrypoint, "monitor_interval": 1e-6, "max_restarts": 1}
    return WorkerSpec("trainer", rdzv_handler=handler, **{**values, **changes})


@pytest.mark.parametrize("changes", [{"local_world_size": 0}, {"monitor_interval": 0}, {"entrypoint": None}])
def test_a_spec_that_makes_no_sense_is_refused(handler, changes):
    with pytest.raises(AssertionError):
        spec(handler, **changes)


def test_the_old_name_of_the_entrypoint_still_works(handler):
    with pytest.warns(DeprecationWarning, match="use entrypoint"):
        old = spec(handler, entrypoint=None, fn=entrypoint)
    assert old.entrypoint is entrypoint
    assert old.get_entrypoint_name() == "entrypoint"
    assert spec(handler, entrypoint="/bin/echo").get_entrypoint_name() == "echo"


def test_a_group_starts_without_ranks(handler):
    group = WorkerGroup(spec(handler))
    assert group.state is WorkerState.INIT
    assert str(group.workers[1]) == (
        "local_rank=1,global_rank=-1,role_rank=-1,world_size=-1,role_world_size=-1"
    )
    assert str(Worker(0, 1)) == repr(Worker(0, 1))


def test_states_say_whether_processes_are_there():
    running = {state for state in WorkerState if WorkerState.is_running(state)}
    assert running == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}
    assert not RunResult(WorkerState.UNHEALTHY).is_failed()
    assert RunResult(WorkerState.FAILED).is_failed()


class Scripted(SimpleElasticAgent):
    """Says of its workers what it was told to say."""

    def __init__(self, spec, states):
        super().__init__(spec)
        self.states = iter(states)
        self.calls = []

    def _start_workers(self, worker_group):
        self.calls.append(("start", [worker.global_rank for worker in worker_group.workers]))
        return {worker.local_rank: f"id{worker.local_rank}" for worker in worker_group.workers}

    def _stop_workers(self, _worker_group):
        self.calls.append("stop")

    def _monitor_workers(self, _worker_group):
        return RunResult(next(self.states))

    def _shutdown(self, *_):
        self.calls.append("shutdown")


def test_the_hooks_of_a_subclass_run_in_torchs_order(handler):
    agent = Scripted(spec(handler), [WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.SUCCEEDED])
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.calls == [("start", [0, 1]), "stop", ("start", [0, 1]), "shutdown"]
    group = agent.get_worker_group()
    assert [worker.id for worker in group.workers] == ["id0", "id1"]
    assert group.master_port == handler.agent_store.port


def test_a_subclass_fails_when_its_restarts_are_used_up(handler):
    agent = Scripted(spec(handler), [WorkerState.FAILED, WorkerState.UNHEALTHY])
    assert agent.run().is_failed()
    assert agent.calls[-2:] == ["stop", "shutdown"]


def test_a_state_without_meaning_is_an_error(handler):
    agent = Scripted(spec(handler), [WorkerState.UNKNOWN])
    with pytest.raises(RuntimeError, match="is in state UNKNOWN"):
        agent.run()
    assert agent.calls[-1] == "shutdown"


def test_functions_need_spawn(handler, tmp_path):
    with pytest.raises(ValueError, match="'fork' is not supported by this release"):
        LocalElasticAgent(spec(handler), DefaultLogsSpecs(str(tmp_path)), start_method="fork")


@pytest.fixture
def config(tmp_path):
    return lambda **changes: LaunchConfig(1, 1, 1, logs_specs=DefaultLogsSpecs(str(tmp_path)), **changes)


def test_a_launch_config_has_torchs_defaults(config, monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.delenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", raising=False)
    made = config()
    assert (made.role, made.rdzv_backend, made.max_restarts) == ("default_role", "etcd", 3)
    assert (made.shutdown_timeout, made.exit_barrier_timeout) == (30, 300)
    assert made.rdzv_configs == {"timeout": 900}
    assert config(rdzv_timeout=5).rdzv_configs == {"timeout": 5}
    assert config(rdzv_configs={"timeout": 7}).rdzv_configs == {"timeout": 7}


def test_times_come_from_the_environment(config, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "4")
    monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "9")
    assert (config().shutdown_timeout, config().exit_barrier_timeout) == (4, 9)
    assert config(shutdown_timeout=1).shutdown_timeout == 1
    configured = {"exit_barrier_timeout": "2.5"}
    assert config(rdzv_configs=configured).exit_barrier_timeout == 2.5
    assert config(rdzv_configs=configured, exit_barrier_timeout=1).exit_barrier_timeout == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shutdown_timeout": -1}, "shutdown_timeout must be non-negative"),
        ({"exit_barrier_timeout": -1}, "exit_barrier_timeout must be non-negative"),
        ({"rdzv_configs": {"exit_barrier_timeout": "x"}}, "^rdzv_configs: exit_barrier_timeout: got 'x'"),
    ],
)
def test_what_makes_no_sense_is_refused(config, changes, text):
    with pytest.raises(ValueError, match=text):
        config(**changes)


def test_the_name_of_a_job_is_its_script_or_function():
    import sys

    assert _get_entrypoint_name(entrypoint, []) == "entrypoint"
    assert _get_entrypoint_name(sys.executable, ["-u", "train.py", "-x"]) == "train.py"
    assert _get_entrypoint_name("/bin/echo", ["x"]) == "/bin/echo"
    assert _get_entrypoint_name(None, []) == ""
