"""Decide which etcd cluster the member of this agent belongs to. Pure functions.

Every endpoint of the job is a *seat*: the agent of that machine runs one member there. Membership is fixed: a
cluster has exactly one member for each seat, and no member is ever added or removed.

Each cluster has a random *incarnation*. It is part of the cluster's token, so members of two incarnations
never exchange Raft messages, and part of the members' names, so other seats can see it. A seat holds the data
of at most one incarnation. A member has *joined* once it has published its client address, which takes a
quorum.

- **SEAT-1** A member with its data continues as the same member, however long it was away.
- **SEAT-2** A seat whose data are gone never starts its former member again, because Raft relies on what a
  member has voted for and acknowledged.
- **SEAT-3** If a majority of the seats hold another incarnation, the one held here can never have a quorum
  again. Its data are discarded.
- **SEAT-4** Seats that have not joined converge: unless a majority agrees already, they choose the highest
  incarnation that is being formed. A seat without data enters an incarnation that already had a quorum only
  if a majority of the seats hold it.
- **SEAT-5** An etcd of another job is never touched: the names of members start with a label that is derived
  from the job's id and token.
"""

from __future__ import annotations

from elasticrs.job.value import Value
from elasticrs.rendezvous.endpoint import shown_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from dataclasses import KW_ONLY
    from typing import Any, TypeAlias

WORKERS = "elasticrs-workers"
"""Name of the etcd user that workers have, and of its role."""

_HEAD_START = 0.5
"""Seconds that each seat waits longer than the seat before it until it creates a cluster, so that usually
only one seat creates one.
"""


class Seat(Value):
    """Address of a member: a host without brackets, its client port, and its peer port."""

    host: str
    port: int
    peer_port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """URL for clients."""
        return self.url_at(self.host, self.port)

    @property
    def peer_url(self) -> str:
        """URL for the other members."""
        return self.url_at(self.host, self.peer_port)

    def url_at(self, host: str, port: int) -> str:
        """Return a URL with the given host and port, and with the same scheme as this seat."""
        return f"{self.scheme}://{shown_endpoint(host, port)}"


class Entry(Value):
    """A cluster member, as listed by one of the members.

    Args:
        name: name of the listed member.
        peer_urls: URLs at which the other members reach the listed member.
        has_joined: true if the listed member has published its client address.
    """

    name: str
    peer_urls: tuple[str, ...]
    _: KW_ONLY
    has_joined: bool

    @classmethod
    def read(cls, told: Any) -> Entry:
        """Read one entry of etcd's list of members.

        Raises:
            LookupError: a field is missing.
            TypeError: a field has another type.
            ValueError: a field has an invalid value.
        """
        return cls(str(told["name"]), tuple(told["peerURLs"]), has_joined=bool(told.get("clientURLs")))


class Stay(Value):
    """Run the member with the data that this seat holds."""


class Create(Value):
    """Start forming a cluster of a new incarnation."""


class Adopt(Value):
    """Discard the data of this seat, if there are any, and start without data as a member of the cluster with
    another incarnation.
    """

    incarnation: str


class Lost(Value):
    """Run no member, because its data are gone. The number says how many members are left."""

    left: int


class Wait(Value):
    """Take no decision yet. Ask the other seats again after a short time."""


class Refuse(Value):
    """Run no member, because of a configuration error; the text says why and what to do."""

    why: str


Step: TypeAlias = "Stay | Create | Adopt | Lost | Wait | Refuse"


class View(Value):
    """Facts on which the next step depends.

    Args:
        seats: all seats of the job.
        mine: index of this agent's seat.
        label: prefix of the names of this job's members.
        answers: for each seat the list of members that it returned, or ``None`` if it did not answer.
        held: incarnation of the data at this seat, or ``None`` if there are none.
        has_joined: true if the member with these data has joined its cluster.
        waited: seconds since this seat first checked the other seats.
    """

    seats: tuple[Seat, ...]
    mine: int
    label: str
    answers: Sequence[tuple[Entry, ...] | None]
    held: str | None = None
    has_joined: bool = False
    waited: float = 0.0


def label_of(run_id: str, prefix: str, token: bytes | None) -> str:
    """Return the prefix of the names of a job's members. It does not reveal the token."""
    return "elasticrs-" + _derived("label", run_id, prefix, token)[:16]


def password_of(run_id: str, prefix: str, token: bytes) -> str:
    """Return the password of etcd's user ``root``, which all agents can derive from the job's token."""
    return _derived("password", run_id, prefix, token)


def workers_password(run_id: str, prefix: str, token: bytes) -> str:
    """Return the password of etcd's user :data:`WORKERS`."""
    return _derived("workers", run_id, prefix, token)


def workers_prefix(run_id: str, prefix: str) -> str:
    """Return the prefix of all keys that workers use in a hosted etcd, including their session keys."""
    return f"{prefix}/workers/{_derived('prefix', run_id, prefix, None)[:16]}"


def _derived(what: str, run_id: str, prefix: str, token: bytes | None) -> str:
    import hashlib
    import hmac

    told = f"{what}\0{prefix}\0{run_id}".encode(errors="surrogateescape")
    return hmac.new(token or b"", told, hashlib.sha256).hexdigest()


def cluster_token(label: str, incarnation: str) -> str:
    """Return etcd's token of a cluster, from which etcd derives the ids of the cluster and its members."""
    return f"{label}-{incarnation}"


def name_of(label: str, incarnation: str, index: int) -> str:
    """Return the name of the member of a seat."""
    return f"{cluster_token(label, incarnation)}-{index}"


def initial_cluster(seats: Sequence[Seat], label: str, incarnation: str) -> str:
    """Return the members of a cluster in the format of etcd's option ``--initial-cluster``."""
    return ",".join(
        f"{name_of(label, incarnation, index)}={seat.peer_url}" for index, seat in enumerate(seats)
    )


def majority(seats: Sequence[Seat]) -> int:
    """Return the number of members that must be up for a quorum."""
    return len(seats) // 2 + 1


def next_step(view: View) -> Step:
    """Decide what the agent of the seat ``view.mine`` does next with its etcd member."""
    answers = {
        index: answer
        for index, answer in enumerate(view.answers)
        if answer is not None and index != view.mine
    }
    found = (misfit(view.seats, view.label, index, answer) for index, answer in answers.items())
    if (why := next((why for why in found if why is not None), None)) is not None:
        return Refuse(why)
    holders: dict[str, set[int]] = {}
    for index, answer in answers.items():
        holders.setdefault(_incarnation(view.label, answer), set()).add(index)
    lists = [*answers.items(), *([(view.mine, own)] if (own := view.answers[view.mine]) else [])]
    joined: dict[str, set[int]] = {}
    for _, answer in lists:
        joined.setdefault(_incarnation(view.label, answer), set()).update(_joined(view, answer))
    for each, at in holders.items():
        if len(at) >= majority(view.seats) and each != view.held:
            return Lost(len(at)) if view.mine in joined[each] else Adopt(each)
    if view.held is not None:
        is_settled = len(holders.get(view.held, ())) + 1 >= majority(view.seats)
        if view.has_joined or is_settled or joined.get(view.held):
            return Stay()
    forming = {each for each, members in joined.items() if not members}
    best = max(forming | ({view.held} if view.held is not None else set()), default=None)
    if best is not None:
        return Stay() if best == view.held else Adopt(best)
    if any(members and view.mine not in members for members in joined.values()):
        # A cluster that this seat never joined exists, but fewer than a majority of the seats have data of
        # that cluster. Wait until more seats have data of it.
        return Wait()
    return Create() if view.waited >= _HEAD_START * view.mine else Wait()


def misfit(seats: Sequence[Seat], label: str, index: int, answer: tuple[Entry, ...]) -> str | None:
    """Return why the etcd that answers at a seat is not a member of this job's cluster, or ``None``."""
    where = shown_endpoint(seats[index].host, seats[index].peer_port)
    if any(not _incarnation(label, (entry,)) for entry in answer):
        return foreign(where)
    urls = {seat.peer_url for seat in seats}
    strange = next((url for entry in answer for url in entry.peer_urls if url not in urls), None)
    if strange is None:
        return None
    return (
        f"the etcd at {where} has a member at {strange}, which is not in --rdzv-endpoint: all nodes have to "
        "have the same endpoints"
    )


def foreign(where: str) -> str:
    """Return the error message that another job's etcd uses an address."""
    return (
        f"an etcd that is not of this job answers at {where}: give each job ports of its own in "
        "--rdzv-endpoint (or another peer_port), and all nodes the same --rdzv-id and token"
    )


def _incarnation(label: str, answer: tuple[Entry, ...]) -> str:
    """Return the part of the members' names that says which start of the etcd cluster they belong to.

    The part is empty if the members belong to another job.
    """
    name = answer[0].name
    return name.removeprefix(f"{label}-").rpartition("-")[0] if name.startswith(f"{label}-") else ""


def _joined(view: View, answer: tuple[Entry, ...]) -> set[int]:
    """Return the seats whose members have joined, as far as the answering member knows."""
    by_url = {seat.peer_url: index for index, seat in enumerate(view.seats)}
    return {by_url[url] for entry in answer if entry.has_joined for url in entry.peer_urls if url in by_url}
