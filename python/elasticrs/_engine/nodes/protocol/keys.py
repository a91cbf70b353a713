"""Names of a job's keys in the store.

A **member** is one registration of one agent process, and its name is ``<agent>/<incarnation>``. Names of
agents and members are never reused.
"""

from __future__ import annotations

from elasticrs._engine.nodes.transport.coordination import DeletePrefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.nodes.transport.coordination import Operation

WORKERS_STORES = "%workers/"
"""Key prefix for the addresses of the workers' stores. The agent of group rank 0 writes the address for each
round to a rendezvous store that serves all jobs. That rendezvous store itself reads these keys.
"""

_MAX_DIGITS = 15
_WORKERS = "#workers"


def workers_scope(run_id: str) -> str:
    """Return the prefix of all keys that a job's workers use for their own rendezvous."""
    return Keys(f"{run_id}{_WORKERS}").prefix[:-1]


def workers_job(run_id: str, job: str, number: int) -> str:
    """Return the job name under which the store keeps the workers' own rendezvous. ``job`` is the name of the
    agents' job, which starts with the run id. ``number`` distinguishes consecutive jobs of the same name.
    """
    return f"{run_id}{_WORKERS}{job.removeprefix(run_id)}.{number}"


def workers_keys(rendezvous: Rendezvous, job: str, number: int) -> Keys:
    """Return the keys of the workers' own rendezvous, for use by an agent; see :func:`workers_job`.

    An agent deletes the registrations of dead workers, so that the other workers do not have to wait until a
    lease expires. A worker cannot reliably detect the death of another worker, because a broken or refused
    connection does not prove it.
    """
    return Keys(workers_job(rendezvous.run_id, job, number))


def workers_of(agent: str) -> str:
    """Return the prefix that identifies this agent's workers among all members of the workers' rendezvous."""
    return f"{agent}-"


class Keys:
    """Names of the keys of one job.

    Args:
        run_id: run id that the user has given. ``%`` and ``/`` are escaped, so that the keys of different
            jobs never overlap.
    """

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
        """Return operations that delete the registrations and rank assignments of all members whose names
        start with ``prefix``.
        """
        return [DeletePrefix(self.node(prefix)), DeletePrefix(self.slot(prefix))]

    def forget_process(self, name: str) -> list[Operation]:
        return self.forget_members(f"{name}.")

    def table(self, form: str) -> str:
        return f"{self.tables}{form}/"

    def farewell(self, member: str) -> str:
        """Return the key that a member writes when it leaves on purpose. It is not attached to the member's
        lease, because a later leader needs it too.
        """
        return self.farewells + member

    def host(self, host: str) -> str:
        """Return the key prefix for the agents of one host. Each agent stores the identifier of its launch
        below this prefix, attached to its lease.
        """
        return f"{self.hosts}{_escaped(host)}/"

    def rank(self, node_rank: int) -> str:
        """Return the key of a node rank that was assigned by the user. Its value names the agent that holds
        the rank. The key is attached to that agent's lease.
        """
        return f"{self.ranks}{node_rank}"

    def forget_rounds(self) -> list[Operation]:
        """Return operations that delete the keys that a closed job no longer needs, because the store may
        outlive the job.
        """
        folders = (self.slots, self.tables, self.dones, self.evidences, self.farewells, self.refusal)
        return [DeletePrefix(each) for each in folders]

    def store(self, round: int) -> str:  # noqa: A002 -- the field's own word
        """Return the prefix of the keys in which the nodes of a round share user data.

        These keys are not below :attr:`prefix`, because leaders watch all keys below that prefix. A key of
        another job never has this prefix, because a ``%`` in a run id is escaped.
        """
        return f"{self.prefix[:-1]}%stores/{round}/"

    @property
    def job_store(self) -> str:
        """Prefix of the keys that all processes of a job share across rounds.

        For the workers' rendezvous, the prefix starts with :func:`workers_scope`, because the workers' token
        allows access only to keys below that prefix.
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
    """Return true if this key component is a valid member name. Other programs may write arbitrary keys, so
    this is not guaranteed.
    """
    agent, _, incarnation = name.rpartition("/")
    return bool(agent) and number_of(incarnation) is not None


def number_of(text: str) -> int | None:
    """Parse a key component as a number. Return ``None`` if it is not a number in the format used here."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number and (text[0] != "0" or text == "0") else None
