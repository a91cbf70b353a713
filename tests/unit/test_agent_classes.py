"""Torch's agent classes, and the launch configuration."""

import json
import os
import signal
import sys
import time

import pytest

from elasticrs import events as job_events
from elasticrs.agent.server import (
    LocalElasticAgent,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    api,
)
from elasticrs.agent.server.api import _RoleInstanceInfo
from elasticrs.agent.server.health_check_server import HealthCheckServer
from elasticrs.agent.server.local_elastic_agent import _AliveCallbackProxy, why_hooks_decide
from elasticrs.agent.server.simple_elastic_agent import Progress
from elasticrs.launcher import LaunchConfig, elastic_launch
from elasticrs.launcher.api import _get_entrypoint_name
from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException
from elasticrs.rendezvous import RendezvousHandler, RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler


def entrypoint():
    """Placeholder for the workers' entry point."""


@pytest.fixture
def handler():
    made = get_rendezvous_handler(RendezvousParameters("c10d", "", "job", 1, 1))
    yield made
    made.shutdown()


def spec(handler, **changes):
    values = {"local_world_size": 2, "entrypoint": entrypoint, "monitor_interval": 1e-6, "max_restarts": 1}
    return WorkerSpec("trainer", rdzv_handler=handler, **{**values, **changes})


@pytest.mark.parametrize("changes", [{"local_world_size": 0}, {"monitor_interval": 0}, {"entrypoint": None}])
def test_a_worker_spec_with_invalid_values_is_refused(handler, changes):
    with pytest.raises(AssertionError):
        spec(handler, **changes)


def test_the_deprecated_fn_argument_still_sets_the_entrypoint(handler):
    with pytest.warns(DeprecationWarning, match="use entrypoint"):
        old = spec(handler, entrypoint=None, fn=entrypoint)
    assert old.entrypoint is entrypoint
    assert old.get_entrypoint_name() == "entrypoint"
    assert spec(handler, entrypoint="/bin/echo").get_entrypoint_name() == "echo"


def test_workers_of_a_new_worker_group_have_no_ranks(handler):
    group = WorkerGroup(spec(handler))
    assert group.state is WorkerState.INIT
    assert str(group.workers[1]) == (
        "local_rank=1,global_rank=-1,role_rank=-1,world_size=-1,role_world_size=-1"
    )
    assert str(Worker(0, 1)) == repr(Worker(0, 1))


def test_only_healthy_and_unhealthy_states_count_as_running():
    running = {state for state in WorkerState if WorkerState.is_running(state)}
    assert running == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}
    assert not RunResult(WorkerState.UNHEALTHY).is_failed()
    assert RunResult(WorkerState.FAILED).is_failed()


class Scripted(SimpleElasticAgent):
    """An agent that reports the worker states that the test has set."""

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


def test_hooks_of_a_subclass_run_in_the_same_order_as_in_torch(handler):
    agent = Scripted(spec(handler), [WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.SUCCEEDED])
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.calls == [("start", [0, 1]), "stop", ("start", [0, 1]), "shutdown"]
    group = agent.get_worker_group()
    assert [worker.id for worker in group.workers] == ["id0", "id1"]
    assert group.master_port == handler.store_port.number
    # As in torch, a subclass may use the store, even with a single node.
    agent._store.set("key", "value")
    assert group.store.get("key") == b"value"


def test_an_agent_subclass_fails_when_its_restarts_are_used_up(handler):
    agent = Scripted(spec(handler), [WorkerState.FAILED, WorkerState.UNHEALTHY])
    # torch does not treat an unhealthy end as a failure.
    assert agent.run().is_failed()
    assert agent.calls[-2:] == ["stop", "shutdown"]


def test_an_agent_hook_is_overdue_after_its_own_time_limit(handler):
    clock, seen = [0.0], {}

    class Slow(Scripted):
        """An agent whose hooks take 1,000 s each, on the agent's own clock."""

        def __init__(self, *args):
            super().__init__(*args)
            self._progress = Progress(lambda: clock[0])

        def take_long(self, name):
            clock[0] += 1000
            seen.setdefault(name, round(time.time() - self._get_alive_time(), -1))

        def _rendezvous(self, group):
            self.take_long("rendezvous")
            super()._rendezvous(group)

        def _start_workers(self, group):
            self.take_long("start")
            return super()._start_workers(group)

        def _stop_workers(self, group):
            self.take_long("stop")
            super()._stop_workers(group)

        def _monitor_workers(self, group):
            self.take_long("monitor")
            self._tell_progress(5000)
            self.take_long("monitor, told")
            return super()._monitor_workers(group)

        def _restart_workers(self, group):
            self.take_long("restart")
            super()._restart_workers(group)

        def _exit_barrier(self):
            self.take_long("barrier")
            return super()._exit_barrier()

        def _pause(self, _seconds):
            self.take_long("pause")

        def _shutdown(self, *_):
            self.take_long("shutdown")

    agent = Slow(spec(handler, monitor_interval=60), [WorkerState.FAILED, WorkerState.SUCCEEDED])
    assert agent.run().state is WorkerState.SUCCEEDED
    # Seconds by which each hook exceeds its allowed time, if it takes 1,000 s.
    assert seen == {
        "rendezvous": 0,
        "start": 400,
        "pause": 940,
        "monitor": 1000,
        "monitor, told": 0,
        "restart": 0,
        "stop": 970,
        "barrier": 700,
        "shutdown": 970,
    }
    clock[0] += 1e6
    assert time.time() - agent._get_alive_time() < 1e5


def test_an_unknown_worker_state_raises_an_error(handler):
    agent = Scripted(spec(handler), [WorkerState.UNKNOWN])
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        agent.run()
    assert agent.calls[-1] == "shutdown"


def test_a_health_check_server_can_be_created_before_its_agent(tmp_path):
    alive = _AliveCallbackProxy()
    before = time.time()
    assert alive() >= before
    config = LaunchConfig(1, 1, 1, logs_specs=DefaultLogsSpecs(str(tmp_path)), rdzv_backend="c10d")
    elastic_launch(config, "true", HealthCheckServer(alive, 0, 60))()
    assert alive._delegate.__name__ == "_get_alive_time"
    alive.set_delegate(lambda: 17)
    assert alive() == 17


def test_an_unknown_start_method_is_refused(handler, tmp_path):
    with pytest.raises(ValueError, match=r"got 'thread'.*spawn, fork, forkserver"):
        LocalElasticAgent(spec(handler), DefaultLogsSpecs(str(tmp_path)), start_method="thread")


@pytest.fixture
def config(tmp_path):
    return lambda **changes: LaunchConfig(1, 1, 1, logs_specs=DefaultLogsSpecs(str(tmp_path)), **changes)


def test_launch_config_defaults_match_torch(config, monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.delenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", raising=False)
    made = config()
    assert (made.role, made.rdzv_backend, made.max_restarts) == ("default_role", "etcd", 3)
    assert (made.shutdown_timeout, made.exit_barrier_timeout) == (30, 300)
    assert made.rdzv_configs == {"timeout": 900}
    assert config(rdzv_timeout=5).rdzv_configs == {"timeout": 5}
    assert config(rdzv_configs={"timeout": 7}).rdzv_configs == {"timeout": 7}


def test_timeout_defaults_come_from_environment_variables(config, monkeypatch):
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
        ({"shutdown_timeout": -1}, "^shutdown_timeout "),
        ({"exit_barrier_timeout": -1}, "^exit_barrier_timeout "),
        ({"rdzv_configs": {"exit_barrier_timeout": "x"}}, "^rdzv_configs: exit_barrier_timeout: got 'x'"),
        ({"stop_scope": "all"}, r"stop_scope .*got 'all'"),
        ({"signals_to_forward": "STOP"}, r"signals_to_forward must be names .*not SIGSTOP.*, got 'STOP'"),
    ],
)
def test_invalid_settings_of_a_launch_config_are_refused(config, changes, text):
    with pytest.raises(ValueError, match=text):
        config(**changes)


def test_the_entrypoint_name_is_the_script_or_function_name():
    assert _get_entrypoint_name(entrypoint, []) == "entrypoint"
    assert _get_entrypoint_name(sys.executable, ["-u", "train.py", "-x"]) == "train.py"
    assert _get_entrypoint_name("/bin/echo", ["x"]) == "/bin/echo"
    assert _get_entrypoint_name(None, []) == ""


class Older(Scripted):
    """An agent as users had to write it for torch 2.5 and 2.6."""

    def _stop_workers(self, _worker_group, is_restart=False):
        self.calls.append(("stop", is_restart))
        self._shutdown(is_restart=is_restart)

    def _shutdown(self, death_sig=signal.SIGTERM, is_restart=False):
        self.calls.append(("shutdown", death_sig, is_restart))


class Forwarding(Scripted):
    """An agent whose hooks accept any arguments."""

    def _stop_workers(self, *args, **kwargs):
        self.calls.append(("stop", len(args), kwargs))

    def _shutdown(self, *args, **kwargs):
        self.calls.append(("shutdown", args, kwargs))


class Interrupted(Scripted):
    """An agent that gets a signal while its workers run, and possibly another one while they are
    shut down.
    """

    def _monitor_workers(self, _worker_group):
        raise SignalException("stopped", signal.SIGINT)

    def _shutdown(self, death_sig=signal.SIGTERM, timeout=30):
        self.calls.append((death_sig, timeout))
        if next(self.states) == "again":
            raise SignalException("stopped again", signal.SIGTERM)


def test_hooks_get_only_the_arguments_that_they_accept(handler):
    older = Older(spec(handler), [WorkerState.FAILED, WorkerState.FAILED])
    assert older.run().is_failed()
    term = signal.SIGTERM
    assert older.calls[1:3] == [("stop", True), ("shutdown", term, True)]
    assert older.calls[-3:] == [("stop", False), ("shutdown", term, False), ("shutdown", term, False)]
    # Hooks that accept any arguments get those of torch.
    forwarding = Forwarding(spec(handler), [WorkerState.FAILED, WorkerState.SUCCEEDED])
    forwarding.run()
    assert forwarding.calls[1] == ("stop", 1, {})
    assert forwarding.calls[-1] == ("shutdown", (), {"timeout": 30})


@pytest.mark.parametrize(
    ("states", "text", "calls"),
    [
        (["ended"], r"stopped$", [(signal.SIGINT, 30)]),
        (["again", "ended"], "stopped again", [(signal.SIGINT, 30), (signal.SIGKILL, 0)]),
    ],
)
def test_a_signal_calls_the_shutdown_hook_once_and_a_second_one_kills(handler, states, text, calls):
    agent = Interrupted(spec(handler), states)
    with pytest.raises(SignalException, match=text):
        agent.run()
    assert agent.calls[1:] == calls


def test_role_instance_info_serializes_and_compares_as_in_torch():
    info = _RoleInstanceInfo("trainer", 1, 4)
    again = _RoleInstanceInfo.deserialize(info.serialize())
    assert (again.role, again.rank, again.local_world_size) == ("trainer", 1, 4)
    other, reader = _RoleInstanceInfo("trainer", 3, 4), _RoleInstanceInfo("reader", 0, 1)
    assert [_RoleInstanceInfo.compare(*pair) for pair in ((info, other), (info, reader), (reader, info))] == [
        -2,
        1,
        -1,
    ]
    assert _RoleInstanceInfo.find_role_boundaries([reader, info, other], "trainer") == (1, 2)
    assert _RoleInstanceInfo.find_role_boundaries([reader], "trainer") == (-1, -1)


@pytest.fixture
def recorded(monkeypatch):
    """Record the agent's events and metrics at the functions that torch's own tests patch."""
    events, numbers = [], {}
    monkeypatch.setattr(api, "record", lambda event, destination: events.append((event, destination)))
    monkeypatch.setattr(api, "put_metric", lambda name, value: numbers.setdefault(name, []).append(value))
    return events, numbers


def test_agent_events_and_metrics_match_torch(handler, recorded):
    events, numbers = recorded
    made = spec(handler, event_log_handler="console")
    Scripted(made, [WorkerState.FAILED, WorkerState.SUCCEEDED]).run()
    begin = ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START"]
    assert [event.metadata["state"] for event, _ in events] == [*begin, *begin, "SUCCEEDED", "SUCCEEDED"]
    assert {destination for _, destination in events} == {"console"}
    last = events[-1][0]
    assert (last.name, last.source.value) == ("torchelastic.worker.status.SUCCEEDED", "WORKER")
    assert (last.metadata["global_rank"], last.metadata["agent_restarts"]) == (1, 1)
    assert json.loads(last.metadata["metadata"]) == {
        "group_world_size": 1, "entry_point": "entrypoint", "local_rank": [1], "role_rank": [1],
        "role_world_size": [2], "exit_code": [None], "worker_pid": [None],
    }  # fmt: skip
    assert numbers == {
        "workers.trainer.remaining_restarts": [1, 0],
        "workers.trainer.failed": [1],
        "workers.trainer.succeeded": [1],
        "workers.trainer.flakiness": [50],
        "workers.trainer.run_total": [1],
        "workers.trainer.run_success_with_retries": [1],
        "workers.trainer.run_success_no_retries": [0],
        "workers.trainer.run_failed_with_retries": [0],
        "workers.trainer.run_failed_no_retries": [0],
    }


@pytest.mark.parametrize("destination", ["null", "console"])
def test_the_host_name_is_resolved_only_if_events_are_recorded(handler, recorded, monkeypatch, destination):
    asked = []
    monkeypatch.setattr(job_events, "fq_hostname", lambda: asked.append(1) or "by.the.resolver")
    agent = Scripted(spec(handler, event_log_handler=destination), [WorkerState.SUCCEEDED])
    agent.run()
    name = agent.get_event_succeeded().metadata["hostname"]
    assert (bool(asked), name) == {
        "null": (False, os.uname().nodename), "console": (True, "by.the.resolver")
    }[destination]  # fmt: skip


def test_workers_stopped_because_of_a_failure_are_recorded_as_terminated(handler, recorded):
    events, numbers = recorded
    Scripted(spec(handler, max_restarts=0), [WorkerState.FAILED]).run()
    assert [event.metadata["state"] for event, _ in events[-2:]] == ["TERMINATED"] * 2
    assert numbers["workers.trainer.flakiness"] == [100]


def test_a_run_result_without_a_value_for_each_worker_raises_an_error(handler):
    agent = Scripted(spec(handler), [])
    result = RunResult(WorkerState.SUCCEEDED, {0: "value"})
    agent._initialize_workers(agent.get_worker_group())
    with pytest.raises(ValueError, match="Unknown worker: 1"):
        agent._record_worker_events(result)


class Delegating(RendezvousHandler):
    """A user-defined handler. Its answers do not matter here."""

    get_backend = next_rendezvous = is_closed = set_closed = num_nodes_waiting = lambda _self: None
    get_run_id = shutdown = lambda _self: "job"


class Metered(LocalElasticAgent):
    """An agent that overrides only a hook for metrics."""

    def _record_metrics(self, group_results):
        """Record no metrics."""


def test_only_an_overridden_hook_selects_the_polling_loop(handler, tmp_path):
    def waits(kind, its_handler):
        return why_hooks_decide(kind(spec(its_handler), DefaultLogsSpecs(str(tmp_path)))) is None

    assert waits(LocalElasticAgent, handler)
    assert waits(LocalElasticAgent, Delegating())
    assert not waits(Metered, handler)
    assert waits(type("Renamed", (LocalElasticAgent,), {}), handler)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        (
            {
                "restart_delay": "1s",
                "max_restarts": "3/1h",
                "fatal_exit_codes": "3",
                "max_same_failures": 0,
                "exit_codes": "verdict",
                "keep": True,
            },
            [
                *("restart_delay", "max_same_failures", "fatal_exit_codes", "exit_codes", "keep"),
                "the duration in max_restarts",
            ],
        ),
    ],
)
def test_the_polling_loop_reports_the_policy_settings_that_it_ignores(
    handler, tmp_path, caplog, changes, named
):
    wanted = spec(handler, entrypoint="/bin/true", local_world_size=1, **changes)
    with caplog.at_level("WARNING", "elasticrs"):
        Metered(wanted, DefaultLogsSpecs(str(tmp_path))).run()
    why = "has no effect, because _record_metrics was replaced"
    assert caplog.messages == [f"{name} {why}" for name in named]


def test_the_health_check_server_calls_an_overridden_get_alive_time(handler, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "0")

    class Stalled(LocalElasticAgent):
        def _get_alive_time(self):
            return 17

    agent = Stalled(spec(handler), DefaultLogsSpecs(str(tmp_path)))
    agent._setup_healthcheck()
    server = agent._health_check_server
    try:
        assert server.alive_callback() == 17
        assert server.port > 0
    finally:
        server.stop()


def test_an_overridden_setup_healthcheck_replaces_the_built_in_server(handler, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "0")
    asked = []

    class Own(LocalElasticAgent):
        def _setup_healthcheck(self):
            asked.append(self._get_fq_hostname())

    agent = Own(spec(handler, entrypoint="/bin/true"), DefaultLogsSpecs(str(tmp_path)))
    assert agent.run().state is WorkerState.SUCCEEDED
    assert len(asked) == 1
    assert asked[0]
    assert agent._health_check_server is None


@pytest.mark.parametrize(
    ("program", "asked", "found"),
    [
        (entrypoint, None, "worker"),
        (sys.executable, None, "worker"),
        ("python3", None, "worker"),
        ("/usr/bin/python3.13t", None, "worker"),
        ("/bin/sh", None, "group"),
        ("python3-config", None, "group"),
        ("numactl", None, "group"),
        ("python3", "group", "group"),
        ("/bin/sh", "worker", "worker"),
        (entrypoint, "group", "group"),
    ],
)
def test_the_default_stop_scope_is_worker_for_python_and_group_otherwise(
    handler, tmp_path, program, asked, found
):
    how = spec(handler, entrypoint=program, stop_scope=asked)
    agent = LocalElasticAgent(how, DefaultLogsSpecs(str(tmp_path)))
    assert agent._job().stop_scope == found


def test_signals_that_stop_the_job_cannot_be_forwarded(handler, tmp_path):
    how = spec(handler, signals_to_forward="USR1,TERM")
    with pytest.raises(ValueError, match=r"signals_to_forward: got 'USR1,TERM', .*not SIGTERM"):
        LocalElasticAgent(how, DefaultLogsSpecs(str(tmp_path)))


def test_a_signal_that_the_program_handles_itself_is_not_forwarded(handler, tmp_path):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        agent = LocalElasticAgent(spec(handler), DefaultLogsSpecs(str(tmp_path)))
        assert agent._job().forwarded == (signal.SIGUSR2,)
    finally:
        signal.signal(signal.SIGUSR1, before)
