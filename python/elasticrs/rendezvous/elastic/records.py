"""Values of the keys: JSON, compact, bounded.

- **RECORD-1** a head takes at most :data:`MAX_HEAD` bytes, whatever was reported: it is pushed to everybody.
"""

from __future__ import annotations

import json

from elasticrs._value import Value
from elasticrs.rendezvous.elastic.addresses import is_loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal, TypeAlias

    State: TypeAlias = Literal["RUNNING", "ENDED", "CLOSED"]

PROTOCOL = 1
"""Major version of keys, records and rules; agents of different ones do not share a job."""

MAX_HEAD = 4096
MAX_CAUSE = 2304
MAX_TEXT = 384
CAUSE_FIELDS = (
    "node",
    "host",
    "group_rank",
    "round",
    "rank",
    "local_rank",
    "pid",
    "exitcode",
    "signal",
    "ground",
    "silence",
    "step",
    "time_ns",
    "error_ns",
    "message",
)
"""What is kept of a cause that is too large in any case."""

MAX_NAME = 128


def encode(record: object) -> bytes:
    """The bytes of a record: ASCII, as texts may hold what UTF-8 cannot say (odd file names)."""
    return json.dumps(record, separators=(",", ":")).encode("ascii")


def decode(value: bytes) -> Any:
    """The record of some bytes.

    Raises:
        ValueError: they are none of ours.
    """
    return json.loads(value)


def cut(text: str, limit: int) -> str:
    """A text of at most that many bytes when encoded, and where it was cut."""
    if len(encode(text)) <= limit + 2:
        return text
    kept = text[:limit]
    while len(encode(kept)) > limit - 1:
        kept = kept[: len(kept) * 3 // 4]
    return kept + "..."


def bound_cause(cause: Mapping[str, Any] | None, limit: int = MAX_CAUSE) -> dict[str, Any] | None:
    """A cause that fits: its lines go first, from the oldest, then long texts, then all that is not a number.

    Args:
        cause: as reported.
        limit: bytes.
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
    """Whether the leader has to know of a cause, beside the recorded one."""
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

    __slots__ = (
        "address",
        "cause",
        "fallback_addr",
        "hint",
        "host",
        "idle",
        "local_addr",
        "name",
        "nproc",
        "port",
        "role",
    )

    def __init__(
        self,
        name: str,
        host: str,
        address: str,
        role: str,
        nproc: int,
        port: int,
        idle: int = 0,
        local_addr: str | None = None,
        fallback_addr: str | None = None,
        hint: int | None = None,
        cause: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self.address = address
        self.role = role
        self.nproc = nproc
        self.port = port
        self.idle = idle
        self.local_addr = local_addr
        self.fallback_addr = fallback_addr
        self.hint = hint
        self.cause = cause

    def encode(self) -> bytes:
        """Its bytes: what is not said is left out."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return encode({name: each for name, each in fields.items() if each is not None})

    @staticmethod
    def decode(value: bytes) -> Node:
        """The node of some bytes."""
        return Node(**decode(value))

    @property
    def shown(self) -> str:
        """Name and address, for the user."""
        seen = self.fallback_addr if is_loopback(self.address) and self.fallback_addr else self.address
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

    __slots__ = (
        "cause",
        "end",
        "form",
        "losses",
        "master",
        "outcome",
        "reason",
        "round",
        "setups",
        "short_losses",
        "size",
        "state",
        "time_ns",
        "used",
        "world_size",
    )

    def __init__(
        self,
        state: State,
        round: int,  # noqa: A002 -- the field's own word
        form: str = "",
        used: int = 0,
        size: int = 0,
        world_size: int = 0,
        master: tuple[str, int] = ("", 0),
        end: dict[str, Any] | None = None,
        cause: dict[str, Any] | None = None,
        losses: int = 0,
        short_losses: int = 0,
        setups: int = 0,
        outcome: str | None = None,
        reason: str | None = None,
        time_ns: int = 0,
    ) -> None:
        self.state = state
        self.round = round
        self.form = form
        self.used = used
        self.size = size
        self.world_size = world_size
        self.master = master
        self.end = end
        self.cause = cause
        self.losses = losses
        self.short_losses = short_losses
        self.setups = setups
        self.outcome = outcome
        self.reason = reason
        self.time_ns = time_ns

    def next(self, **changes: Any) -> Head:
        """The head that follows."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return Head(**{**fields, **changes})

    def encode(self) -> bytes:
        """Its bytes, at most :data:`MAX_HEAD`."""
        end = self.end and {
            key: cut(each, MAX_NAME if key == "node" else MAX_TEXT) if isinstance(each, str) else each
            for key, each in self.end.items()
        }
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields.update(end=end, cause=bound_cause(self.cause))
        fields["reason"] = self.reason and cut(self.reason, MAX_TEXT)
        fields["master"] = (cut(self.master[0], MAX_NAME * 2), self.master[1])
        return encode({name: each for name, each in fields.items() if each is not None})

    @staticmethod
    def decode(value: bytes) -> Head:
        """The head of some bytes."""
        fields = decode(value)
        fields["master"] = tuple(fields["master"])
        return Head(**fields)


class Seat(Value):
    """One line of a round's table.

    Args:
        member: who.
        name, address: of the node, for reports when its registration is gone.
    """

    __slots__ = ("address", "member", "name")

    def __init__(self, member: str, name: str, address: str) -> None:
        self.member = member
        self.name = name
        self.address = address


class Slot(Value):
    """What the leader tells one member for a round.

    Args:
        round, form: which proposal; it counts once the head names both.
        group_rank, first_rank, first_role_rank, role_world_size: its ranks; other sizes are in the head.
    """

    __slots__ = ("first_rank", "first_role_rank", "form", "group_rank", "role_world_size", "round")

    def __init__(
        self,
        round: int,  # noqa: A002 -- the field's own word
        form: str,
        group_rank: int,
        first_rank: int,
        first_role_rank: int,
        role_world_size: int,
    ) -> None:
        self.round = round
        self.form = form
        self.group_rank = group_rank
        self.first_rank = first_rank
        self.first_role_rank = first_role_rank
        self.role_world_size = role_world_size

    def encode(self) -> bytes:
        """Its bytes: a list, as there is one for each member."""
        return encode(
            [
                self.round,
                self.form,
                self.group_rank,
                self.first_rank,
                self.first_role_rank,
                self.role_world_size,
            ]
        )

    @staticmethod
    def decode(value: bytes) -> Slot:
        """The slot of some bytes."""
        return Slot(*decode(value))
