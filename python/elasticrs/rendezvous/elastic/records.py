"""Values of the keys: JSON, compact, bounded.

- **RECORD-1** a head takes at most :data:`MAX_HEAD` bytes, whatever was reported: it is pushed to everybody.
- **RECORD-2** whatever bytes a key holds, reading them gives a record whose fields have the right types and
  ranges, or raises :class:`~.checked.DamagedError`.
"""

from __future__ import annotations

import json

from elasticrs.job.value import Value
from elasticrs.rendezvous.elastic import validation
from elasticrs.rendezvous.elastic.addresses import is_loopback_name
from elasticrs.rendezvous.elastic.keys import is_member
from elasticrs.rendezvous.elastic.validation import DamagedError, decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal, TypeAlias

    from elasticrs.store.coordination import Entry

    State: TypeAlias = Literal["RUNNING", "ENDED", "CLOSED"]

PROTOCOL = 1
"""Major version of keys, records and rules; agents of different ones do not share a job."""

MAX_HEAD = 4096
MAX_CAUSE = 2304
MAX_TEXT = 384
CAUSE_FIELDS = [name for name in validation.CAUSE if name not in ("frame", "lines")]
"""What is kept of a cause that is too large in any case."""

MAX_NAME = 128


def encode(record: object) -> bytes:
    """The bytes of a record: ASCII, as texts may hold what UTF-8 cannot say (odd file names)."""
    return json.dumps(record, separators=(",", ":")).encode("ascii")


def damage(key: str, error: DamagedError) -> str:
    """What is wrong with a record, for the user."""
    return f"the record {key} in the rendezvous store is damaged: {error}"


def cut(text: str, limit: int) -> str:
    """A text of at most that many bytes when encoded, and where it was cut."""
    if len(encode(text)) <= limit + 2:
        return text
    kept = text[:limit]
    while len(encode(kept)) > limit - 1:
        kept = kept[: len(kept) * 3 // 4]
    return kept + "..."


def bound_cause(cause: Mapping[str, Any] | None, limit: int = MAX_CAUSE) -> dict[str, Any] | None:
    """Make a cause fit: its lines go first, from the oldest, then long texts, then all that is not
    a number.
    """
    if cause is None:
        return None
    bounded = dict(cause)
    lines = bounded.get("lines")
    if isinstance(lines, (list, tuple)):
        bounded["lines"] = [cut(str(line), MAX_TEXT) for line in list(lines)[-20:]]
        while bounded["lines"] and len(encode(bounded)) > limit:
            del bounded["lines"][0]
    if len(encode(bounded)) > limit:
        bounded = {
            key: cut(each, MAX_TEXT) if isinstance(each, str) else each for key, each in bounded.items()
        }
    if len(encode(bounded)) > limit:
        bounded = {
            key: cut(each, MAX_NAME) if isinstance(each := bounded[key], str) else each
            for key in CAUSE_FIELDS
            if isinstance(bounded.get(key), (str, int, float))
        }
    return bounded


def time_of(cause: Mapping[str, Any] | None) -> int | None:
    """When a cause happened, on the store's wall clock."""
    time = cause.get("time_ns") if cause else None
    return time if isinstance(time, int) else None


def step_of(cause: Mapping[str, Any] | None) -> int | None:
    """The step in which a worker hung; ``None`` when the cause is something else."""
    step = cause.get("step") if cause else None
    return step if isinstance(step, int) else None


GROUNDS = ("stopped", "behind", "elsewhere", "apart", "oldest")
"""What speaks against a rank that is said to keep the others waiting; what says more comes first."""


def blame_of(cause: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """The order of workers that hung on several nodes, the one that the others wait for first.

    A signal has stopped it; else the earliest step; then the ground; then the time. ``None`` when the cause
    is something else.
    """
    ground = cause.get("ground") if cause else None
    if cause is None or ground not in GROUNDS:
        return None
    step, time = step_of(cause), time_of(cause)
    return (
        ground != "stopped",
        float("inf") if step is None else step,
        GROUNDS.index(ground),
        float("inf") if time is None else time,
    )


def silence_of(cause: Mapping[str, Any] | None) -> float | None:
    """For how many seconds a worker that hung had given no sign of life; ``None`` as for :func:`blame_of`."""
    silence = cause.get("silence") if cause else None
    if blame_of(cause) is None or not isinstance(silence, (int, float)):
        return None
    return max(0.0, float(silence))


def may_be_first(own: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> bool:
    """True if the leader has to know of a cause, beside the recorded one."""
    blame, other_blame = blame_of(own), blame_of(recorded)
    if blame is not None and other_blame is not None:
        return blame <= other_blame
    time, other_time = time_of(own), time_of(recorded)
    return other_time is None or (time is not None and time <= other_time)


class Node(Value):
    """One registration.

    Args:
        name: of the node, for the user.
        host: what tells hosts apart.
        address: its end of the connection to the store.
        local_addr: what the user wants peers to use.
        fallback_addr: what other hosts can reach.
        role, nproc: of its workers.
        hint: its place in the order of ranks, before the name.
        port: of its listener for the next round's worker store.
        idle: the last round whose workers are known to be gone here.
        cause: its own failure in round ``idle``, when that was earlier than the recorded one.
    """

    name: str
    host: str
    address: str
    role: str
    nproc: int
    port: int
    idle: int = 0
    local_addr: str | None = None
    fallback_addr: str | None = None
    hint: int | None = None
    cause: dict[str, Any] | None = None

    def encode(self) -> bytes:
        """Its bytes: what is not said is left out."""
        return encode({name: each for name, each in self.fields().items() if each is not None})

    @staticmethod
    def decode(value: bytes) -> Node:
        """The node of some bytes.

        Raises:
            DamagedError: they are no registration.
        """
        fields = validation.fields(decode(value), _NODE, _NODE_REQUIRED)
        return Node(**{**fields, "cause": validation.cause(fields.get("cause"))})

    @property
    def shown(self) -> str:
        """Name and address, for the user."""
        seen = self.fallback_addr if is_loopback_name(self.address) and self.fallback_addr else self.address
        return f"{self.name} ({self.local_addr or seen})"


class Head(Value):
    """The state of the job; changed only by compare on its own revision.

    Args:
        state: ``RUNNING``, ``ENDED`` or ``CLOSED``.
        round: its number; 0 when the job was closed before its first one.
        form: which proposal became this round.
        used: charged restarts.
        size: nodes of the round.
        world_size: workers of the round.
        master: address and port of its worker store.
        end: how the round (of ``RUNNING``: the one before) ended: ``kind`` (``failure``, ``lost``, ``left``,
            ``scale``, ``setup``), ``node``, ``group_rank``, ``message``, ``fatal``, ``charged``.
        cause: the first failure of that round, over all nodes.
        losses: nodes lost so far.
        short_losses: short lost rounds in a row.
        setups: rounds in a row that could not be started.
        outcome: of a closed job: ``succeeded``, ``failed``, ``timeout`` or ``aborted``.
        reason: of a closed job, for the user.
        time_ns: when it was closed, on the store's wall clock; only told, never compared.
    """

    state: State
    round: int
    form: str = ""
    used: int = 0
    size: int = 0
    world_size: int = 0
    master: tuple[str, int] = ("", 0)
    end: dict[str, Any] | None = None
    cause: dict[str, Any] | None = None
    losses: int = 0
    short_losses: int = 0
    setups: int = 0
    outcome: str | None = None
    reason: str | None = None
    time_ns: int = 0

    def encode(self) -> bytes:
        """Its bytes, at most :data:`MAX_HEAD`."""
        end = self.end and {
            key: cut(each, MAX_NAME if key == "node" else MAX_TEXT) if isinstance(each, str) else each
            for key, each in self.end.items()
        }
        fields = {**self.fields(), "end": end, "cause": bound_cause(self.cause)}
        fields["reason"] = self.reason and cut(self.reason, MAX_TEXT)
        fields["master"] = (cut(self.master[0], MAX_NAME * 2), self.master[1])
        return encode({name: each for name, each in fields.items() if each is not None})

    @staticmethod
    def decode(value: bytes) -> Head:
        """The head of some bytes.

        Raises:
            DamagedError: they are no head.
        """
        if len(value) > MAX_HEAD:
            raise DamagedError(f"it has {len(value)} bytes")
        fields = validation.fields(decode(value), _HEAD, ("state", "round"))
        fields["cause"] = validation.cause(fields.get("cause"))
        if fields.get("end") is not None:
            fields["end"] = validation.fields(fields["end"], _END, ("kind",))
        return Head(**{**fields, "master": tuple(fields.get("master", ("", 0)))})

    @staticmethod
    def read(entry: Entry) -> Head:
        """The head of a key; a damaged one is the end of the job, and says which key it is."""
        try:
            return Head.decode(entry.value or b"")
        except DamagedError as error:
            return Head("CLOSED", 0, outcome="failed", reason=damage(entry.key, error))


class Seat(Value):
    """One line of a round's table.

    Args:
        member: who.
        name, address: of the node, for reports when its registration is gone.
    """

    member: str
    name: str
    address: str


class Slot(Value):
    """What the leader tells one member for a round.

    Args:
        round, form: which proposal; it counts once the head names both.
        group_rank, first_rank, first_role_rank, role_world_size: its ranks; other sizes are in the head.
    """

    round: int
    form: str
    group_rank: int
    first_rank: int
    first_role_rank: int
    role_world_size: int

    def encode(self) -> bytes:
        """Its bytes: a list, as there is one for each member."""
        return encode(self.values())

    @staticmethod
    def decode(value: bytes) -> Slot:
        """The slot of some bytes.

        Raises:
            DamagedError: they are no slot.
        """
        return Slot(*validation.row(decode(value), _SLOT))

    def fits(self, head: Head, nproc: int) -> bool:
        """True if that many workers at these ranks are part of the head's round."""
        return (
            all(head.master)
            and self.group_rank < head.size <= head.world_size
            and self.first_rank + nproc <= head.world_size
            and self.first_role_rank + nproc <= self.role_world_size <= head.world_size
        )


def table_of(value: bytes) -> list[Seat]:
    """The seats of a part of a round's table.

    Raises:
        DamagedError: they are none.
    """
    rows = decode(value)
    if not isinstance(rows, list):
        raise DamagedError("not a list")
    seats = [Seat(*validation.row(row, _SEAT)) for row in rows]
    if not all(is_member(seat.member) for seat in seats):
        raise DamagedError("a seat without a member")
    return seats


def holder_of(value: bytes) -> tuple[str, str]:
    """Who has a node rank: the agent, and its node for the user.

    Raises:
        DamagedError: the bytes do not tell.
    """
    agent, _, shown = validation.row(decode(value), (validation.TEXT,) * 3)
    return agent, shown


def job_of(value: bytes) -> dict[str, Any]:
    """The job's record. Which settings it has depends on the release that wrote it.

    Raises:
        DamagedError: the bytes are none.
    """
    job = decode(value)
    plain = (str, int, bool, type(None))
    if not isinstance(job, dict) or not all(isinstance(each, plain) for each in job.values()):
        raise DamagedError("not the settings of a job")
    return job


def check_done(value: bytes) -> None:
    """Raise :class:`DamagedError` unless a member has written this when its workers had finished."""
    if not isinstance(decode(value), dict):
        raise DamagedError("not the summary of a node")


_COUNT, _TEXT, _PORT = validation.COUNT, validation.TEXT, validation.PORT
_NAME, _ADDRESS = validation.NAME, validation.ADDRESS
_NODE_REQUIRED = ("name", "host", "address", "role", "nproc", "port", "idle")
_NODE = {
    **dict.fromkeys(("name", "host"), _NAME),
    **dict.fromkeys(("address", "local_addr", "fallback_addr"), _ADDRESS),
    "role": _TEXT,
    "nproc": validation.POSITIVE,
    "port": _PORT,
    "idle": _COUNT,
    "hint": validation.INT,
    "cause": validation.ANY,
}
_HEAD = {
    **dict.fromkeys(("round", "used", "size", "world_size", "losses", "short_losses", "setups"), _COUNT),
    **dict.fromkeys(("end", "cause"), validation.ANY),
    "state": validation.one_of("RUNNING", "ENDED", "CLOSED"),
    "form": _NAME,
    "master": validation.row_of(_ADDRESS, _PORT),
    "outcome": validation.one_of("succeeded", "failed", "timeout", "aborted"),
    "reason": _TEXT,
    "time_ns": validation.TIME,
}
_END = {
    **dict.fromkeys(("node", "message", "member"), _TEXT),
    **dict.fromkeys(("fatal", "charged"), validation.FLAG),
    "kind": validation.one_of("failure", "lost", "left", "scale", "setup", "asked"),
    "group_rank": validation.WHOLE,
}
_SLOT = (_COUNT, _NAME, _COUNT, _COUNT, _COUNT, _COUNT)
_SEAT = (_NAME, _NAME, _ADDRESS)


def master_addr(nodes: Sequence[Node]) -> str:
    """Return the address of group rank 0 that all members can use; they are by group rank.

    The user's choice for that node, else its own end of the connection to the store, which the store's host
    has seen to work. A loopback address only serves a round on one host.
    """
    first = nodes[0]
    if first.local_addr:
        return first.local_addr
    if not is_loopback_name(first.address):
        return first.address
    if any(node.host != first.host for node in nodes) and first.fallback_addr:
        return first.fallback_addr
    return first.address
