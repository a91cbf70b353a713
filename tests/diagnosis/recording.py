"""Record the evidence that the ranks of real gloo groups report when they get stuck.

``python -m diagnosis.recording`` in ``tests`` writes the files in ``recorded``, one for each of
:data:`SCENARIOS`. They have to be written again only if torch changes the format of its flight recorder.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
WORKER = HERE.parent / "workers" / "collectives.py"
RECORDED = HERE / "recorded"
LIMIT = 120.0
"""Seconds that a group may take to get stuck. Only guards against hangs."""

Step = tuple[str, "int | None", int]


class Scenario(NamedTuple):
    """The steps of each rank, and the number of collectives in its record once the group is stuck."""

    size: int
    steps: dict[int, list[Step]]
    """The steps of each rank. ``-1``: those of all other ranks."""
    entries: dict[int, int]
    groups: list[tuple[str, list[int]]] = []  # noqa: RUF012 -- a named tuple's default is never changed

    def of(self, rank: int) -> tuple[list[Step], int]:
        """Return the steps of a rank and the number of entries in its record."""
        steps = self.steps[rank if rank in self.steps else -1]
        return steps, self.entries[rank if rank in self.entries else -1]


def reduce(elements: int = 4, group: int | None = None) -> Step:
    return ("all_reduce", group, elements)


def barrier(group: int | None = None) -> Step:
    return ("barrier", group, 1)


def gather(elements: int = 4) -> Step:
    return ("all_gather", None, elements)


LOAD: Step = ("load", None, 1)
SPIN: Step = ("spin", None, 1)
EXIT: Step = ("exit", None, 1)
RECEIVE: Step = ("receive", None, 4)

TENSOR_AND_DATA = [("tp", [0, 1]), ("tp", [2, 3]), ("dp", [0, 2]), ("dp", [1, 3])]


def tensor_and_data(rank: int, *, stuck: int) -> list[Step]:
    """Return two steps of a rank in a tensor-parallel and a data-parallel group. The rank ``stuck`` hangs in
    its data loader before the second step.
    """
    step = [reduce(group=rank // 2), reduce(8, group=2 + rank % 2)]
    return [*step, *([LOAD] if rank == stuck else []), *step]


SCENARIOS = {
    "missing_rank": Scenario(
        8, {5: [reduce(), barrier(), LOAD], -1: [reduce(), barrier(), reduce()]}, {5: 2, -1: 3}
    ),
    "busy_rank": Scenario(2, {1: [reduce(), SPIN], -1: [reduce(), reduce()]}, {1: 1, -1: 2}),
    "skipped": Scenario(
        4,
        {2: [reduce(), barrier(), barrier(), gather()], -1: [reduce(), barrier(), reduce(), gather()]},
        {-1: 3},
    ),
    "wrong_order": Scenario(
        4, {3: [reduce(), barrier(), reduce()], -1: [reduce(), reduce(), barrier()]}, {-1: 2}
    ),
    "wrong_size": Scenario(
        4, {2: [reduce(), reduce(8), barrier()], -1: [reduce(), reduce(), barrier()]}, {2: 2, -1: 3}
    ),
    "two_against_two": Scenario(
        4, {0: [reduce(), barrier()], 2: [reduce(), barrier()], -1: [reduce(), reduce()]}, {-1: 2}
    ),
    "groups": Scenario(
        4,
        {rank: tensor_and_data(rank, stuck=3) for rank in range(4)},
        {0: 4, 1: 4, 2: 3, 3: 2},
        TENSOR_AND_DATA,
    ),
    "dead_rank": Scenario(4, {1: [reduce(), EXIT], -1: [reduce(), reduce()]}, {-1: 2}),
    "receiving": Scenario(
        4, {0: [reduce(), RECEIVE], 1: [reduce(), LOAD], -1: [reduce(), barrier()]}, {0: 1, 1: 1, -1: 2}
    ),
}


class Worker:
    """The process of one rank in a stuck group."""

    def __init__(self, scenario: Scenario, rank: int, folder: Path) -> None:
        self.rank, self.stacks = rank, folder / f"stacks-{rank}"
        self._steps, self._entries = scenario.of(rank)
        plan = {
            "rank": rank,
            "size": scenario.size,
            "groups": scenario.groups,
            "steps": self._steps,
            "store": str(folder / "store"),
            "stacks": str(self.stacks),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(plan)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def exits(self) -> bool:
        """True if the rank exits instead of getting stuck."""
        return EXIT in self._steps

    def ask(self) -> dict[str, Any]:
        """Return the evidence that the rank reports now."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"record\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def is_stuck(self, answer: dict[str, Any]) -> bool:
        """Return true if the rank has reached the point where it gets stuck."""
        entries = json.loads(answer["record"]).get("entries", [])
        # torch records a blocking call before it waits, so only the last call may be incomplete.
        done = all(entry["retired"] for entry in entries[:-1])
        return len(entries) == self._entries and done

    def written_stacks(self) -> str:
        """Return the stacks of the process's threads, in the form that the agent reads."""
        self.process.send_signal(signal.SIGRTMIN + 12)
        return wait_until(lambda: self._stacks() or None)

    def _stacks(self) -> str:
        text = self.stacks.read_text()
        return text if "Current thread" in text and text.endswith("in <module>\n") else ""

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def wait_until(look: Any) -> Any:
    """Call a function repeatedly until it returns something other than ``None``."""
    pause = threading.Event()
    for _ in range(int(LIMIT / 0.02)):
        found = look()
        if found is not None:
            return found
        pause.wait(0.02)
    pytest.fail("the group did not get stuck as planned")


def record(scenario: Scenario) -> list[dict[str, Any]]:
    """Run a group until it is stuck, and return the evidence of each rank: ``rank``, ``record``, ``groups``,
    ``raised`` and ``stacks``, or only ``rank`` for a rank that has exited.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(scenario, rank, Path(folder)) for rank in range(scenario.size)]
        try:
            return [evidence_of(worker) for worker in workers]
        finally:
            for worker in workers:
                worker.end()


def evidence_of(worker: Worker) -> dict[str, Any]:
    if worker.exits:
        worker.process.wait(LIMIT)
        return {"rank": worker.rank}

    def stuck() -> dict[str, Any] | None:
        answer = worker.ask()
        return answer if worker.is_stuck(answer) else None

    answer = wait_until(stuck)
    return {"rank": worker.rank, **answer, "stacks": worker.written_stacks()}


def without_paths(text: str) -> str:
    """Replace paths that depend on this machine."""
    import torch

    packages, library = str(Path(torch.__file__).parents[1]), os.path.dirname(os.__file__)
    for folder, name in (
        (packages, "/env/site-packages"),
        (library, "/usr/lib/python3.11"),
        (str(WORKER), "/job/train.py"),
    ):
        text = text.replace(folder, name)
    return text


def main() -> None:
    # The tests use the scenarios and not this function, so they do not need torch.
    import torch

    for name, scenario in SCENARIOS.items():
        ranks = json.loads(without_paths(json.dumps(record(scenario))))
        text = json.dumps({"torch": torch.__version__, "ranks": ranks}, indent=1)
        (RECORDED / f"{name}.json").write_text(text + "\n")
        print(name, len(text))


if __name__ == "__main__":
    main()
