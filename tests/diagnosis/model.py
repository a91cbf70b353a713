"""A model of ranks that run collectives. One rank does something different from the others."""

import json
import random
from typing import NamedTuple

from elasticrs._engine.hangs.diagnose import RankEvidence

Operation = tuple[int, str, int]
"""Index of the group, name, number of elements."""

STOP: Operation = (-1, "stop", 0)
FAULTS = ("stop", "skip", "extra", "size", "operation")


class Job(NamedTuple):
    """The groups of a simulated job, and the operations that each rank calls."""

    groups: list[tuple[str, list[int]]]
    programs: list[list[Operation]]


def mesh(rows: int, columns: int) -> list[tuple[str, list[int]]]:
    """Return the default group and the groups of a two-dimensional mesh."""
    size = rows * columns
    across = [("tp", list(range(row * columns, (row + 1) * columns))) for row in range(rows)]
    down = [("dp", list(range(column, size, columns))) for column in range(columns)]
    return [("default_pg", list(range(size))), *across, *down]


def program(source: random.Random, length: int) -> list[tuple[str, str, int]]:
    """Return random steps for all ranks: the kind of group, the operation, and the number of elements."""
    kinds = source.choices(["default_pg", "tp", "dp"], [1, 3, 3], k=length)
    names = source.choices(["all_reduce", "all_gather", "broadcast", "barrier"], [4, 2, 1, 1], k=length)
    return [(kind, name, source.choice([4, 8, 16])) for kind, name in zip(kinds, names, strict=True)]


def job(groups: list[tuple[str, list[int]]], steps: list[tuple[str, str, int]]) -> Job:
    """Return a job in which all ranks execute the same steps, each rank in the groups that contain it."""
    programs: list[list[Operation]] = []
    for rank in range(len(groups[0][1])):
        own = {kind: index for index, (kind, members) in enumerate(groups) if rank in members}
        programs.append([(own[kind], name, elements) for kind, name, elements in steps])
    return Job(groups, programs)


def with_fault(healthy: Job, rank: int, at: int, fault: str) -> Job:
    """Return the same job, except that one rank does something different at one step."""
    calls = list(healthy.programs[rank])
    group, name, elements = calls[at]
    if fault == "stop":
        calls[at:] = [STOP]
    elif fault == "skip":
        del calls[at]
    elif fault == "extra":
        calls.insert(at, (group, "all_reduce", 2))
    elif fault == "size":
        calls[at] = (group, name, elements + 1)
    elif fault == "operation":
        calls[at] = (group, "barrier" if name != "barrier" else "all_reduce", elements)
    programs = [calls if other == rank else own for other, own in enumerate(healthy.programs)]
    return Job(healthy.groups, programs)


class Run:
    """A simulation of the job, run until no rank can advance."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.next = [0] * len(job.programs)
        """Index of the operation that a rank waits in, or carries out next."""
        self.called: list[list[tuple[int, int, Operation]]] = [[] for _ in job.programs]
        """Group, number and call of each collective of a rank."""
        self.complete: set[tuple[int, int, int]] = set()
        """Rank, group and number of each collective that has completed."""
        while sum(self._advance(rank) for rank in range(len(job.programs))):
            continue

    def _advance(self, rank: int) -> bool:
        """Start the next operation of a rank, or complete the operation that it waits in. Return true if
        either is possible.
        """
        calls = self.job.programs[rank]
        waits = bool(self.called[rank]) and (rank, *self.called[rank][-1][:2]) not in self.complete
        if waits:
            group, number, _ = self.called[rank][-1]
            found = {
                call for other in self.job.groups[group][1] for call in [self._call(other, group, number)]
            }
            if len(found) > 1 or None in found:
                return False
            self.complete.add((rank, group, number))
            return True
        if self.next[rank] == len(calls) or calls[self.next[rank]] == STOP:
            return False
        operation = calls[self.next[rank]]
        self.next[rank] += 1
        number = sum(group == operation[0] for group, _, _ in self.called[rank]) + 1
        self.called[rank].append((operation[0], number, operation))
        return True

    def _call(self, rank: int, group: int, number: int) -> tuple[str, int] | None:
        for own, at, (_, name, elements) in self.called[rank]:
            if (own, at) == (group, number):
                return name, 0 if name == "barrier" else elements
        return None

    def is_stuck(self) -> bool:
        """Return true if a rank waits in a collective."""
        return any(
            (rank, group, number) not in self.complete
            for rank, calls in enumerate(self.called)
            for group, number, _ in calls
        )

    def evidence(self, *, knows_groups: bool = True) -> list[RankEvidence]:
        """Return the evidence that the ranks would report."""
        return [self._evidence(rank, knows_groups) for rank in range(len(self.called))]

    def _evidence(self, rank: int, knows_groups: bool) -> RankEvidence:
        entries = [
            entry(
                record_id=index,
                group=(str(group), self.job.groups[group][0]),
                number=number,
                name=f"gloo:{name}",
                sizes=[] if name == "barrier" else [[elements]],
                retired=(rank, group, number) in self.complete,
            )
            for index, (group, number, (_, name, elements)) in enumerate(self.called[rank])
        ]
        own = {str(index): members for index, (_, members) in enumerate(self.job.groups) if rank in members}
        return RankEvidence(rank, f"node{rank // 8}", (dump(entries),), None, own if knows_groups else {})


def entry(*, record_id=0, group=("0", "default_pg"), number=1, name="gloo:all_reduce", sizes=None, **others):
    """Return an entry in the format that torch writes."""
    sizes = [[4]] if sizes is None else sizes
    return {
        "record_id": record_id,
        "pg_id": int(group[0]) if group[0].isdigit() else 0,
        "process_group": list(group),
        "thread_name": "python",
        "thread_id": "140462178757504",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": 1_795_654_340_610_794_792,
        "input_sizes": sizes,
        "input_dtypes": ["Float"] * len(sizes),
        "output_sizes": sizes,
        "output_dtypes": ["Float"] * len(sizes),
        "state": "scheduled",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": False,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **others,
    }


def dump(entries, **others):
    """Return a flight record in the format that torch writes with gloo."""
    config = {"": {"desc": "", "name": "", "ranks": "[0, 1]"}}
    record = {"version": "2.10", "comm_lib_version": "", "pg_config": config, "pg_status": {}, **others}
    return json.dumps({**record, "entries": entries} if entries else record).encode()
