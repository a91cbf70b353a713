"""Record the evidence that the ranks of real gloo groups report when they get stuck.

``PYTHONPATH=tests python -m diagnosis.recording`` writes the files in ``recorded``, one for each of
:data:`SCENARIOS`. They have to be written again only if torch changes the format of its flight recorder.
"""

import json
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from verdicts.desynchronised import EXIT, LOAD, SPIN, WORKER, Groups, Step

from elasticrs._engine.hangs.diagnose import RankEvidence
from elasticrs._engine.hangs.flight_record import NoRecord

RECORDED = Path(__file__).resolve().parent / "recorded"


class Scenario(NamedTuple):
    """The steps of each rank."""

    size: int
    steps: dict[int, list[Step]]
    """The steps of each rank. ``-1``: those of all other ranks."""
    groups: list[tuple[str, list[int]]] = []  # noqa: RUF012 -- a named tuple's default is never changed

    def of_ranks(self) -> list[list[Step]]:
        """Return the steps of each rank, in the order of the ranks."""
        return [self.steps.get(rank, self.steps.get(-1, [])) for rank in range(self.size)]


def reduce(elements: int = 4, group: int | None = None) -> Step:
    return ("all_reduce", group, elements)


def barrier(group: int | None = None) -> Step:
    return ("barrier", group, 1)


def gather(elements: int = 4) -> Step:
    return ("all_gather", None, elements)


RECEIVE: Step = ("receive", None, 4)

TENSOR_AND_DATA = [("tp", [0, 1]), ("tp", [2, 3]), ("dp", [0, 2]), ("dp", [1, 3])]


def tensor_and_data(rank: int, *, stuck: int) -> list[Step]:
    """Return two steps of a rank in a tensor-parallel and a data-parallel group. The rank ``stuck`` hangs in
    its data loader before the second step.
    """
    step = [reduce(group=rank // 2), reduce(8, group=2 + rank % 2)]
    return [*step, *([LOAD] if rank == stuck else []), *step]


def in_pairs(rank: int, *, skips: bool) -> list[Step]:
    """Return two steps of a rank in a mesh. If ``skips`` is true, the rank skips a tensor-parallel reduce in
    the second step.
    """
    tensor, data = reduce(group=rank // 2), reduce(8, group=2 + rank % 2)
    return [tensor, tensor, data, *([] if skips else [tensor]), tensor, data, barrier()]


SCENARIOS = {
    "missing_rank": Scenario(8, {5: [reduce(), barrier(), LOAD], -1: [reduce(), barrier(), reduce()]}),
    "busy_rank": Scenario(2, {1: [reduce(), SPIN], -1: [reduce(), reduce()]}),
    "skipped": Scenario(
        4, {2: [reduce(), barrier(), barrier(), gather()], -1: [reduce(), barrier(), reduce(), gather()]}
    ),
    "wrong_order": Scenario(4, {3: [reduce(), barrier(), reduce()], -1: [reduce(), reduce(), barrier()]}),
    "wrong_size": Scenario(4, {2: [reduce(), reduce(8), barrier()], -1: [reduce(), reduce(), barrier()]}),
    "two_against_two": Scenario(
        4, {0: [reduce(), barrier()], 2: [reduce(), barrier()], -1: [reduce(), reduce()]}
    ),
    "groups": Scenario(4, {rank: tensor_and_data(rank, stuck=3) for rank in range(4)}, TENSOR_AND_DATA),
    "pairs": Scenario(4, {rank: in_pairs(rank, skips=rank == 1) for rank in range(4)}, TENSOR_AND_DATA),
    "two_missing": Scenario(4, {1: [reduce(), LOAD], 2: [reduce(), LOAD], -1: [reduce(), reduce()]}),
    "dead_rank": Scenario(4, {1: [reduce(), EXIT], -1: [reduce(), reduce()]}),
    "receiving": Scenario(4, {0: [reduce(), RECEIVE], 1: [reduce(), LOAD], -1: [reduce(), barrier()]}),
}


def record(groups: Groups, scenario: Scenario) -> list[dict[str, Any]]:
    """Run a group until it is stuck, and return the evidence of each rank: ``rank``, ``record``, ``groups``,
    ``raised`` and ``stacks``, or only ``rank`` for a rank that has exited.
    """
    with tempfile.TemporaryDirectory() as folder:
        return [as_json(each) for each in groups.evidence(scenario.of_ranks(), scenario.groups, folder)]


def as_json(evidence: RankEvidence) -> dict[str, Any]:
    if isinstance(evidence.records, NoRecord):
        return {"rank": evidence.rank}
    (record,) = evidence.records
    return {
        "rank": evidence.rank,
        "record": record.decode(),
        "groups": evidence.groups,
        "raised": evidence.has_raised,
        "stacks": evidence.stacks,
    }


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

    with closing(Groups()) as groups:
        for name, scenario in SCENARIOS.items():
            ranks = json.loads(without_paths(json.dumps(record(groups, scenario))))
            text = json.dumps({"torch": torch.__version__, "ranks": ranks}, indent=1)
            (RECORDED / f"{name}.json").write_text(text + "\n")
            print(name, len(text))


if __name__ == "__main__":
    main()
