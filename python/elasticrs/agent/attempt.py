"""One attempt, as it was planned and as it went."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticrs._core import WorkerExited
    from elasticrs.logs import LogPaths
    from elasticrs.ports import ReservedPort
    from elasticrs.ranks import WorkerRanks


class Plan:
    """What the rendezvous gave for an attempt.

    Args:
        ranks: of this node's workers.
        master_addr: where rank 0 hosts the store.
        master_port: its port.
        reserved: holds the port for as long as the attempt lasts, when it is ours.
    """

    __slots__ = ("master_addr", "master_port", "ranks", "reserved")

    def __init__(
        self,
        ranks: Sequence[WorkerRanks],
        master_addr: str,
        master_port: int,
        reserved: ReservedPort | None = None,
    ) -> None:
        self.ranks = ranks
        self.master_addr = master_addr
        self.master_port = master_port
        self.reserved = reserved

    def close(self) -> None:
        """Give the port back. Idempotent."""
        if self.reserved is not None:
            self.reserved.close()


class Attempt:
    """What happened in one attempt.

    Attributes:
        round: its number.
        restarts: charged restarts when it began.
        plan: ranks and addresses.
        paths: its files.
        pids: of the workers, by local rank.
        exits: by local rank, in the order in which they were seen.
        first_failure: the local rank that failed first.
        oom_kills: the counters of the OOM killer when it started.
        oom_kills_after: the same counters when it had failed.
        signalled: siblings that were signalled for it.
        stamps: ``started``, ``failure_seen``, ``siblings_signalled``, ``ended``: monotonic nanoseconds.
    """

    __slots__ = (
        "exits",
        "first_failure",
        "nursery_exitcode",
        "nursery_hung",
        "oom_kills",
        "oom_kills_after",
        "paths",
        "pids",
        "plan",
        "restarts",
        "round",
        "signalled",
        "stamps",
    )

    def __init__(self, round: int, restarts: int, plan: Plan) -> None:  # noqa: A002 -- the field's own word
        self.round = round
        self.restarts = restarts
        self.plan = plan
        self.paths: LogPaths | None = None
        self.pids: list[int] = []
        self.exits: dict[int, WorkerExited] = {}
        self.first_failure: int | None = None
        self.oom_kills: dict[str, int] = {}
        self.oom_kills_after: dict[str, int] = {}
        self.signalled = 0
        self.nursery_exitcode: int | None = None
        self.nursery_hung = False
        self.stamps: dict[str, int] = {}

    def failed_exits(self) -> list[WorkerExited]:
        """The workers that did not exit with 0, the first failure first, the others as they were seen."""
        failed = [worker for worker in self.exits.values() if worker.exitcode != 0]
        return sorted(failed, key=lambda worker: (worker.local_rank != self.first_failure, worker.seen_ns))
