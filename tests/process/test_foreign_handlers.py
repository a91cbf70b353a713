"""A framework's subprocess handlers instead of those of elasticrs."""

import os
import signal
import subprocess
from typing import Any

import pytest
from helpers import procs

from elasticrs._engine.workers.functions import supervised_group
from elasticrs.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    Std,
    SubprocessContext,
    start_processes,
)
from elasticrs.multiprocessing.subprocess_handler import SubprocessHandler

FACTORY = "elasticrs.multiprocessing.api.get_subprocess_handler"


class Handler:
    """A subprocess handler that does not use elasticrs."""

    def __init__(
        self, entrypoint: str, args: tuple[str, ...], env: dict[str, str], stdout: str | None
    ) -> None:
        target = open(stdout, "wb") if stdout else None  # noqa: SIM115 -- closed below
        try:
            self.proc = subprocess.Popen([entrypoint, *args], env={**os.environ, **env}, stdout=target)
        finally:
            if target is not None:
                target.close()

    def close(self, death_sig: signal.Signals | None = None) -> None:
        self.proc.send_signal(death_sig or signal.SIGTERM)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the handler factory, and return a list of the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def make(**how: Any) -> Handler:
        calls.append(how)
        return Handler(how["entrypoint"], how["args"], how["env"], how["stdout"])

    monkeypatch.setattr(FACTORY, make)
    return calls


def start(folder: object, *scripts: str, tee: Std = Std.NONE) -> PContext:
    args = {rank: ("-c", script) for rank, script in enumerate(scripts)}
    specs = DefaultLogsSpecs(str(folder), redirects=Std.OUT, tee=tee)
    return start_processes("x", "sh", args, {rank: {"A": "b"} for rank in args}, specs)


def test_a_replaced_subprocess_handler_factory_starts_the_programs(tmp_path, made, capsys):
    context = start(tmp_path, "echo $A", "true", tee=Std.OUT)
    assert isinstance(context, SubprocessContext)
    assert {rank: handler.proc.pid for rank, handler in context.subprocess_handlers.items()} == context.pids()
    result = context.wait(procs.HANG)
    assert result is not None
    assert (result.return_values, result.failures) == ({0: None, 1: None}, {})
    assert [call["local_rank_id"] for call in made] == [0, 1]
    assert made[0]["stdout"] == result.stdouts[0]
    assert capsys.readouterr().out == "[x0]:b\n"


def test_a_subclass_of_the_handler_starts_the_programs_in_its_own_way(tmp_path, monkeypatch):
    class PipeHandler(SubprocessHandler):
        def _popen(self, args, env):
            return subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=self._stderr)

    monkeypatch.setattr(FACTORY, PipeHandler)
    context = start(tmp_path, "echo $A", "echo $A >&2; exec sleep 1000")
    assert context.subprocess_handlers[0].proc.communicate() == (b"b\n", None)
    context.close()
    context.subprocess_handlers[1].proc.stdout.close()
    procs.assert_gone(context.pids().values())
    assert context.wait().failures[1].sent_signal == signal.SIGTERM


def test_a_failed_program_stops_the_others_and_reports_their_signals(tmp_path):
    context = start(tmp_path, "exec sleep 1000", "exit 3")
    result = context.wait(procs.HANG)
    assert result is not None
    codes = {rank: (failure.exitcode, failure.sent_signal) for rank, failure in result.failures.items()}
    assert codes == {1: (3, None), 0: (-15, signal.SIGTERM)}
    procs.assert_gone(context.pids().values())


def test_close_kills_a_worker_that_ignores_sigterm(tmp_path):
    ready = "trap '' TERM; : > $0; exec sleep 1000"
    gate = f"{tmp_path}/gate"
    os.mkfifo(gate)
    specs = DefaultLogsSpecs(os.devnull)
    context = start_processes("x", "sh", {0: ("-c", ready, gate)}, {0: {}}, specs)
    os.close(os.open(gate, os.O_RDONLY))
    context.close(timeout=0)
    result = context.wait()
    assert result is not None
    assert (result.failures[0].exitcode, result.failures[0].sent_signal) == (-9, signal.SIGKILL)


def test_a_failed_start_leaves_no_processes():
    before = {each.pid for each in procs.children()}
    args: dict[int, tuple[object, ...]] = {0: ("1000",), 1: (b"", 2)}
    with pytest.raises(TypeError):
        start_processes("x", "sleep", args, {0: {}, 1: {}}, DefaultLogsSpecs(os.devnull))
    assert {each.pid for each in procs.children()} <= before


def test_a_program_that_survives_sigkill_is_left_behind(monkeypatch, caplog):
    """SIGKILL does not end a program that hangs in the kernel. Only a broken file system causes such a hang,
    so this test uses a fake program that never exits.
    """
    monkeypatch.setattr(supervised_group, "_KILL_LIMIT", 0.01)

    class Stuck:
        pid = 17

        def poll(self):
            return None

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("stuck", timeout)

    class StuckHandler:
        proc = Stuck()

        def close(self, death_sig):
            sent.append(death_sig)

    sent: list[int] = []
    programs = supervised_group.PolledGroup({0: StuckHandler()})
    programs.stop(signal.SIGTERM, 0.01)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert "pid 17" in caplog.text
    assert programs.log.exits == {}
