"""Names of a job's keys in the store. A **member** is one registration of an agent process, named
``<agent>/<incarnation>``. Names of agents and members are never reused.
"""

from __future__ import annotations

from elasticrs._engine.nodes.transport.coordination import DeletePrefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.nodes.transport.coordination import Operation

WORKERS_STORES = "%workers/"
"""Key prefix for addresses of workers' stores. A rendezvous store that serves all jobs reads these keys."""

_MAX_DIGITS = 15
_WORKERS = "#workers"


def workers_scope(run_id: str) -> str:
    """Return the prefix of all keys of the workers' own rendezvous."""
    return Keys(f"{run_id}{_WORKERS}").prefix[:-1]


def workers_job(run_id: str, job: str, number: int) -> str:
    """Return the job name of the workers' own rendezvous. ``number`` distinguishes jobs of the same name."""
    return f"{run_id}{_WORKERS}{job.removeprefix(run_id)}.{number}"


def workers_keys(rendezvous: Rendezvous, job: str, number: int) -> Keys:
    """Return the keys of the workers' own rendezvous. Agents use them to delete the registrations of dead
    workers. Workers cannot do that, because a broken or refused connection does not prove the death of
    another worker.
    """
    return Keys(workers_job(rendezvous.run_id, job, number))


def workers_of(agent: str) -> str:
    """Return the prefix of the names that the agent's workers have in their own rendezvous."""
    return f"{agent}-"


class Keys:
    """Names of a job's keys. ``%`` and ``/`` in the run id are escaped, so jobs never share keys."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"/elasticrs/{_escaped(run_id)}/"
        self.job = self.prefix + "job"
        self.head = self.prefix + "head"
        self.nodes = self.prefix + "nodes/"
        self.slots = self.prefix + "slot/"
        self.tables = self.prefix + "table/"
        self.dones = self.prefix + "done/"
        self.evidences = self.prefix + "evidence/"
        self.farewells = self.prefix + "left/"
        self.ranks = self.prefix + "rank/"
        self.hosts = self.prefix + "host/"
        self.refusal = self.prefix + "refused"

    def node(self, member: str) -> str:
        return self.nodes + member

    def slot(self, member: str) -> str:
        return self.slots + member

    def forget_members(self, prefix: str) -> list[Operation]:
        """Return operations that delete all members whose names start with ``prefix``."""
        return [DeletePrefix(self.node(prefix)), DeletePrefix(self.slot(prefix))]

    def forget_process(self, name: str) -> list[Operation]:
        return self.forget_members(f"{name}.")

    def table(self, form: str) -> str:
        return f"{self.tables}{form}/"

    def farewell(self, member: str) -> str:
        """Return the key that says that a member leaves on purpose. It has no lease, because later leaders
        need it.
        """
        return self.farewells + member

    def host(self, host: str) -> str:
        """Return the prefix of a host's leased keys, in which each agent identifies its launch."""
        return f"{self.hosts}{_escaped(host)}/"

    def rank(self, node_rank: int) -> str:
        """Return the key of a node rank. It names the agent that has the rank, and has that agent's lease."""
        return f"{self.ranks}{node_rank}"

    def forget_rounds(self) -> list[Operation]:
        """Return operations that delete a closed job's keys of its rounds, because the store may outlive the
        job.
        """
        folders = (self.slots, self.tables, self.dones, self.evidences, self.farewells, self.refusal)
        return [DeletePrefix(each) for each in folders]

    def store(self, round: int) -> str:  # noqa: A002 -- the field's own word
        """Return the prefix of the data that the nodes of a round share.

        This prefix is not below :attr:`prefix`, because leaders watch all keys there. It differs for each
        job.
        """
        return f"{self.prefix[:-1]}%stores/{round}/"

    @property
    def job_store(self) -> str:
        """Prefix of the keys that a job's processes share across all rounds.

        For workers it is below :func:`workers_scope`, because their token allows no other keys.
        """
        return f"{self.prefix[:-1]}%job/"

    def done(self, round: int, group_rank: int) -> str:  # noqa: A002 -- the field's own word
        return f"{self.dones}{round}/{group_rank}"

    def evidence(self, round: int, group_rank: int) -> str:  # noqa: A002 -- the field's own word
        return f"{self.evidences}{round}/{group_rank}"


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


def agent_of(member: str) -> str:
    return member.rpartition("/")[0]


def incarnation_of(member: str) -> int:
    return int(member.rpartition("/")[2])


def is_member(name: str) -> bool:
    """Return true if this key component is a valid member name. Other programs may write any keys."""
    agent, _, incarnation = name.rpartition("/")
    return bool(agent) and number_of(incarnation) is not None


def number_of(text: str) -> int | None:
    """Parse a key component as a number. Return ``None`` if it is not a number in the format used here."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number and (text[0] != "0" or text == "0") else None
