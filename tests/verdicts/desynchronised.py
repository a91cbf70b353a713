"""Runs gloo groups of 2 to 16 real ranks, in which one rank diverges in one of five ways, and collects their
evidence.
"""

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import NamedTuple

from helpers.forker import WORKERS, Forker
from helpers.procs import HANG, wait_until

from elasticrs._engine.hangs.diagnose import RankEvidence
from elasticrs._engine.hangs.flight_record import NoRecord

WORKER = WORKERS / "desynchronised.py"
KINDS = ("missing", "dead", "order", "size", "groups")
BOTH_NAMED = ("order", "size", "groups")
"""Kinds in which two ranks are a tie, because either of them may be wrong."""

LOOKS = 5
"""Voluntary context switches after which a thread of gloo, which polls, has looked for messages."""

SPUN_TICKS = 5
"""Clock ticks of processor time, 10 ms each, after which a thread of gloo has looked for messages without
sleeping. Gloo sometimes spins on a connection that a dead peer has closed, and polls thousands of times in a
tick.
"""

Step = tuple[str, "int | None", int]
"""An operation of ``workers/desynchronised.py``, the index of its group, and the number of elements."""

REDUCE, BARRIER = ("all_reduce", None, 4), ("barrier", None, 1)
LOAD, SPIN, EXIT = ("load", None, 1), ("spin", None, 1), ("exit", None, 1)


class Lost(NamedTuple):
    """A process group whose ranks get out of step.

    Args:
        kind: one of :data:`KINDS`.
        size: number of ranks.
        culprit: the rank that loses step.
        steps: collectives of the culprit, and of the other ranks.
        groups: groups besides the default one, by description and ranks.
    """

    kind: str
    size: int
    culprit: int
    steps: tuple[list, list]
    groups: list

    def of_ranks(self):
        """Return the steps of each rank, in the order of the ranks."""
        return [self.steps[rank != self.culprit] for rank in range(self.size)]


def drawn(seed):
    """Return a random group in which one rank diverges from the others."""
    source = random.Random(seed)
    kind = source.choice(KINDS)
    size = source.randrange(3 if kind in BOTH_NAMED else 2, 17)
    operations = [REDUCE, BARRIER, ("all_reduce", None, 16), ("all_gather", None, 4)]
    before, after = (source.choices(operations, k=source.randrange(1, 6)) for _ in range(2))
    own, others, groups = {
        "missing": ([LOAD], [REDUCE], []),
        "dead": ([EXIT], [REDUCE], []),
        "order": ([BARRIER, REDUCE], [REDUCE, BARRIER], []),
        "size": ([("all_reduce", None, 8)], [REDUCE], []),
        "groups": (
            [("all_reduce", 1, 4)],
            [("all_reduce", 0, 4)],
            [("dp", range(size)), ("tp", range(size))],
        ),
    }[kind]
    steps = [*before, *own, *after], [*before, *others, *after]
    return Lost(kind, size, source.randrange(size), steps, [(name, list(ranks)) for name, ranks in groups])


class Groups(Forker):
    """Runs groups one after another. Their ranks are forks of a process that has already imported torch."""

    def __init__(self):
        super().__init__(WORKER.name, env={"OMP_NUM_THREADS": "1"})

    def evidence(self, steps, groups, folder):
        """Run a group until all of its ranks are stuck, and return the evidence of all ranks.

        Args:
            steps: the steps of each rank.
            groups: groups besides the default one, by description and ranks.
            folder: folder for the files of the ranks.
        """
        plans = [
            {
                "rank": rank,
                "size": len(steps),
                "groups": groups,
                "steps": own,
                "store": f"{folder}/store",
                "stacks": f"{folder}/{rank}.stacks",
                "error_file": f"{folder}/{rank}.json",
            }
            for rank, own in enumerate(steps)
        ]
        pids = self._ask(plans)
        try:
            # A rank that spins never waits, so only the others show that the group is stuck.
            wait_until_stuck([pid for pid, own in zip(pids, steps, strict=True) if SPIN not in own])
            return [evidence_of(plan, pid) for plan, pid in zip(plans, pids, strict=True)]
        finally:
            self._ask("kill")

    def _ask(self, order):
        self.order(order)
        return json.loads(self.answers.readline())


def wait_until_stuck(pids):
    """Wait until all ranks are stuck: gloo's threads have polled for messages, and no other thread has run in
    the meantime.
    """
    pause, before = threading.Event(), None
    for _ in range(int(HANG / 0.1)):
        threads = [thread for pid in pids for thread in threads_of(pid)]
        polls = {thread.tid: thread for thread in threads if thread.name == "gloo_tcp_loop"}
        others = [(each.tid, each.state, each.switches) for each in threads if each.tid not in polls]
        if any(state not in "SZ" for _, state, _ in others):
            before = None
        elif before is None or others != before[0]:
            before = others, polls
        elif all(has_polled(before[1][tid], thread) for tid, thread in polls.items()):
            return
        pause.wait(0.1)
    raise AssertionError("the group did not get stuck")


class Thread(NamedTuple):
    """A thread of a process.

    Args:
        switches: voluntary and involuntary context switches.
        ticks: processor time.
    """

    tid: str
    name: str
    state: str
    switches: tuple[int, int]
    ticks: int


def has_polled(before, now):
    return now.switches[0] >= before.switches[0] + LOOKS or now.ticks >= before.ticks + SPUN_TICKS


def threads_of(pid):
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
            user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        except (FileNotFoundError, ProcessLookupError):
            continue  # The thread has exited.
        fields = dict(line.split(":\t") for line in lines if ":\t" in line)
        switches = int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"])
        yield Thread(task.name, fields["Name"], fields["State"][0], switches, int(user) + int(system))


def evidence_of(plan, pid):
    """Request the flight record and the stacks of a rank, as the core does, and return them."""
    rank, path = plan["rank"], Path(plan["error_file"])
    if next(threads_of(pid)).state == "Z":
        return RankEvidence(rank, f"node{rank // 8}", NoRecord.EXITED)
    stacks, record = Path(plan["stacks"]), Path(f"{path}.flight")
    os.kill(pid, signal.SIGRTMIN + 12)
    wait_until(lambda: stacks.read_text().endswith("in <module>\n"))
    os.close(os.open(f"{path}.flight_requests", os.O_WRONLY | os.O_NONBLOCK))
    wait_until(record.exists)
    header, *records = record.read_bytes().splitlines()
    groups = json.loads(header)["groups"]
    return RankEvidence(rank, f"node{rank // 8}", tuple(records), stacks.read_text(), groups, path.exists())
