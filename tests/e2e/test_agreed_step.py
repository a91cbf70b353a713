"""Ranks that call ``checkpoint_requested`` in each step learn in the same one that a checkpoint is wanted."""

import os
import signal
import time

import pytest
from helpers.lines import long_lines
from helpers.nodes import meetings
from helpers.said import says

from elasticrs._engine.supervise.run.agreed_step import LONGEST_HOLD

pytestmark = pytest.mark.beyond_torchrun

IN_STEP = """
    import os, signal, sys
    from elasticrs import checkpoint_requested

    rank = int(os.environ["RANK"])
    names = [os.path.join(sys.argv[1], name) for name in ("there", "back")]
    modes = [os.O_WRONLY, os.O_RDONLY]
    pipes = [os.open(name, mode) for name, mode in zip(names, modes if rank == 0 else modes[::-1])]
    to, back = pipes if rank == 0 else pipes[::-1]
    step = 0
    while True:
        # As a collective does, this makes no rank more than one step faster than the other one.
        os.write(to, b".")
        if not os.read(back, 1):
            sys.exit("the other rank is gone")
        step += 1
        wish = checkpoint_requested()
        if wish:
            os.write(1, f"ACTED {rank} {step} {wish}\\n".encode())
        if wish == "stop":
            sys.exit(0)
        if step == 3:
            os.write(1, b"BEGUN\\n")
"""

HEARTBEATS = """
    from elasticrs.timer import heartbeat

    def act(signum, _frame):
        wishes.append("stop" if signum == signal.SIGTERM else "save")

    wishes = []
    signal.signal(signal.SIGTERM, act)
    signal.signal(signal.SIGUSR1, act)

    def checkpoint_requested():
        heartbeat(step)
        return wishes.pop() if wishes else ""
"""
BEATS = IN_STEP.replace("    from elasticrs import checkpoint_requested\n", HEARTBEATS)
"""Program as ``IN_STEP``, but with its own handlers for SIGTERM and SIGUSR1, and a heartbeat in each step."""


@pytest.fixture
def job(launch, worker_script, tmp_path):
    """Return a function that starts a job of two ranks that wait for each other in each step."""

    def start(source, *options):
        for name in ("there", "back"):
            os.mkfifo(tmp_path / name)
        launched = launch("--nproc-per-node=2", *options, worker_script(source), tmp_path)
        launched.wait_for_lines("BEGUN", 2)
        return launched

    return start


def acted(launched, count):
    """Return by rank the step in which it learned of each request, and the request (save or stop)."""
    found = {}
    for match in launched.wait_for_lines(r"ACTED (\d) (\d+) (\w+)", count):
        found.setdefault(match[1], []).append((match[2], match[3]))
    return found


@pytest.mark.parametrize("source", [IN_STEP, BEATS], ids=["checkpoint_requested", "heartbeat"])
def test_all_ranks_are_asked_in_the_same_step_to_save_and_to_stop(job, source):
    launched = job(source)
    for number in range(1, 6):
        launched.signal(signal.SIGUSR1)
        acted(launched, 2 * number)
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    found = acted(launched, 12)
    assert found["0"] == found["1"]
    assert [wish for _, wish in found["0"]] == ["save"] * 5 + ["stop"]
    last = int(found["0"][-1][0]) - (source is BEATS)
    says(launched.stderr, "SIGTERM reaches all ranks after step", str(last))


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_the_ranks_of_two_nodes_are_asked_in_the_same_step(launch, worker_script, tmp_path, backend):
    for name in ("there", "back"):
        os.mkfifo(tmp_path / name)
    command = ("--nproc-per-node=1", worker_script(IN_STEP), tmp_path)
    agents = [launch(*options, *command) for options in meetings(backend, 2)]
    for each in agents:
        each.wait_for_line("BEGUN")
    for number, signum in enumerate((signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM), 1):
        for each in agents:
            each.signal(signum)
        steps = [each.wait_for_lines(r"ACTED \d (\d+) \w+", number)[-1][1] for each in agents]
        assert len(set(steps)) == 1
    for each in agents:
        each.exits(1)
        says(each.stderr, "SIGTERM reaches all ranks after step", steps[0])
        assert "at different steps" not in each.stderr
        assert long_lines(each.stderr) == []


def stops_after_both_signals(launched):
    launched.signal(signal.SIGUSR1)
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    found = acted(launched, 2)
    assert found["0"] == found["1"]
    assert found["0"][-1][1] == "stop"


@pytest.mark.parametrize("source", [IN_STEP, BEATS], ids=["checkpoint_requested", "heartbeat"])
def test_all_ranks_are_asked_in_the_same_step_if_both_signals_come_at_once(job, source):
    stops_after_both_signals(job(source))


def test_a_stop_is_not_lost_if_the_handler_of_the_signal_before_it_raises_an_exception(job):
    begin = "        wish = checkpoint_requested()\n"
    fail = "    def fail(_signum, _frame):\n        raise OSError\n\n"
    fail += "    signal.signal(signal.SIGUSR1, fail)\n\n"
    caught = f"        try:\n    {begin}        except OSError:\n"
    caught += "            while not wishes:\n                os.sched_yield()\n"
    caught += "            wish = wishes.pop()\n"
    source = BEATS.replace("    def checkpoint_requested", f"{fail}    def checkpoint_requested")
    stops_after_both_signals(job(source.replace(begin, caught)))


def test_a_signal_ends_a_forked_child_of_a_program_that_asks_in_each_step(launch, worker_script):
    source = """
        import os, signal
        from elasticrs import checkpoint_requested

        checkpoint_requested()
        child = os.fork()
        if not child:
            signal.pause()
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    """
    launch("--nproc-per-node=1", worker_script(source)).exits(0)


PAUSE = """
        if step == 9 and rank == 1:
            os.write(1, f"PAUSED {os.getpid()}.\\n".encode())
            signal.pause()
"""
PAUSES = IN_STEP.replace("step += 1\n", f"step += 1{PAUSE}")
"""The same program, but rank 1 pauses in its step 9, and never gets to the end of this step."""


def test_a_second_stop_request_does_not_wait_for_a_common_step(job):
    launched = job(PAUSES)
    launched.wait_for_line("PAUSED")
    launched.signal(signal.SIGTERM)
    launched.wait_for_line("SIGTERM received")
    launched.insist(signal.SIGTERM)
    begun = time.monotonic()
    launched.exits(1)
    assert time.monotonic() - begun < LONGEST_HOLD / 2


def test_a_failure_does_not_wait_for_a_common_step(job):
    launched = job(PAUSES)
    pid = int(launched.wait_for_line(r"PAUSED (\d+)\.")[1])
    launched.signal(signal.SIGTERM)
    launched.wait_for_line("SIGTERM received")
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    launched.exits(1)
    assert time.monotonic() - begun < LONGEST_HOLD / 2
    says(launched.stderr, "SIGTERM reaches the ranks at different steps, because a rank has failed")


def test_a_rank_that_makes_no_step_does_not_delay_the_others_for_longer_than_the_hold(job):
    launched = job(PAUSES, "--shutdown-timeout=3")
    launched.wait_for_line("PAUSED")
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    says(launched.stderr, "SIGTERM reaches the ranks at different steps", "local rank")


@pytest.mark.parametrize("handler", ["signal.default_int_handler", "fail"])
def test_the_traceback_of_a_handler_begins_at_the_line_of_the_program(job, handler):
    fail = 'def fail(_signum, _frame):\n        raise OSError("full")\n'
    source = IN_STEP.replace(
        "    rank = int", f"    {fail}\n    signal.signal(signal.SIGUSR1, {handler})\n    rank = int"
    )
    launched = job(source)
    launched.signal(signal.SIGUSR1)
    launched.exits(1)
    says(launched.stderr, "in <module>", "wish = checkpoint_requested()")
    assert "boundary.py" not in launched.stderr
