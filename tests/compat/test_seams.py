"""Private names of torch's modules that programs import, call or replace."""

import contextlib
import io
import multiprocessing
import os
import signal
import threading
from unittest.mock import MagicMock, Mock, patch

import pytest

from elasticrs import events, run
from elasticrs.agent.server import LocalElasticAgent, RunResult, WorkerSpec, WorkerState, local_elastic_agent
from elasticrs.events import EventSource, handlers
from elasticrs.launcher import LaunchConfig, elastic_launch
from elasticrs.multiprocessing import DefaultLogsSpecs, PContext, SignalException, Std, api
from elasticrs.multiprocessing.errors import ChildFailedError
from elasticrs.rendezvous import RendezvousInfo, RendezvousParameters, registry
from elasticrs.rendezvous.registry import get_rendezvous_handler


@pytest.fixture(autouse=True)
def signals(monkeypatch):
    """Set the variable and restore it afterwards, because each launch writes the names of the handled signals
    to it.
    """
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")


# --- names -----------------------------------------------------------------------------------------------


def test_private_names_of_torch_packages_are_available():
    import elasticrs.rendezvous as package

    assert package._register_out_of_tree_handlers is registry._register_out_of_tree_handlers
    assert api.IS_WINDOWS is False


def greet(name):
    print(f"hello {name}", flush=True)
    return f"{name} {os.environ['RANK']}"


def test_wrap_runs_a_function_as_a_worker(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    queue, is_read, out = multiprocessing.SimpleQueue(), threading.Event(), tmp_path / "out"
    is_read.set()
    own = {"args": {1: ("you",)}, "envs": {1: {"RANK": "7"}}, "ret_vals": {1: queue}}
    files = {"stdout_redirects": {1: str(out)}, "stderr_redirects": {1: ""}}
    try:
        api._wrap(1, greet, **own, **files, queue_finished_reading_event=is_read, numa_options=None)
        assert queue.get() == "you 7"
    finally:
        queue.close()
        monkeypatch.delenv("RANK", raising=False)
    assert out.read_text() == "hello you\n"


def test_a_mock_of_pcontext_can_be_started():
    context = MagicMock(spec=PContext)
    context._tail_logs = [MagicMock()]
    with patch.object(api, "caught_signals"):
        PContext.start(context)
    context._start.assert_called_once()
    context._tail_logs[0].start.assert_called_once()


def test_a_start_outside_the_main_thread_logs_the_warning_of_torch(caplog):
    # A test of torch compares this text.
    context = MagicMock(spec=PContext)
    context._tail_logs = []
    thread = threading.Thread(target=PContext.start, args=[context])
    thread.start()
    thread.join()
    context._start.assert_called_once()
    assert caplog.messages == [
        "Failed to register signal handlers since torchelastic is running on a child thread. "
        "This could lead to orphaned worker processes if the torchrun is terminated."
    ]


def test_an_agent_can_be_created_from_a_mock_worker_spec(tmp_path):
    # Torch's tests of the agent's settings create agents in this way.
    spec = Mock(spec=WorkerSpec, max_restarts=3, local_world_size=1, rdzv_handler=Mock())
    made = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), shutdown_timeout=240)
    assert made._shutdown_timeout == 240


def test_a_mock_rendezvous_info_has_the_fields_of_torchs_class():
    info = Mock(spec=RendezvousInfo)
    assert all(map(info.__getattr__, ("store", "rank", "world_size", "bootstrap_store_info")))


# --- start_processes -------------------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path):
    handlers = []

    def make(script, restarts=0, nproc=2):
        handlers.append(get_rendezvous_handler(RendezvousParameters("c10d", "", "job", 1, 1)))
        spec = WorkerSpec(
            *("trainer", nproc, handlers[-1]),
            entrypoint="/bin/sh",
            args=("-c", script),
            max_restarts=restarts,
            monitor_interval=0.01,
        )
        return LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT))

    yield make
    for handler in handlers:
        handler.shutdown()


@pytest.fixture
def wrapped(monkeypatch):
    """Wrap ``start_processes`` so that it adds a variable to all workers. Return the arguments of
    each call.
    """
    calls, own = [], local_elastic_agent.start_processes

    def start(**how):
        calls.append(how)
        how["envs"] = {rank: {**env, "MINE": "yes"} for rank, env in how["envs"].items()}
        return own(**how)

    monkeypatch.setattr(local_elastic_agent, "start_processes", start)
    return calls


def test_a_wrapped_start_processes_starts_the_workers(agent, wrapped):
    result = agent('test "$MINE $RANK $WORLD_SIZE" = "yes $LOCAL_RANK 2"').run()
    assert result.state is WorkerState.SUCCEEDED
    (how,) = wrapped
    assert (how["name"], how["entrypoint"], how["args"][1][0]) == ("trainer", "/bin/sh", "-c")
    assert {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= how["envs"][0].keys()


def test_failures_and_restarts_work_with_a_wrapped_start_processes(agent, wrapped):
    made = agent("exit $((RANK + TORCHELASTIC_RESTART_COUNT))", restarts=1)
    result = made.run()
    assert len(wrapped) == 2
    assert result.state is WorkerState.FAILED
    assert made._remaining_restarts == 0
    # Only the first failure is certain, because the agent may stop the other worker before it exits.
    assert {0: 1, 1: 2}.items() & {rank: found.exitcode for rank, found in result.failures.items()}.items()


def test_a_signal_stops_the_workers_of_a_wrapped_start_processes(agent, wrapped, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # In arguments, `$$` stands for one dollar sign.
    made = agent(f"echo $$$$ > {fifo}; exec sleep 1000", nproc=1)
    pids = []

    def interrupt():
        pids.append(int(fifo.read_text()))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException) as raised:
        made.run()
    thread.join()
    assert raised.value.sigval == signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_context_from_a_replaced_start_processes_is_closed_once(agent, monkeypatch):
    context = Mock()
    context.pids.return_value = {0: 0}
    monkeypatch.setattr(local_elastic_agent, "start_processes", Mock(return_value=context))
    made = agent("true", nproc=1)
    with patch.object(made, "_monitor_workers", return_value=RunResult(WorkerState.SUCCEEDED, {0: 0})):
        made.run()
    context.close.assert_called_once()


# --- the launcher ----------------------------------------------------------------------------------------


def config(tmp_path, **how):
    specs = DefaultLogsSpecs(str(tmp_path / "logs"))
    return LaunchConfig(1, 1, 1, rdzv_backend="c10d", run_id="job", max_restarts=0, logs_specs=specs, **how)


def test_the_signals_to_handle_stay_in_the_environment(tmp_path):
    elastic_launch(config(tmp_path, signals_to_handle="SIGTERM,SIGUSR1"), "true")()
    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"


def recorded(record):
    (call,) = record.call_args_list
    event = call.args[0]
    assert event.source is EventSource.AGENT
    return event.metadata["state"], event.metadata["raw_error"]


def test_the_launcher_records_agent_success_even_if_the_job_fails(tmp_path):
    with patch.object(events, "record") as record:
        elastic_launch(config(tmp_path), "true")()
    assert recorded(record) == ("SUCCEEDED", None)
    # As in torch, the event says that the agent succeeded, because the agent itself finished normally.
    with patch.object(events, "record") as record, pytest.raises(ChildFailedError):
        elastic_launch(config(tmp_path), "false")()
    assert recorded(record) == ("SUCCEEDED", None)


def test_the_launcher_records_an_exception_of_the_agent(tmp_path):
    with (
        patch.object(events, "record") as record,
        patch.object(LocalElasticAgent, "run", side_effect=KeyError("mine")),
        pytest.raises(KeyError, match="mine"),
    ):
        elastic_launch(config(tmp_path), "true")()
    state, error = recorded(record)
    assert state == "FAILED"
    assert "KeyError: 'mine'" in error


def test_the_success_of_the_agent_is_recorded_once(tmp_path, monkeypatch):
    destination = f"file:{tmp_path}/events"
    monkeypatch.setattr(handlers, "_log_handlers", dict(handlers._log_handlers))
    monkeypatch.setattr(events, "_events_loggers", {})
    elastic_launch(config(tmp_path, event_log_handler=destination), "true")()
    handlers._log_handlers[destination].close()
    told = [events.Event.deserialize(line) for line in (tmp_path / "events").read_text().splitlines()]
    ends = [event.source for event in told if event.metadata["state"] == "SUCCEEDED"]
    assert ends == [EventSource.WORKER, EventSource.AGENT]
    assert told[-1].metadata["group_rank"] == 0


# --- standard output -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_tee_writes_to_a_replaced_sys_stdout_and_stderr(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    options = [
        "--nproc-per-node=2",
        "--tee=3",
        f"--log-dir={tmp_path}",
        "--log-line-prefix-template=<${rank}>",
    ]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run.main([*options, "--no-python", "sh", "-c", "echo out; echo err >&2"])
    assert sorted(out.getvalue().splitlines()) == ["<0>out", "<1>out"]
    assert {"<0>err", "<1>err"} <= set(err.getvalue().splitlines())
