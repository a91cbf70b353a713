"""Names of a job's keys in the store.

A **member** is one registration of one agent process, and its name is ``<agent>/<incarnation>``. Names of
agents and members are never reused.
"""

from __future__ import annotations

from elasticrs.store.coordination import DeletePrefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.store.coordination import Operation

_MAX_DIGITS = 15
_WORKERS = "#workers"


def workers_scope(run_id: str) -> str:
    """Return the prefix of all keys that the workers of a job use for their own rendezvous."""
    return Keys(f"{run_id}{_WORKERS}").prefix[:-1]


def workers_job(run_id: str, job: str, number: int) -> str:
    """Return the job name that the workers' own rendezvous uses in the store.

    Args:
        run_id: run id of the agents' job.
        job: name of the agents' job in the store, which starts with the run id.
        number: number that distinguishes consecutive jobs of the same name.
    """
    return f"{run_id}{_WORKERS}{job.removeprefix(run_id)}.{number}"


class Keys:
    """Names of the keys of one job.

    Args:
        run_id: run id that the user has given. ``%`` and ``/`` are escaped, so that the keys of different
            jobs never overlap.
        root: prefix that is put before all keys.
    """

    __slots__ = (
        "dones",
        "evidences",
        "farewells",
        "head",
        "job",
        "nodes",
        "prefix",
        "ranks",
        "slots",
        "tables",
    )

    def __init__(self, run_id: str, root: str = "") -> None:
        escaped = run_id.replace("%", "%25").replace("/", "%2F")
        self.prefix = f"{root}/elasticrs/{escaped}/"
        self.job = self.prefix + "job"
        self.head = self.prefix + "head"
        self.nodes = self.prefix + "nodes/"
        self.slots = self.prefix + "slot/"
        self.tables = self.prefix + "table/"
        self.dones = self.prefix + "done/"
        self.evidences = self.prefix + "evidence/"
        self.farewells = self.prefix + "left/"
        self.ranks = self.prefix + "rank/"

    def node(self, member: str) -> str:
        """Return the key of a member's registration. The key is attached to the member's lease."""
        return self.nodes + member

    def slot(self, member: str) -> str:
        """Return the key of a member's slot, in which the leader assigns ranks to the member."""
        return self.slots + member

    def forget_members(self, prefix: str) -> list[Operation]:
        """Return operations that delete the registrations and slots of all members whose names start with
        ``prefix``.
        """
        return [DeletePrefix(self.node(prefix)), DeletePrefix(self.slot(prefix))]

    def table(self, form: str) -> str:
        """Return the prefix of the keys that contain the list of members of a proposed round."""
        return f"{self.tables}{form}/"

    def farewell(self, member: str) -> str:
        """Return the key that a member writes when it leaves on purpose. The key is not attached to the
        member's lease, because a later leader needs the key as well.
        """
        return self.farewells + member

    def rank(self, node_rank: int) -> str:
        """Return the key of a node rank that the user has assigned. The value of the key names the agent that
        has the rank. The key is attached to the lease of that agent.
        """
        return f"{self.ranks}{node_rank}"

    def forget_rounds(self) -> list[Operation]:
        """Return operations that delete the keys that are no longer needed once a job is closed, because the
        store may outlive the job.
        """
        folders = (self.slots, self.tables, self.dones, self.evidences, self.farewells)
        return [DeletePrefix(each) for each in folders]

    def store(self, round: int) -> str:  # noqa: A002 -- the field's own word
        """Return the key prefix of the store for user data that the nodes of one round share.

        These keys are not below :attr:`prefix`, because leaders watch all keys below that prefix. A key of
        another job never has this prefix, because a ``%`` in a run id is escaped.
        """
        return f"{self.prefix[:-1]}%stores/{round}/"

    @property
    def job_store(self) -> str:
        """Prefix of the keys that all processes of a job share, independent of rounds.

        For the workers' rendezvous, the prefix starts with :func:`workers_scope`, because the workers' token
        allows access only to keys below that prefix.
        """
        return f"{self.prefix[:-1]}%job/"

    def done(self, round: int, group_rank: int) -> str:  # noqa: A002 -- the field's own word
        """Return the key that a member writes when its workers have finished."""
        return f"{self.dones}{round}/{group_rank}"

    def evidence(self, round: int, group_rank: int) -> str:  # noqa: A002 -- the field's own word
        """Return the key under which a member stores its evidence for the diagnosis of a round."""
        return f"{self.evidences}{round}/{group_rank}"


def agent_of(member: str) -> str:
    """Return the name of the agent process of a member."""
    return member.rpartition("/")[0]


def incarnation_of(member: str) -> int:
    """Return the incarnation number of a member, which counts the registrations of its agent."""
    return int(member.rpartition("/")[2])


def is_member(name: str) -> bool:
    """Return true if this component of a key is a valid member name. The check is necessary, because other
    programs may write arbitrary keys.
    """
    agent, _, incarnation = name.rpartition("/")
    return bool(agent) and number_of(incarnation) is not None


def number_of(text: str) -> int | None:
    """Parse a part of a key as a number. Return ``None`` if it is not a number in the format used here."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number and (text[0] != "0" or text == "0") else None
