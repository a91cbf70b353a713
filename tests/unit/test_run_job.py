"""`run_job` runs a job from its `JobSpec` alone: programs, scripts, logs, restarts, rendezvous handlers."""

import gc
import itertools
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from helpers.procs import HANG

from elasticrs._engine.job.config import JobSpec, LogSettings, UsageError
from elasticrs._engine.job.restart_policy import Verdict
from elasticrs._engine.process.signals import SignalPipe
from elasticrs._engine.supervise.decide import decisions, handler_nodes
from elasticrs._engine.supervise.decide.decisions import plan_one_node
from elasticrs._engine.supervise.decide.handler_nodes import exchange_ranks, wait_for_others
from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
from elasticrs._engine.supervise.run_job import make_decisions, run_job
from elasticrs._engine.supervise.state_machine import Phase
from elasticrs._engine.workers.plan import NodeShare, node_ranks
from elasticrs.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStoreInfo,
)

FAILS_ONCE = "exit $((1 - TORCHELASTIC_RESTART_COUNT))"
SAYS_AND_FAILS_ONCE = f"echo $TORCHELASTIC_RESTART_COUNT; {FAILS_ONCE}"


class Console:
    """A console that keeps the printed lines for the test."""

    group_rank = None

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def write(self, text, *_args, **_named):
        self.lines.append(text)
        return True

    def flush(self, _seconds):
        return True


@pytest.fixture
def run(tmp_path):
    def run(nproc, *command, signals=None, server=None, ended=None, **more):
        console, agents = Console(), []
        logs = LogSettings(log_dir=str(tmp_path), redirects=3)
        job = JobSpec(nproc, "job", command=command, logs=logs, **more)
        decisions = make_decisions(job, console)
        try:
            result = run_job(
                *(job, console, signals),
                owns_process=False,
                created=agents.append,
                decisions=decisions,
                server=server,
            )
            if ended is not None:
                ended(console.lines)
        finally:
            decisions.leave(signals)
        assert [agent.result for agent in agents] == [result]
        outputs = sorted(path.read_text() for path in tmp_path.rglob("stdout.log"))
        return result, outputs, console.lines

    return run


def test_a_program_gets_the_variables_and_the_log_files_of_the_job(run):
    script = 'echo "$RANK of $WORLD_SIZE: $WORD ${local_rank}"'
    result, outputs, lines = run(2, "sh", "-c", script, variables={"WORD": "w"}, notices=["n"])
    assert (result.exit_code, len(result.attempts)) == (0, 1)
    assert outputs == ["0 of 2: w 0\n", "1 of 2: w 1\n"]
    assert lines[0] == "n"


def test_a_failed_program_is_restarted_and_then_succeeds(run):
    result, outputs, _ = run(1, "sh", "-c", SAYS_AND_FAILS_ONCE, max_restarts=1)
    assert (result.exit_code, result.restarts) == (0, 1)
    assert outputs == ["0\n", "1\n"]


def test_a_script_runs_in_function_workers(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, *sys.argv[1:])")
    result, outputs, _ = run(1, str(script), "a", run_path=True)
    assert result.return_values == {0: None}
    assert outputs == ["__main__ a\n"]


def test_a_log_folder_that_cannot_be_made_ends_the_job_before_it_starts(tmp_path):
    file = tmp_path / "file"
    file.touch()
    job = JobSpec(1, "job", command=["true"], logs=LogSettings(log_dir=str(file)))
    started = []
    with pytest.raises(UsageError, match="log-dir"):
        run_job(job, Console(), None, owns_process=False, created=started.append)
    assert started == []


# --- with a rendezvous handler of the program's own ---


class Store:
    """A fake of torch's store. No call blocks, because the tests call it in an order in which no call
    has to wait.
    """

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def multi_get(self, keys):
        return [self.values[key] for key in keys]

    def multi_set(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key, amount):
        self.set(key, str(int(self.values.get(key, b"0")) + amount))
        return int(self.values[key])

    def check(self, keys):
        return all(key in self.values for key in keys)


class Handler:
    """A handler whose answers the test has chosen. An exception among them is raised."""

    use_agent_store = False

    def __init__(self, rounds=(1,) * 9, waiting=()):
        self.rounds, self.waiting = list(rounds), list(waiting)
        self.calls, self.running = [], 0

    def _answer(self, name, answers, default=0):
        self.running += 1
        assert self.running == 1, "HANDLER-1"
        if name != "num_nodes_waiting":
            self.calls.append(name)
        answer = answers.pop(0) if answers else default
        self.running -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def next_rendezvous(self):
        nodes = self._answer("next_rendezvous", self.rounds)
        store = Store()
        store.set("torchelastic/role_info/1", '{"role": "default", "rank": 1, "local_world_size": 1}')
        return RendezvousInfo(store, 0, nodes, RendezvousStoreInfo("there", 1234))

    def num_nodes_waiting(self):
        return self._answer("num_nodes_waiting", self.waiting)

    def shutdown(self):
        return self._answer("shutdown", [])


class Telling(Handler):
    """A handler like that of elasticrs, which tells when the round has ended elsewhere."""

    def set_succeeded(self):
        self.calls.append("set_succeeded")
        self.waiting = [1] if self.calls.count("set_succeeded") == 1 else []


@pytest.fixture
def run_by(run):
    def run_by(handler, script, **more):
        make_handler = handler if callable(handler) else lambda: handler
        settings = {"exit_barrier_timeout": 0.0, "monitor_interval": 0.01, **more}
        return run(1, "sh", "-c", script, make_handler=make_handler, **settings)

    return run_by


def test_ranks_and_addresses_come_from_the_handler(run_by):
    handler = Handler([2])
    result, outputs, lines = run_by(
        handler, "echo $RANK/$WORLD_SIZE $GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"
    )
    assert (result.phase, outputs) == (Phase.SUCCEEDED, ["0/2 2 there:1234\n"])
    assert handler.calls == ["next_rendezvous", "shutdown"]
    # The other node has not finished in time.
    assert any("did not finish" in line for line in lines)


@pytest.mark.parametrize("given", [None, RendezvousStoreInfo("there", None)])
def test_a_handler_that_gives_no_port_gets_a_free_one(run_by, monkeypatch, given):
    monkeypatch.setattr(
        Handler, "next_rendezvous", lambda _self: RendezvousInfo(Store(), 0, 1, bootstrap_store_info=given)
    )
    _, outputs, _ = run_by(Handler(), "echo $MASTER_ADDR $MASTER_PORT")
    address, port = outputs[0].split()
    assert address == ("localhost" if given is None else "there")
    assert int(port) > 0


def test_a_restart_asks_the_handler_again_and_costs_a_restart(run_by):
    handler = Handler()
    result, outputs, _ = run_by(handler, SAYS_AND_FAILS_ONCE, max_restarts=3, restart_delay="1s")
    assert (result.phase, result.restarts, outputs) == (Phase.SUCCEEDED, 1, ["0\n", "1\n"])
    assert handler.calls == ["next_rendezvous", "next_rendezvous", "shutdown"]
    assert result.attempts[0].delay is not None


@pytest.fixture
def awaited(monkeypatch):
    """Return a function that makes some calls of a method wait until a line with a word is printed.
    It returns a list that gets the console's group rank at that time.
    """

    def awaited(owner, method, word, *, calls):
        told, numbers, saying = [], itertools.count(), threading.Semaphore(0)
        say, real = Console.say, getattr(owner, method)

        def saying_too(console, text):
            say(console, text)
            if word in text:
                told.append(console.group_rank)
                saying.release()

        def waiting(self, *given):
            if next(numbers) in calls:
                assert saying.acquire(timeout=10), f"no line with {word}"
            return real(self, *given)

        monkeypatch.setattr(Console, "say", saying_too)
        monkeypatch.setattr(owner, method, waiting)
        return told

    return awaited


@pytest.mark.parametrize("error", [None, RendezvousConnectionError])
def test_a_restart_is_announced_once_and_before_its_rendezvous_ends(run_by, awaited, error):
    told = awaited(Handler, "next_rendezvous", "restarting", calls=[1])
    result, _, lines = run_by(Handler([2, 2 if error is None else error("away")]), FAILS_ONCE, max_restarts=1)
    assert result.phase is (Phase.SUCCEEDED if error is None else Phase.FAILED)
    # At that time, this node has no rank among the nodes.
    assert told == [None]
    assert [len([line for line in lines if word in line]) for word in ("restarting", "failed:")] == [1, 0]


def test_no_line_announces_a_restart_for_which_there_is_no_plan(run, monkeypatch):
    plans = iter([plan_one_node])

    def plan(*given):
        make = next(plans, None)
        if make is None:
            raise OSError("no port")
        return make(*given)

    monkeypatch.setattr(decisions, "plan_one_node", plan)
    result, _, lines = run(1, "false", max_restarts=1)
    assert (result.phase, len(result.attempts)) == (Phase.FAILED, 1)
    assert "no port" in result.message
    assert not [line for line in lines if "restarting" in line]


def test_a_long_wait_for_the_rendezvous_is_told_with_the_name_of_its_back_end(run_by, awaited, monkeypatch):
    monkeypatch.setattr(handler_nodes, "_QUIET_FOR", 0.01)
    told = awaited(Handler, "next_rendezvous", "'mine'", calls=[0, 1])
    result, _, _ = run_by(Handler(), FAILS_ONCE, max_restarts=1, rdzv_backend="mine")
    assert (result.phase, len(told)) == (Phase.SUCCEEDED, 2)


def test_a_long_wait_for_nodes_that_have_not_finished_is_told(run_by, awaited, monkeypatch):
    monkeypatch.setattr(handler_nodes, "_QUIET_FOR", 0.01)
    told = awaited(Store, "check", "--exit-barrier-timeout", calls=[0])
    result, _, _ = run_by(Handler([2]), "true", exit_barrier_timeout=0.5)
    assert (result.phase, len(told)) == (Phase.SUCCEEDED, 1)


def test_the_restart_policy_applies_to_jobs_with_a_handler(run_by):
    handler = Handler()
    result, _, _ = run_by(handler, "exit 3", max_restarts=3, fatal_exit_codes="3")
    assert (result.phase, result.verdict, len(result.attempts)) == (Phase.FAILED, Verdict.PERMANENT, 1)
    assert handler.calls == ["next_rendezvous", "shutdown"]


def test_nodes_that_wait_to_join_start_a_new_round_without_a_charge(run_by):
    handler = Handler(waiting=[0, 2])
    result, outputs, lines = run_by(handler, 'test "$ELASTICRS_ROUND" = 2 || exec sleep 600')
    assert outputs == ["", ""]
    assert (result.phase, result.restarts, len(result.attempts)) == (Phase.SUCCEEDED, 0, 2)
    assert [attempt.name for attempt in result.attempts] == ["0", "0_r2"]
    assert any(line.startswith("2 nodes wait") for line in lines)


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (RendezvousGracefulExitError, Phase.SUCCEEDED),
        (RendezvousClosedError, Phase.FAILED),
        (OSError, Phase.FAILED),
    ],
)
def test_an_error_of_the_rendezvous_ends_the_job(run_by, error, phase):
    handler = Handler([error("the reason")])
    result, _, _ = run_by(handler, "true")
    assert (result.phase, result.attempts, result.exit_code) == (phase, [], int(phase is Phase.FAILED))
    assert phase is Phase.SUCCEEDED or "the reason" in result.message
    assert handler.calls == ["next_rendezvous", "shutdown"]


def test_a_rendezvous_that_fails_while_workers_run_stops_them(run_by):
    result, _, lines = run_by(Handler(waiting=[RendezvousConnectionError("away")]), "exec sleep 600")
    assert (result.phase, result.restarts) == (Phase.FAILED, 0)
    assert "away" in result.message
    assert any("stopping the workers" in line for line in lines)


def test_a_node_that_is_no_longer_needed_stops_its_workers_and_has_not_failed(run_by):
    handler = Handler(waiting=[RendezvousGracefulExitError("enough")])
    result, _, lines = run_by(handler, "exec sleep 600", max_restarts=3)
    assert (result.phase, result.exit_code, len(result.attempts)) == (Phase.SUCCEEDED, 0, 1)
    assert any("enough; stopping the workers" in line for line in lines)
    assert handler.calls == ["next_rendezvous", "shutdown"]


def test_an_error_of_the_handler_while_failed_workers_are_being_stopped_is_dropped(
    run, tmp_path, monkeypatch
):
    stopping, told = tmp_path / "stopping", tmp_path / "told"

    def num_nodes_waiting(_self):
        if stopping.exists():
            threading.Timer(0.1, told.touch).start()
            raise RendezvousGracefulExitError
        return 0

    monkeypatch.setattr(Handler, "num_nodes_waiting", num_nodes_waiting)
    script = """
        test $RANK = 1 || { until test -e ready; do sleep 0.01; done; exit 1; }
        trap 'touch stopping; until test -e told; do sleep 0.01; done; exit 2' TERM
        touch ready; while :; do sleep 0.01; done
    """
    monkeypatch.chdir(tmp_path)
    result, _, lines = run(2, "sh", "-c", script, make_handler=Handler, monitor_interval=0.01)
    assert (result.phase, result.has_taken_part) == (Phase.FAILED, True)
    assert not any("needed" in line for line in lines)


GRACEFUL, LOST = RendezvousGracefulExitError("enough"), RendezvousConnectionError("away")


@pytest.mark.parametrize(
    ("rounds", "waiting", "ends", "succeeded"),
    [
        # The rendezvous ends the job while workers run, or in the second round, after workers have failed.
        ([1], [GRACEFUL], [], {"run": 1}),
        ([1, GRACEFUL], [], ["FAILED", "RENDEZVOUS"], {"_rendezvous": 0, "_restart_workers": 0, "run": 1}),
        ([1, LOST], [], ["FAILED", "RENDEZVOUS"], {"_rendezvous": 0, "_restart_workers": 0, "run": 0}),
        ([LOST], [], ["RENDEZVOUS"], {"_rendezvous": 0, "run": 0}),
    ],
)
def test_events_and_metrics_tell_how_the_rendezvous_has_ended_the_job(
    run_by, monkeypatch, rounds, waiting, ends, succeeded
):
    told, metrics = [], {}
    monkeypatch.setattr("elasticrs.events.record", lambda event, _destination: told.append(event))
    monkeypatch.setattr("elasticrs.metrics.api.put_metric", lambda name, value: metrics.update({name: value}))
    script = "exec sleep 600" if waiting else "exit 1"
    where = {"event_log_handler": "dynamic_rendezvous", "has_metrics": True}
    run_by(Handler(rounds, waiting), script, max_restarts=1, **where)
    begin = ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START"] if rounds[0] == 1 else []
    states = [event.metadata["state"] for event in told if event.name != "job failed"]
    assert states == [*begin, *ends]
    known = {name.removeprefix("SimpleElasticAgent."): value for name, value in metrics.items()}
    for name, has_succeeded in succeeded.items():
        assert known[f"{name}.success" if has_succeeded else f"{name}.failure"] == 1
    assert not any(name.startswith("workers.default.run_") for name in metrics)


@pytest.mark.parametrize("error", [UsageError, TypeError])
def test_a_mistake_in_the_handler_is_raised(run_by, error):
    def make_handler():
        raise error("a mistake")

    with pytest.raises(error, match="a mistake"):
        run_by(make_handler, "true")


def test_workers_run_again_if_the_round_has_ended_elsewhere(run_by):
    handler = Telling([2, 2])
    result, _, lines = run_by(handler, "true", exit_barrier_timeout=0.1)
    assert (result.phase, result.restarts, len(result.attempts)) == (Phase.SUCCEEDED, 0, 2)
    assert handler.calls == ["next_rendezvous", "set_succeeded"] * 2 + ["shutdown"]
    assert any("again" in line for line in lines)


def test_a_store_that_is_lost_in_the_exit_barrier_does_not_fail_the_job(run_by, monkeypatch):
    monkeypatch.setattr(Store, "check", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    result, _, lines = run_by(Handler([2]), "true")
    assert result.phase is Phase.SUCCEEDED
    assert any("lost" in line for line in lines)


@pytest.fixture
def hangs(monkeypatch):
    """Return a function that lets a method of the handler hang until the test is over."""
    released = threading.Event()

    def hangs(cls, method):
        monkeypatch.setattr(cls, method, lambda _self: released.wait())

    monkeypatch.setattr(handler_nodes, "PATIENCE", 0.05)
    yield hangs
    released.set()


def test_a_handler_that_does_not_shut_down_delays_the_end_only_for_a_while(run_by, hangs):
    hangs(Handler, "shutdown")
    result, _, lines = run_by(Handler(), "true")
    assert result.phase is Phase.SUCCEEDED
    assert any("shut down" in line for line in lines)


@pytest.mark.parametrize("method", ["num_nodes_waiting", "set_succeeded"])
def test_a_method_that_hangs_does_not_keep_a_job_that_has_succeeded(run_by, hangs, method):
    hangs(Telling, method)
    result, _, lines = run_by(Telling(), "sleep 0.1")
    assert (result.phase, len(result.attempts)) == (Phase.SUCCEEDED, 1)
    assert any(f"could not be waited for: {method} has not returned" in line for line in lines)
    assert any(f"could not be shut down: {method} has not returned" in line for line in lines)


def test_a_method_that_hangs_fails_a_restart_that_needs_a_round(run_by, hangs):
    hangs(Handler, "num_nodes_waiting")
    handler = Handler()
    result, _, _ = run_by(handler, "sleep 0.1; exit 1", max_restarts=3)
    assert (result.phase, len(result.attempts)) == (Phase.FAILED, 1)
    assert "num_nodes_waiting has not returned" in result.message
    assert handler.calls == ["next_rendezvous"]


def test_the_failure_of_a_job_is_told_before_the_wait_for_the_handler(run_by, hangs):
    hangs(Handler, "num_nodes_waiting")
    told = []
    _, _, lines = run_by(Handler(), "sleep 0.1; exit 1", ended=told.extend)
    assert not any("has not returned" in line for line in told)
    assert "num_nodes_waiting has not returned" in lines[-1]


@pytest.mark.parametrize("method", ["num_nodes_waiting", "shutdown"])
def test_a_signal_ends_the_wait_for_a_method_that_hangs(run_by, hangs, monkeypatch, method):
    hangs(Handler, method)
    monkeypatch.setattr(handler_nodes, "PATIENCE", HANG)
    with closing(SignalPipe([signal.SIGTERM])) as signals:

        def ended(_lines):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

        began = time.monotonic()
        result, _, lines = run_by(Handler(), "sleep 0.1; exit 1", signals=signals, ended=ended)
    assert result.phase is Phase.FAILED
    assert not any("shut down" in line for line in lines)
    assert time.monotonic() - began < HANG / 2


def test_an_agent_is_unhealthy_while_a_method_hangs_that_should_not_wait(run_by, monkeypatch):
    server = HealthCheckServer(time.time, 0, 0.2, "127.0.0.1")
    server.open()
    answers, deadline = [], time.monotonic() + HANG

    def num_nodes_waiting(_self):
        while not any("in num_nodes_waiting" in answer for answer in answers):
            assert time.monotonic() < deadline, answers[-1]
            try:
                urllib.request.urlopen(f"http://{server.address}/healthz").close()
            except urllib.error.HTTPError as error:
                with error:
                    answers.append(f"{error.code} {error.read()}")
        raise RendezvousGracefulExitError

    monkeypatch.setattr(Handler, "num_nodes_waiting", num_nodes_waiting)
    result, _, _ = run_by(Handler(), "exec sleep 600", server=server)
    assert result.phase is Phase.SUCCEEDED
    assert answers[-1].startswith("503 ")


def test_the_end_of_the_job_closes_all_file_descriptors_at_once(run_by):
    gc.disable()
    try:
        before = os.listdir("/proc/self/fd")
        run_by(Handler(), "true")
        assert os.listdir("/proc/self/fd") == before
    finally:
        gc.enable()


def test_the_methods_of_a_handler_run_with_the_signal_mask_of_the_program(run_by, monkeypatch):
    # Programs that the handler starts inherit the mask, and SIGTERM must be able to end them.
    masks, answer = set(), Handler._answer

    def told(*args):
        masks.add(frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return answer(*args)

    monkeypatch.setattr(Handler, "_answer", told)
    run_by(Handler(), "sleep 0.1")
    assert masks == {frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))}


SHARES = [NodeShare("trainer", 2), NodeShare("reader", 1), NodeShare("trainer", 3)]


def test_rank_0_assigns_ranks_from_all_roles():
    store = Store()
    for rank in (2, 1):
        with pytest.raises(KeyError, match=f"assigned_ranks/{rank}"):
            exchange_ranks(store, rank, 3, SHARES[rank])
    found = [exchange_ranks(store, rank, 3, SHARES[rank]) for rank in range(3)]
    assert found == node_ranks(SHARES)
    # Check that the format is torch's, because other agents in the round may run torchrun.
    info = json.loads(store.values["torchelastic/role_info/2"])
    assert info == {"role": "trainer", "rank": 2, "local_world_size": 3}
    assert json.loads(store.values["torchelastic/assigned_ranks/2"]) == [3, 6, 2, 5]


def test_the_last_agent_opens_the_exit_barrier():
    store, pauses, notes = Store(), [], []

    def arrive(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            assert wait_for_others(store, 2, 9, 9, has_ended=bool, pause=pauses.append, say=notes.append)

    assert wait_for_others(store, 2, 9, 0.05, has_ended=bool, pause=arrive, say=notes.append)
    assert (pauses, notes) == ([0.05, 0.05], [])
    assert set(store.values) == {
        "torchelastic/agent/terminal_state/num_members",
        "torchelastic/agent/terminal_state/last_member",
    }
