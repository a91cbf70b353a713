"""The place of a process in a job of a scheduler."""

from __future__ import annotations

from elasticrs.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Place(Value):
    """Nodes of a job, and the place of this process among them.

    Args:
        job: name of the job for messages, such as ``Slurm job 4711``.
        nodes: number of nodes; ``None`` if the scheduler does not say.
        node_rank: number of this node, from 0.
        host: name of the node with rank 0; empty if there is only this node.
        port: port at which the nodes meet on that host.
        run_id: name of this run for the rendezvous.
        workers: number of workers on this node, or a word for ``--nproc-per-node``; ``None`` if the scheduler
            does not say.
        problem: why the nodes cannot meet, and what to do about it; empty if they can. It matters only if the
            user has not said how they meet.
        notices: further lines for the user.
        elastic_notices: lines for a job that continues without a lost node.
        owned: options whose ``PET_`` variables the scheduler has set, and not the user; see
            :attr:`elasticrs.job.options.Option.dest`.
    """

    job: str
    nodes: int | None
    node_rank: int = 0
    host: str = ""
    port: int = 0
    run_id: str = ""
    workers: int | str | None = None
    problem: str = ""
    notices: Sequence[str] = ()
    elastic_notices: Sequence[str] = ()
    owned: frozenset[str] = frozenset()
