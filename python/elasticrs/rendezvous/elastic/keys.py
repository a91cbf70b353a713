"""Names of the keys that one job has in the store.

A **member** is ``<agent>/<incarnation>``: one registration of one agent process; neither part is used again.
"""

from __future__ import annotations

from elasticrs.store.coordination import DeletePrefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.store.coordination import Operation

_MAX_DIGITS = 15
_WORKERS = "#workers"


def workers_scope(run_id: str) -> str:
    """Return the prefix of all keys that the workers of a job use when they meet each other."""
    return Keys(f"{run_id}{_WORKERS}").prefix[:-1]


def workers_job(run_id: str, job: str, number: int) -> str:
    """Return the name of the job in which the workers of a job meet.

    Args:
        run_id: run id of the agents' job.
        job: name of the agents' job in the store, which begins with the run id.
        number: number that distinguishes consecutive jobs of the same name.
    """
    return f"{run_id}{_WORKERS}{job.removeprefix(run_id)}.{number}"


class Keys:
    """The names for one run.

    Args:
        run_id: the user's; what would end it early in a key is escaped, so that no job sees another's keys.
        root: prefix of all keys, including those outside of the job.
    """

    __slots__ = ("dones", "farewells", "head", "job", "nodes", "prefix", "ranks", "slots", "tables")

    def __init__(self, run_id: str, root: str = "") -> None:
        escaped = run_id.replace("%", "%25").replace("/", "%2F")
        self.prefix = f"{root}/elasticrs/{escaped}/"
        self.job = self.prefix + "job"
        self.head = self.prefix + "head"
        self.nodes = self.prefix + "nodes/"
        self.slots = self.prefix + "slot/"
        self.tables = self.prefix + "table/"
        self.dones = self.prefix + "done/"
        self.farewells = self.prefix + "left/"
        self.ranks = self.prefix + "rank/"

    def node(self, member: str) -> str:
        """Where a member registers, on its lease."""
        return self.nodes + member

    def slot(self, member: str) -> str:
        """What the leader tells one member."""
        return self.slots + member

    def forget_members(self, prefix: str) -> list[Operation]:
        """Return deletions of the registrations of all members whose names begin with ``prefix``."""
        return [DeletePrefix(self.node(prefix)), DeletePrefix(self.slot(prefix))]

    def table(self, form: str) -> str:
        """Prefix of the list of members of one proposed round."""
        return f"{self.tables}{form}/"

    def farewell(self, member: str) -> str:
        """What a member writes when it leaves on purpose; without a lease: the next leader needs it too."""
        return self.farewells + member

    def rank(self, node_rank: int) -> str:
        """Holder of a node rank that was given by hand, on its lease."""
        return f"{self.ranks}{node_rank}"

    def forget_rounds(self) -> list[Operation]:
        """Return deletions of what nobody needs of a job that is closed; its store may outlive it."""
        return [DeletePrefix(each) for each in (self.slots, self.tables, self.dones, self.farewells)]

    def store(self, round: int) -> str:  # noqa: A002 -- the field's own word
        """Return the prefix of the keys that users store for the nodes of one round.

        These keys are not below :attr:`prefix`, because leaders watch all keys there. They cannot belong to
        another job, because a ``%`` in a run id is escaped.
        """
        return f"{self.prefix[:-1]}%stores/{round}/"

    @property
    def job_store(self) -> str:
        """Prefix of the keys that all processes of a job share, independent of rounds.

        It begins with :func:`workers_scope`, because the workers' token only allows access to such keys.
        """
        return f"{self.prefix[:-1]}%job/"

    def done(self, round: int, group_rank: int) -> str:  # noqa: A002 -- the field's own word
        """What a member writes when its workers have finished."""
        return f"{self.dones}{round}/{group_rank}"


def agent_of(member: str) -> str:
    """The agent process of a member."""
    return member.rpartition("/")[0]


def incarnation_of(member: str) -> int:
    """Which registration of its agent a member is."""
    return int(member.rpartition("/")[2])


def is_member(name: str) -> bool:
    """True if a part of a key names a member; other programs may write anything."""
    agent, _, incarnation = name.rpartition("/")
    return bool(agent) and number_of(incarnation) is not None


def number_of(text: str) -> int | None:
    """The number that a part of a key stands for; ``None``: it is not one, as it is written here."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number and (text[0] != "0" or text == "0") else None
