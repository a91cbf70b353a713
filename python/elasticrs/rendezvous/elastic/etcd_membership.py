"""What the host of a member of etcd does next so that it belongs to the job's cluster; pure.

The endpoints of the job are *seats*: at each of them one member runs. Its data are gone when its agent ends,
so a member that comes back is another one: it takes part under a new id. Raft counts votes by id, and one
that forgets its vote or what it has acknowledged breaks what Raft promises.

- **MEMB-1** A cluster is made by all seats at once, and only when most of them, this one included, are
  known not to be members of one: a cluster with a quorum would have one among them. A member belongs to one
  as soon as it has published where its clients connect: that takes a quorum.
- **MEMB-2** Into a cluster that is there, a seat comes as a learner, which has no vote, under an id of its
  own. What was at the seat before is removed first. It gets its vote when it has caught up. A seat that the
  cluster still waits for, and that may have voted, comes in this way as soon as the others can do without it.
- **MEMB-3** A learner that has gone is removed by the next seat that wants to come: etcd allows one at a
  time.
- **MEMB-4** Whoever leaves, or gives up, takes its own member out, and before that voters that are known to
  be dead, since their machines refuse the connection: with them counted, those that stay might be no quorum.
- **MEMB-5** What a learner lists is not believed until it has caught up: first it lists those with which it
  was started, and then members of the past. Until then some of them have names that no member publishes.
- **MEMB-6** An etcd that is not of this job is left alone: the names of members begin with a label that is
  made from the name of the job and its token.
"""

from __future__ import annotations

from elasticrs._value import Value
from elasticrs.rendezvous.endpoint import shown_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from dataclasses import KW_ONLY
    from typing import Any, TypeAlias


_LATER = "id"
"""How the names of members begin that have come later, behind the label."""


class Seat(Value):
    """Where one member is: a host without brackets, and its ports for clients and for other members."""

    host: str
    port: int
    peer_port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """For clients."""
        return self.url_at(self.host, self.port)

    @property
    def peer_url(self) -> str:
        """For other members."""
        return self.url_at(self.host, self.peer_port)

    def url_at(self, host: str, port: int) -> str:
        """The same elsewhere."""
        return f"{self.scheme}://{shown_endpoint(host, port)}"


class Entry(Value):
    """A member as the others list it.

    Args:
        id: which it has in the cluster.
        name: empty until a learner has started.
        peer_urls: where other members reach it.
        has_published: it has told where clients connect, so it has been part of a cluster with a quorum.
        is_learner: it has no vote yet.
    """

    id: int
    name: str
    peer_urls: tuple[str, ...]
    _: KW_ONLY
    has_published: bool
    is_learner: bool = False

    @classmethod
    def read(cls, told: Any) -> Entry:
        """Read one of the list that a member gives to another one, or of the answer to a change.

        Raises:
            LookupError: something is missing.
            TypeError: it is something else.
            ValueError: the same.
        """
        return cls(
            int(told["id"] if "id" in told else told["ID"]),
            str(told.get("name", "")),
            tuple(told["peerURLs"]),
            has_published=bool(told.get("clientURLs")),
            is_learner=bool(told.get("isLearner", False)),
        )


class Bootstrap(Value):
    """Make the cluster, as all others do."""


class Remove(Value):
    """Ask for the removal of a member."""

    id: int


class Add(Value):
    """Ask for a learner at this seat, and start it."""


class Promote(Value):
    """Ask for a vote for this learner."""

    id: int


class Belongs(Value):
    """The member of this seat has its vote."""


class StartOver(Value):
    """The cluster of this seat's learner is gone, or has removed it: forget the learner."""


class Out(Value):
    """No member of this seat is in the cluster any more, or no other one is."""


class Wait(Value):
    """Look again in a moment."""


class Refuse(Value):
    """No cluster can become of it; the text says why and what to do."""

    why: str


Step: TypeAlias = "Bootstrap | Remove | Add | Promote | Belongs | StartOver | Wait | Refuse"


class View(Value):
    """What is known when a step is chosen.

    Args:
        seats: of all members.
        mine: which of them is this one.
        label: of this job's members.
        answers: by seat, the list of members that it gives; ``None``: no answer.
        own: id of the learner that was added for this seat and runs.
        hidden: seats that do not answer, though somebody may be there.
        gone: seats that have not answered for a while.
        has_voted: an earlier member of this seat may have, whose data are gone.
    """

    seats: tuple[Seat, ...]
    mine: int
    label: str
    answers: Sequence[tuple[Entry, ...] | None]
    own: int | None = None
    hidden: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    has_voted: bool = False


def label_of(run_id: str, prefix: str, token: bytes | None) -> str:
    """Return how the names of a job's members begin; tells nothing of the token."""
    return "elasticrs-" + _derived("label", run_id, prefix, token)[:16]


def password_of(run_id: str, prefix: str, token: bytes) -> str:
    """Return the password of etcd's user ``root``, by which agents with the token know each other."""
    return _derived("password", run_id, prefix, token)


def _derived(what: str, run_id: str, prefix: str, token: bytes | None) -> str:
    import hashlib
    import hmac

    told = f"{what}\0{prefix}\0{run_id}".encode(errors="surrogateescape")
    return hmac.new(token or b"", told, hashlib.sha256).hexdigest()


def name_of(label: str, index: int) -> str:
    """Return the name of the member at a seat that makes the cluster with the others."""
    return f"{label}-{index}"


def learner_name(label: str, number: int) -> str:
    """Return the name of a member that has come later, by its id."""
    return f"{label}-{_LATER}{number:x}"


def initial_cluster(view: View, entries: Iterable[Entry] | None = None) -> str:
    """Return who is there at the start, in etcd's words: all seats, or the members of a cluster.

    A learner lists these names until it has caught up; of them only its own becomes known.
    """
    if entries is None:
        pairs = [(name_of(view.label, index), seat.peer_url) for index, seat in enumerate(view.seats)]
    else:
        pairs = [(learner_name(view.label, entry.id), url) for entry in entries for url in entry.peer_urls]
    return ",".join(f"{name}={url}" for name, url in pairs)


def next_step(view: View) -> Step:
    """Decide what comes next for this seat's member."""
    why = _mistake(view)
    if why is not None:
        return Refuse(why)
    lists = [answer for answer in told(view).values() if any(entry.has_published for entry in answer)]
    if view.own is not None:
        return _of_learner(view.own, lists)
    if not lists:
        # Those that answer all the same are about to make the cluster, but for learners of one.
        is_free = 2 * len(view.hidden) < len(view.seats) and len(told(view)) == len(others(view))
        return Bootstrap() if is_free else Wait()
    mine = view.seats[view.mine].peer_url
    for entry in (entry for entries in lists for entry in entries):
        if mine in entry.peer_urls:
            # Of those that have made the cluster, and has not come yet: etcd looks at the same.
            is_awaited = entry.name == name_of(view.label, view.mine) and not entry.has_published
            can_do_without = view.has_voted or 2 * len(lists) > len(view.seats)
            is_voter = is_awaited and not entry.is_learner and not can_do_without
            return Bootstrap() if is_voter else Remove(entry.id)
        if entry.is_learner:
            index = _seat_of(view, entry)
            return Remove(entry.id) if index is None or index in view.gone else Wait()
    return Add()


def _of_learner(own: int, lists: list[tuple[Entry, ...]]) -> Step:
    if not lists:
        # They may be electing a leader, or have been cut off for a moment.
        return Wait()
    # Each list is as old as what its member has heard.
    found = [entry for entries in lists for entry in entries if entry.id == own]
    if not found:
        return StartOver()
    return Promote(own) if all(entry.is_learner for entry in found) else Belongs()


def next_step_out(view: View) -> Remove | Out | Wait:
    """Decide what comes next for a seat that is to have no member any more; told what its own says as well,
    if that still runs.
    """
    its_own = view.answers[view.mine]
    lists = [its_own] if its_own and not _is_behind(view, its_own) else told(view).values()
    entries = {entry.id: entry for answer in lists for entry in answer}.values()
    if not any(entry.has_published for entry in entries):
        return Wait() if _mistake(view) is None else Out()
    own = next((entry for entry in entries if view.seats[view.mine].peer_url in entry.peer_urls), None)
    voters = [entry for entry in entries if not entry.is_learner]
    if own is None or voters == [own]:
        return Out()
    lost = [entry for entry in voters if _seat_of(view, entry) not in _answering(view)]
    if 2 * len(lost) >= len(voters):
        return Wait()
    # Who is only slow stays.
    dead = (entry.id for entry in lost if entry != own and _seat_of(view, entry) not in view.hidden)
    return Remove(next(dead, own.id))


def heirs(view: View) -> set[int]:
    """The voters of other seats that could lead at once, by id."""
    known = told(view)
    listed = (entry for answer in known.values() for entry in answer if not entry.is_learner)
    return {entry.id for entry in listed if _seat_of(view, entry) in known}


def others(view: View) -> dict[int, tuple[Entry, ...]]:
    """The answers of other seats, by seat."""
    return {
        index: answer
        for index, answer in enumerate(view.answers)
        if index != view.mine and answer is not None
    }


def told(view: View) -> dict[int, tuple[Entry, ...]]:
    """Those that tell of this job's cluster, be it late."""
    return {
        index: answer
        for index, answer in others(view).items()
        if _misfit(view, index, answer) is None and not _is_behind(view, answer)
    }


def _answering(view: View) -> set[int]:
    """The seats where members of this job are."""
    mine = {view.mine} if view.answers[view.mine] is not None else set()
    return mine | {index for index, answer in others(view).items() if _misfit(view, index, answer) is None}


def _is_behind(view: View, answer: tuple[Entry, ...]) -> bool:
    """True if it comes from a learner that has not caught up: in the cluster a name and an address for
    clients are published at once, but of members that make it.
    """
    later = f"{view.label}-{_LATER}"
    return any(not entry.has_published and entry.name.startswith(later) for entry in answer)


def _seat_of(view: View, entry: Entry) -> int | None:
    found = (index for index, seat in enumerate(view.seats) if seat.peer_url in entry.peer_urls)
    return next(found, None)


def _mistake(view: View) -> str | None:
    found = (_misfit(view, index, answer) for index, answer in others(view).items())
    return next((why for why in found if why is not None), None)


def _misfit(view: View, index: int, answer: tuple[Entry, ...]) -> str | None:
    """Why what answers at a seat is no member of this job's cluster."""
    urls = {seat.peer_url for seat in view.seats}
    where = shown_endpoint(view.seats[index].host, view.seats[index].peer_port)
    if any(entry.name and not entry.name.startswith(f"{view.label}-") for entry in answer):
        return (
            f"an etcd that is not of this job answers at {where}: give each job ports of its own in "
            "--rdzv-endpoint (or another peer_port), and all nodes the same --rdzv-id and token"
        )
    strange = next((url for entry in answer for url in entry.peer_urls if url not in urls), None)
    if strange is None:
        return None
    return (
        f"the etcd at {where} has a member at {strange}, which is not in --rdzv-endpoint: all nodes have to "
        "have the same endpoints"
    )
