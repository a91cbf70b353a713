"""Turns the Python stacks of a job's ranks into the lines that ``elasticctl stacks`` shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from elasticrs._engine.hangs.stacks import Frame, is_library, main_thread, merge, short
from elasticrs._engine.job.phrases import counted, printable, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_SPY_LIMIT = 5.0
"""Seconds within which ``py-spy`` has to read the stack of one process."""

MAX_SPIED = 8
"""Maximum number of ranks whose stacks ``py-spy`` reads, because they have not told the agent theirs."""

MAX_SHOWN = 5
"""Maximum number of frames of the user's program that are shown of a stack, besides the innermost frame."""


def spied(answer: dict[str, Any]) -> dict[str, Any]:
    """Add to an agent's answer the stacks of the ranks that have not told theirs (``silent``). The program
    ``py-spy`` reads them, if it is installed.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    py_spy = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    answer["has_py_spy"] = py_spy is not None
    if py_spy is None:
        return answer
    found: dict[int, tuple[Frame, ...]] = {}
    own = [each for each in answer["silent"] if each["node"] == answer["node"]]
    for each in own[:MAX_SPIED]:
        # Do not let py-spy pause the process that it reads, because that process is at work.
        command = [py_spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(each["pid"])]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_SPY_LIMIT, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found[each["rank"]] = main_thread(done.stdout.decode("utf-8", "replace"))
    answer["silent"] = [each for each in answer["silent"] if not found.get(each["rank"])]
    told = {rank: _frames(stack) for stack in answer["stacks"] for rank in stack["ranks"]}
    answer["stacks"] = [stack._asdict() for stack in merge({**told, **found})]
    return answer


def _frames(stack: dict[str, Any]) -> tuple[Frame, ...]:
    return tuple(Frame(*frame) for frame in stack["frames"])


def text(answer: dict[str, Any], *, is_whole: bool) -> list[str]:
    """Return lines about an agent's answer: which ranks wait, and where each rank is. ``is_whole``: show all
    of each stack, not one line.
    """
    lines = [answer["message"]] if answer["message"] else []
    rows = [(_who(stack["ranks"]), _frames(stack)) for stack in answer["stacks"]]
    width = max((len(who) for who, _ in rows), default=0)
    for who, frames in rows:
        if is_whole:
            lines += [f"{who}, the most recent call first:"]
            lines += [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]
        else:
            lines.append(f"{who.ljust(width)}  {chain(frames)}")
    own = [each for each in answer["silent"] if each["node"] == answer["node"]]
    stuck = [each["rank"] for each in own if each["can_answer"]]
    if stuck:
        spy = "py-spy could not read it" if answer["has_py_spy"] else "install py-spy to see it"
        lines.append(f"{_who(stuck)}: no answer within a second, so in C code that holds the GIL; {spy}")
    mute = [each["rank"] for each in own if not each["can_answer"]]
    if mute:
        spy = "py-spy could not read it either" if answer["has_py_spy"] else "install py-spy to see it"
        lines.append(
            f"{_who(mute)}: nothing in it can answer, because it has not imported torch.optim; {spy}"
        )
    elsewhere: dict[str, list[int]] = {}
    for each in answer["silent"]:
        if each["node"] != answer["node"]:
            elsewhere.setdefault(printable(str(each["node"])), []).append(each["rank"])
    for node, ranks in elsewhere.items():
        lines.append(f"{_who(ranks)}: no answer; py-spy may see more if you run this command on {node}")
    not_asked = answer.get("not_asked", 0)
    if not_asked:
        lines.append(
            f"{counted(not_asked, 'rank')} on other nodes: not asked, because the agent's loop is stuck"
        )
    others = answer["world_size"] - answer["ranks"] - not_asked
    if others > 0:
        who = f"{others} ranks have ended, or their" if others != 1 else "1 rank has ended, or its"
        lines.append(f"{who} node does not answer")
    return lines


def _who(ranks: Sequence[int]) -> str:
    return ranks_text(ranks, 8)


def chain(frames: Sequence[Frame]) -> str:
    """Return a stack as one line: its innermost frame, and the program's own frames that led to it."""
    own = [frame for frame in frames[1:] if not is_library(frame)]
    return printable(" <- ".join(short(frame) for frame in (*frames[:1], *own[:MAX_SHOWN])), 2000)
