"""Detect a scheduler's job from environment variables: its nodes, this process's position among them, and the
address of the rendezvous.

Each module reads the environment and returns a :class:`.Place`.
"""

from __future__ import annotations

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MAX_DIGITS = 18
"""Maximum number of digits of a number in a variable. Longer ones cannot be numbers of a scheduler."""


WORKER_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable that elasticrun and torchrun set for each worker, and that no scheduler sets."""


def number_in(text: str) -> int | None:
    """Parse the value of a variable as a number. Return ``None`` if it is not a number."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if is_number else None


class Place(Value):
    """Job of a scheduler such as Slurm, and the rank of this node in the job.

    Args:
        job: name of the job for messages, such as ``Slurm job 4711``.
        nodes: number of nodes; ``None`` if unknown.
        node_rank: rank of this node, starting from 0.
        host: name of the node with rank 0; empty if this node is the only one, or if the name is unknown.
        port: port on ``host`` at which the nodes meet.
        run_id: run id for the rendezvous.
        workers: number of workers on this node, or a word that ``--nproc-per-node`` accepts; ``None`` if
            unknown.
        problem: reason why the nodes cannot meet, with a remedy; empty if they can. The problem is ignored if
            the user has set the number of nodes and the meeting point.
        notices: further lines for the user.
        elastic_notices: lines that are shown only if the job can continue without a lost node.
        owned: names of the options whose ``PET_`` variables were set by the scheduler, not by the user; see
            :attr:`.Option.dest`.
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


def place_of(environ: Mapping[str, str], pid: int) -> Place | None:
    """Return the position of this process in a scheduler's job; ``None`` if no such job is detected.

    Args:
        environ: environment variables of this process.
        pid: pid of this process.
    """
    # Check for Slurm first, because Slurm nodes can themselves run in Kubernetes pods.
    if environ.get("SLURM_JOB_ID"):
        from elasticrs._engine.cli.schedulers import slurm

        return slurm.place_of(environ, pid)
    from elasticrs._engine.cli.schedulers import kubernetes

    return kubernetes.place_of(environ)
