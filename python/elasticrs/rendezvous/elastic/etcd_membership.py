"""Pure functions that decide which etcd cluster this agent's etcd member joins.

Every endpoint of the job is a *seat*: an agent on that machine runs one etcd member there. Membership is
fixed: a cluster has exactly one member for each seat, and members are never added or removed.

Each new cluster gets a random name, its *incarnation*. The incarnation is part of the cluster's token, so
that members of two incarnations never exchange Raft messages. It is also part of the members' names, so that
other seats can see it. A seat holds the data of at most one incarnation. A member has *joined* once it has
published its client address, which requires a quorum.

- **SEAT-1** A member that still has its data continues as the same member, however long it was down.
- **SEAT-2** If the data of a seat are lost, the member that had them is never started again, because Raft
  relies on the votes and acknowledgements that a member has stored.
- **SEAT-3** If a majority of the seats hold another incarnation, the incarnation at this seat can never have
  a quorum again. Its data are discarded.
- **SEAT-4** Seats that have not joined a cluster agree on one incarnation: the one that a majority of the
  seats hold, or else the highest one that is being formed. A seat without data joins an incarnation that has
  already had a quorum only if a majority of the seats hold it.
- **SEAT-5** An etcd of another job is never modified. Its members are recognized by their names, which start
  with a label that is derived from the job's id and token.
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
"""Name of the etcd user for workers, and of that user's role."""

_HEAD_START = 0.5
"""Delay in seconds before a seat creates a cluster, multiplied by the index of the seat. The different delays
make it likely that only one seat creates a cluster.
"""


class Seat(Value):
    """A seat: the address of an etcd member, consisting of its host (without brackets), client port, peer
    port, and URL scheme.
    """

    host: str
    port: int
    peer_port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """URL of the member for clients."""
        return self.url_at(self.host, self.port)

    @property
    def peer_url(self) -> str:
        """URL at which the other members reach this member."""
        return self.url_at(self.host, self.peer_port)

    def url_at(self, host: str, port: int) -> str:
        """Return the URL for a host and port, with the scheme (``http`` or ``https``) of this etcd member."""
        return f"{self.scheme}://{shown_endpoint(host, port)}"


class Entry(Value):
    """One entry in the list of cluster members that an etcd member returns.

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
    """Decision to start the etcd member with its existing data."""


class Create(Value):
    """Decision to create a new cluster."""


class Adopt(Value):
    """Decision to discard any existing data of the etcd member, and to join the cluster ``incarnation``
    without data.
    """

    incarnation: str


class Lost(Value):
    """Decision not to run a member, because its data have been lost. ``left`` is the number of other members
    that responded.
    """

    left: int


class Wait(Value):
    """Decision to wait briefly, and then to query the job's other etcd members again."""


class Refuse(Value):
    """Decision not to run a member, because of a configuration error. ``why`` describes the error and how to
    fix it.
    """

    why: str


Step: TypeAlias = "Stay | Create | Adopt | Lost | Wait | Refuse"


class View(Value):
    """Input for :func:`next_step`: the state of this agent's etcd member, and the responses of the other
    members.

    Args:
        seats: all seats of the job.
        mine: index of this agent's seat.
        label: prefix of the names of this job's members.
        answers: list of cluster members that each seat returned; ``None`` for a seat that did not respond.
        held: incarnation of the data at this seat; ``None`` if there are no data.
        has_joined: true if the member whose data are at this seat has joined its cluster.
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
    """Return the name prefix of a job's etcd members. The prefix does not reveal the job's token."""
    return "elasticrs-" + _derived("label", run_id, prefix, token)[:16]


def password_of(run_id: str, prefix: str, token: bytes) -> str:
    """Return the password of etcd's user ``root``. All agents derive it from the job's token."""
    return _derived("password", run_id, prefix, token)


def workers_password(run_id: str, prefix: str, token: bytes) -> str:
    """Return the password of etcd's user :data:`WORKERS`."""
    return _derived("workers", run_id, prefix, token)


def workers_prefix(run_id: str, prefix: str) -> str:
    """Return the prefix of all keys that workers use in a hosted etcd. This includes the keys of their
    sessions.
    """
    return f"{prefix}/workers/{_derived('prefix', run_id, prefix, None)[:16]}"


def _derived(what: str, run_id: str, prefix: str, token: bytes | None) -> str:
    import hashlib
    import hmac

    told = f"{what}\0{prefix}\0{run_id}".encode(errors="surrogateescape")
    return hmac.new(token or b"", told, hashlib.sha256).hexdigest()


def cluster_token(label: str, incarnation: str) -> str:
    """Return the token of a cluster. Etcd derives the ids of the cluster and its members from it."""
    return f"{label}-{incarnation}"


def name_of(label: str, incarnation: str, index: int) -> str:
    """Return the name of the job's etcd member with this index."""
    return f"{cluster_token(label, incarnation)}-{index}"


def initial_cluster(seats: Sequence[Seat], label: str, incarnation: str) -> str:
    """Return the members of a cluster in the format of etcd's ``--initial-cluster`` option."""
    return ",".join(
        f"{name_of(label, incarnation, index)}={seat.peer_url}" for index, seat in enumerate(seats)
    )


def majority(seats: Sequence[Seat]) -> int:
    """Return the number of members required for a quorum."""
    return len(seats) // 2 + 1


def next_step(view: View) -> Step:
    """Decide the next step for this agent's etcd member."""
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
        # Wait, because the job already has a cluster and this etcd member has never joined it. Joining
        # requires that a majority of the members hold the cluster's data (rule SEAT-4).
        return Wait()
    return Create() if view.waited >= _HEAD_START * view.mine else Wait()


def misfit(seats: Sequence[Seat], label: str, index: int, answer: tuple[Entry, ...]) -> str | None:
    """Return an error message if the etcd member at an endpoint does not belong to this job's cluster;
    ``None`` if it does.
    """
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
    """Return the error message for an address at which another job's etcd responds."""
    return (
        f"an etcd that is not of this job answers at {where}: give each job ports of its own in "
        "--rdzv-endpoint (or another peer_port), and all nodes the same --rdzv-id and token"
    )


def _incarnation(label: str, answer: tuple[Entry, ...]) -> str:
    """Extract the cluster's random name (incarnation) from the name of its first member. Return an empty
    string if the member belongs to another job.
    """
    name = answer[0].name
    return name.removeprefix(f"{label}-").rpartition("-")[0] if name.startswith(f"{label}-") else ""


def _joined(view: View, answer: tuple[Entry, ...]) -> set[int]:
    """Return the indices of the endpoints whose etcd member has joined the cluster. ``answer`` is the list of
    members that etcd returned.
    """
    by_url = {seat.peer_url: index for index, seat in enumerate(view.seats)}
    return {by_url[url] for entry in answer if entry.has_joined for url in entry.peer_urls if url in by_url}
