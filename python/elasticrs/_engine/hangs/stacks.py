"""Parses stacks, which ``faulthandler`` or ``py-spy dump`` has written, perhaps to the agent's hang files,
and merges the stacks of several ranks.

A diagnosis uses only the main thread, because differences between background threads are irrelevant.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from elasticrs._engine.job.phrases import LIBRARIES, OWN_PACKAGE, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAX_TEXT = 1 << 20
"""Number of characters that are parsed. The agent keeps at most 256 KiB of stacks for each rank."""

MAX_FRAMES = 200
_MAX_NUMBER = 10

_FRAME = re.compile(rf' *File "(.*)", line (\d{{1,{_MAX_NUMBER}}}) in (.+)')
_SPIED = re.compile(rf"    (\S.*?) \((.*):(\d{{1,{_MAX_NUMBER}}})\)")
_ABORTED = "Fatal Python error: Aborted"
_HEADER = re.compile(r"(Current thread|Thread) 0x.*\(most recent call first\):")
_WRAPPER = "/torch/distributed/c10d_logger.py"
_WAITING = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
"""Path suffixes of the files whose functions wait for other ranks."""


class Frame(NamedTuple):
    file: str
    line: int
    function: str


class MergedStack(NamedTuple):
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    """Frames that these ranks share, innermost first."""


def main_thread(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames, innermost first; empty if the text contains no stack."""
    return next(threads(text), ())


def threads(text: str) -> Iterator[tuple[Frame, ...]]:
    """Iterate over the stacks of all threads, innermost frame first, starting with the main thread.
    In the output of ``faulthandler``, the main thread is the one marked as current, else the last one. In the
    output of ``py-spy``, it is the one named ``MainThread``, else the first one.
    """
    lines = text[:MAX_TEXT].splitlines()
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    is_spied = not headers
    if is_spied:
        headers = [number for number, line in enumerate(lines) if line.startswith("Thread ")]
        headers.sort(key=lambda number: not lines[number].endswith('"MainThread"'))
    else:
        headers.sort(key=lambda number: (not lines[number].startswith("Current"), -number))
    return (_frames(lines, header, is_spied=is_spied) for header in headers)


def abort(text: str) -> tuple[tuple[Frame, ...], bool]:
    """Parse ``faulthandler``'s output about an abort: the main thread's frames, innermost first, and a flag.
    If the flag is false, a native thread, such as one of gloo or NCCL, may have aborted the process.
    """
    stacks = text[-MAX_TEXT:].rpartition(_ABORTED)[2]
    return main_thread(stacks), any(line.startswith("Current thread 0x") for line in stacks.splitlines())


def frame_of(line: str) -> Frame | None:
    written = _FRAME.fullmatch(line)
    return None if written is None else Frame(written[1], int(written[2]), written[3])


def _frames(lines: Sequence[str], header: int, *, is_spied: bool) -> tuple[Frame, ...]:
    frames = []
    for line in lines[header + 1 :][:MAX_FRAMES]:
        if not line.startswith("  "):
            break
        frame = _spied_frame(line) if is_spied else frame_of(line)
        if frame is not None:
            frames.append(frame)
    return tuple(frames)


def _spied_frame(line: str) -> Frame | None:
    spied = _SPIED.fullmatch(line)
    # `faulthandler` writes only the function name, without the class.
    return None if spied is None else Frame(spied[2], int(spied[3]), spied[1].rpartition(".")[2])


def merge(stacks: Mapping[int, tuple[Frame, ...]]) -> tuple[MergedStack, ...]:
    """Group the ranks that have equal stacks, the largest group first. Leave out ranks with empty stacks."""
    by_frames: dict[tuple[Frame, ...], list[int]] = {}
    for rank in sorted(stacks):
        if stacks[rank]:
            by_frames.setdefault(stacks[rank], []).append(rank)
    merged = [MergedStack(tuple(ranks), frames) for frames, ranks in by_frames.items()]
    return tuple(sorted(merged, key=lambda stack: (-len(stack.ranks), stack.ranks)))


def waits_for_ranks(frames: Sequence[Frame]) -> bool:
    """Return true if the thread is in a communication call of ``torch.distributed`` or in a backward pass.
    Only the frames inside the program's innermost function count, because ``torch.distributed`` further out
    may be the launcher or a model's wrapper. ``Work.wait`` has no Python frame, so false proves nothing.
    """
    for number, frame in enumerate(frames):
        if not is_library(frame):
            return False
        if frame.file.endswith(_WAITING) or frame.function == "_engine_run_backward":
            return True
        is_inner = number == 0 and "/torch/distributed/" in frame.file
        if is_inner and "/torch/distributed/checkpoint/" not in frame.file:
            return True
    return False


def program_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside of installed packages and the standard library, if any."""
    return next((frame for frame in frames if not is_library(frame)), None)


def place(frames: Sequence[Frame]) -> str:
    """Describe a position, such as ``load (train.py:71)`` or ``next (lib.py:7), called at train.py:71``."""
    own = program_frame(frames)
    if own is None or own == frames[0]:
        return short(frames[0])
    inner = frames[: list(frames).index(own)]
    called = next((frame for frame in reversed(inner) if not frame.file.endswith(_WRAPPER)), inner[-1])
    return f"{short(called)}, called at {line(own)}"


def is_library(frame: Frame) -> bool:
    """Return true unless the frame is of the user's program. This package may be installed from a clone."""
    return frame.file.startswith(OWN_PACKAGE) or any(part in frame.file for part in LIBRARIES)


def short(frame: Frame) -> str:
    """Return a short form, such as ``step (train.py:88)``."""
    return printable(f"{frame.function} ({os.path.basename(frame.file)}:{frame.line})")


def line(frame: Frame) -> str:
    return printable(f"{os.path.basename(frame.file)}:{frame.line}")
