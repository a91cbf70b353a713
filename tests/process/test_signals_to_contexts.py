"""Signals at every moment of starting, waiting and closing, and a killed keeper (the parent of function
workers).
"""

import dis
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
from helpers import functions, procs

from elasticrs import multiprocessing
from elasticrs._engine.job.config import START_METHODS
from elasticrs._engine.process import signals
from elasticrs._engine.workers.functions import interrupts
from elasticrs.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

PACKAGES = tuple(str(Path(str(module.__file__)).parent) for module in (multiprocessing, interrupts))


@pytest.fixture
def caught() -> Iterator[PContext]:
    """A context that runs during the whole test, so that SIGTERM has elasticrs' handler from the start."""
    context = start(1, "sleep", "1000")
    yield context
    context.close()


def start(n: int, entrypoint: str | Callable[..., object], *args: object, method: str = "spawn") -> PContext:
    specs = DefaultLogsSpecs(os.devnull)
    by_rank = dict.fromkeys(range(n), args)
    return start_processes(
        "x", entrypoint, by_rank, {rank: {} for rank in by_rank}, specs, start_method=method
    )


class SignalAt:
    """Sends SIGTERM to this process at a chosen line or instruction of the modules that start functions.

    Args:
        step: which, counted from 0.
        opcodes: steps are instructions; lines otherwise.
    """

    def __init__(self, step: int, *, opcodes: bool) -> None:
        self._left = step
        self._event = "opcode" if opcodes else "line"
        self._pid = os.getpid()
        self.sent = False

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Callable[..., object] | None:
        # Do not trace forked children, which inherit the trace function.
        if os.getpid() != self._pid or not frame.f_code.co_filename.startswith(PACKAGES):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._step

    def _step(self, frame: FrameType, event: str, _arg: object) -> Callable[..., object] | None:
        if event == self._event and not self.sent and not _returns(frame):
            self._left -= 1
            if self._left < 0 and os.getpid() == self._pid:
                self.sent = True
                signal.raise_signal(signal.SIGTERM)
        return self._step


def _returns(frame: FrameType) -> bool:
    """Return true if the next instruction is a return, because the interpreter does not check for signals
    there.
    """
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


def known() -> set[int]:
    return {each.pid for each in procs.descendants(os.getpid())}


def start_under_signals(stride: int, opcodes: bool, how: Callable[[], PContext]) -> int:
    """Start again and again, each time with the signal a few steps later, until a start finishes before its
    signal.
    """
    before, tries = known(), 0
    while True:
        signal_at = SignalAt(tries * stride, opcodes=opcodes)
        try:
            with signal_at:
                context = how()
        except SignalException:
            assert signal_at.sent
        else:
            context.close()
            assert not signal_at.sent, f"step {tries * stride}: the signal was lost"
            return tries
        tries += 1
        # The failed start returned no context to close, so leftover processes would never be cleaned up.
        assert known() <= before, f"step {tries * stride}"


def test_a_signal_at_any_line_of_a_start_leaks_nothing(caught):
    assert start_under_signals(23, False, lambda: start(1, "sleep", "1000")) > 10
    assert caught.wait(0) is None


@pytest.mark.slow
def test_a_signal_at_any_instruction_of_a_start_leaks_nothing(caught):
    assert start_under_signals(19, True, lambda: start(1, "sleep", "1000")) > 10
    assert caught.wait(0) is None


@pytest.mark.slow
@pytest.mark.parametrize("method", START_METHODS)
def test_a_signal_at_any_line_of_a_start_of_functions_leaks_nothing(caught, method):
    made = start_under_signals(11, False, lambda: start(2, functions.wait_for_signal, method=method))
    assert made > 10
    assert caught.wait(0) is None


@pytest.mark.parametrize("method", ["program", *START_METHODS])
def test_a_signal_at_any_line_of_wait_and_close_is_raised_once(caught, method):
    before, step, is_through = known(), 0, False
    while not is_through:
        context = (
            start(1, "sleep", "1000")
            if method == "program"
            else start(1, functions.wait_for_signal, method=method)
        )
        signal_at = SignalAt(step, opcodes=False)
        try:
            with signal_at:
                context.wait(0)
                context.close()
            is_through = True
            assert not signal_at.sent, f"step {step}: the signal was lost"
        except SignalException:
            assert signal_at.sent
            context.close()
        assert known() <= before, f"step {step}"
        step += 29
    assert caught.wait(0) is None


def stop_and_close(context: PContext) -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        context.close(timeout=procs.HANG)


@pytest.mark.parametrize(
    ("relay", "answer", "exitcode"), [(0, "", -signal.SIGKILL), (1e9, "exit 7", 7)], ids=["again", "relay"]
)
def test_a_second_signal_raises_nothing_during_the_cleanup_of_the_first(monkeypatch, relay, answer, exitcode):
    monkeypatch.setattr(signals, "RELAY", relay)
    reader, writer = os.pipe()
    # On SIGTERM, the worker sends this process the second signal, and then exits with code 7 or keeps
    # running.
    code = f"trap 'kill -TERM $0; {answer}' TERM; echo > $1; while :; do sleep 1000 & wait; done"
    context = start(1, "sh", "-c", code, os.getpid(), f"/proc/{os.getpid()}/fd/{writer}")
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    with pytest.raises(SignalException) as raised:
        stop_and_close(context)
    assert raised.value.__context__ is None
    assert context._group.log.exits[0].exitcode == exitcode
    # The next stop request raises an exception again.
    with pytest.raises(SignalException):
        multiprocessing.api._terminate_process_handler(signal.SIGTERM, None)


def test_a_callback_requested_just_before_a_wait_ends_the_wait():
    told: list[str] = []
    with interrupts.held():
        interrupts.when_safe(lambda: told.append("done"))
        with interrupts.waiting(lambda: told.append("wait ended")):
            assert told == ["wait ended"]
        assert told == ["wait ended", "done"]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_functions_fail_if_their_keeper_is_killed(method):
    context = start(2, functions.wait_for_signal, method=method)
    pids = context.pids()
    worker = procs.process(pids[0])
    assert worker is not None
    assert worker.ppid != os.getpid()
    os.kill(worker.ppid, signal.SIGKILL)
    failures = context.wait(procs.HANG).failures
    # This process is the orphans' subreaper, so it may have reaped the first one itself and know its exit
    # code. Ignore the second failure, which may be a consequence of the first.
    first = next(iter(failures.values()))
    assert first.exitcode in {None, -signal.SIGKILL}
    assert first.exitcode is not None or "keeper" in first.message
    for pid in pids.values():
        assert procs.wait_gone(pid)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
