"""Parsing and merging of stacks."""

import faulthandler
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.recorded_evidence import recorded
from elasticrs._engine.hangs.stacks import (
    MAX_FRAMES,
    Frame,
    main_thread,
    merge,
    place,
    program_frame,
    waits_for_ranks,
)

TORCH = "/env/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
REDUCE = (Frame(C10D, 2501, "all_reduce"), Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"))
STEP = (Frame("/job/train.py", 88, "step"), Frame("/job/train.py", 120, "<module>"))
LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 741, "__next__")


def written(frames, header="Current thread 0x00007f0000000002 (most recent call first):"):
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]
    return "\n".join([header, *lines, ""])


def spied(frames, name="MainThread"):
    lines = [f"    {frame.function} ({frame.file}:{frame.line})" for frame in frames]
    return "\n".join([f'Thread 7 (idle): "{name}"', *lines, ""])


OTHER = written([Frame("/x.py", 1, "answer")], "Thread 0x00007f0000000001 (most recent call first):")


def test_the_thread_that_handled_the_signal_is_the_main_thread():
    assert main_thread(f"{OTHER}\n{written(STEP)}\n{OTHER}") == STEP


def test_the_last_thread_is_the_main_thread_if_none_is_marked():
    last = written(STEP, "Thread 0x00007f0000000002 (most recent call first):")
    assert main_thread(f"{OTHER}\n{last}") == STEP


def test_thread_names_and_c_stacks_of_newer_interpreters_are_parsed():
    named = written(STEP, "Current thread 0x00007f0000000002 [python3] (most recent call first):")
    in_c = (
        'Current thread\'s C stack trace (most recent call first):\n  Binary file "/lib/libc.so", at +0x1\n'
    )
    assert main_thread(f"{in_c}\n{named}") == STEP


def test_the_output_of_py_spy_is_parsed():
    own = [frame._replace(function=f"Trainer.{frame.function}") for frame in STEP]
    text = f"Process 7: python\nPython v3.11\n\n{spied(REDUCE, 'T 1 (x)')}\n{spied(own)}"
    assert main_thread(text) == STEP
    nameless = "Thread 9 (active)\n    native (/a.so)\n    f (/data (old)/a:b.py:41)\n"
    assert main_thread(nameless) == (Frame("/data (old)/a:b.py", 41, "f"),)


def test_a_hang_file_is_parsed():
    kernel = (
        "threads in the kernel: state, name, wait channel, stack\n\n7 S python futex_do_wait\n    futex\n"
        "9 S Thread 5 (x) -\n"
    )
    head = "rank 3 hangs\npid 7, state S\n\nPython stacks, the most recent call first\n\n"
    assert main_thread(f"{head}{OTHER}\n{written(STEP)}\n\n{kernel}") == STEP
    without = f"rank 3 hangs\npid 7, state S\n\nno Python stacks\n\n{kernel}\n"
    assert main_thread(without) == ()
    assert main_thread(f"{without}Process 7: python\n\n{spied(REDUCE, 'loader')}\n{spied(STEP)}") == STEP
    assert main_thread(f"{without}Error: Failed to suspend process\n\nCaused by:\n    0: EPERM\n") == ()


def test_stacks_written_by_the_running_interpreter_are_parsed(tmp_path):
    never, path = threading.Event(), tmp_path / "stacks"
    with path.open("w") as file:
        thread = threading.Thread(target=never.wait)
        thread.start()
        faulthandler.dump_traceback(file, all_threads=True)
        never.set()
        thread.join()
    first, *_ = main_thread(path.read_text())
    line = sys._getframe().f_lineno
    assert (first.file, first.function) == (
        __file__,
        "test_stacks_written_by_the_running_interpreter_are_parsed",
    )
    assert line - 10 < first.line < line


def test_waiting_ranks_are_recognised_in_recorded_stacks():
    evidence = recorded("missing_rank")
    stacks = {rank.rank: main_thread(rank.stacks) for rank in evidence}
    assert {rank for rank, frames in stacks.items() if waits_for_ranks(frames)} == {0, 1, 2, 3, 4, 6, 7}
    assert (stacks[0][0].function, program_frame(stacks[0]).function) == ("all_reduce", "carry_out")
    assert stacks[5][0].function == "wait"


@pytest.mark.parametrize(
    ("inner", "waits"),
    [
        (REDUCE, True),
        ((Frame(f"{TORCH}/autograd/graph.py", 825, "_engine_run_backward"),), True),
        (
            (
                Frame(f"{TORCH}/_ops.py", 1, "__call__"),
                Frame(f"{TORCH}/distributed/_functional_collectives.py", 9, "wait"),
            ),
            True,
        ),
        ((Frame(f"{TORCH}/distributed/fsdp/_runtime_utils.py", 9, "_unshard"),), True),
        ((Frame(f"{TORCH}/distributed/checkpoint/filesystem.py", 9, "_write"),), False),
        ((Frame("/usr/lib/python3.11/selectors.py", 415, "select"), LOADER), False),
        ((), False),  # In the program's code, perhaps in `Work.wait`.
    ],
)
def test_only_frames_called_by_the_program_show_that_a_rank_waits(inner, waits):
    launcher = (Frame(f"{TORCH}/distributed/run.py", 1, "main"),)
    assert waits_for_ranks((*inner, *STEP, *launcher)) is waits


def test_a_place_names_the_function_and_the_line_of_the_program():
    assert place(STEP) == "step (train.py:88)"
    assert place((Frame("/usr/lib/python3.11/selectors.py", 415, "select"), LOADER, *STEP)) == (
        "__next__ (dataloader.py:741), called at train.py:88"
    )
    assert place(REDUCE) == "all_reduce (distributed_c10d.py:2501)"
    assert place((Frame("/job/\x1b[2J.py", 1, "f"),)) == "f (?[2J.py:1)"


def test_equal_stacks_are_merged():
    stacks = {3: STEP, 0: REDUCE, 2: REDUCE, 1: (), 7: REDUCE}
    assert [(merged.ranks, merged.frames) for merged in merge(stacks)] == [((0, 2, 7), REDUCE), ((3,), STEP)]


@given(
    st.text()
    | st.lists(st.sampled_from([OTHER, written(STEP), spied(STEP), '  File "', "Thread "])).map("".join)
)
def test_any_text_is_parsed_without_an_error(text):
    assert all(isinstance(frame.line, int) for frame in main_thread(text))


def test_the_number_of_frames_is_limited():
    assert len(main_thread(written(STEP * MAX_FRAMES))) == MAX_FRAMES
