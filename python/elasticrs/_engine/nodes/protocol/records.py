"""Keys and records of a job in the store. A **member** is one registration of an agent process, named
``<agent>/<incarnation>``. Names of agents and members are never reused. Records are compact JSON of limited
size.

- **RECORD-1** A head (the state of the job) has at most :data:`MAX_HEAD` bytes, because it is sent to all
  agents.
- **RECORD-2** Decoding a record, whatever its bytes, returns values of valid types and ranges, or raises
  :class:`DamagedError`.
"""

from __future__ import annotations

import json

from elasticrs._engine.job.config import MAX_IN_WINDOW
from elasticrs._engine.job.restart_policy import MAX_SUSPECTS, Cause, FailureHistory
from elasticrs._engine.job.value import Value
from elasticrs._engine.nodes.protocol.rendezvous import Command
from elasticrs._engine.nodes.transport.addresses import is_loopback_name
from elasticrs._engine.nodes.transport.coordination import DeletePrefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, Literal, TypeAlias

    from elasticrs._engine.nodes.protocol.rendezvous import Rendezvous
    from elasticrs._engine.nodes.transport.coordination import Entry, Operation

    State: TypeAlias = Literal["RUNNING", "ENDED", "CLOSED"]
    Check: TypeAlias = Callable[[Any], bool]

# --- keys ---

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
    workers. Other workers cannot do that, because a broken or refused connection does not prove that a worker
    is dead.
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
        self.barred = self.prefix + "barred/"
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
        """Return the key of a member's farewell. It outlives the member, because later leaders need it."""
        return self.farewells + member

    def host(self, host: str) -> str:
        """Return the prefix of a host's leased keys, in which each agent identifies its launch."""
        return f"{self.hosts}{_escaped(host)}/"

    def bar(self, node: str) -> str:
        """Return the key that shows that a user has removed this node for good (``drain --stay-out``)."""
        return f"{self.barred}{_escaped(node)}"

    @property
    def calls(self) -> str:
        """Prefix of the keys for agents' requests (:mod:`.calls`). Leaders do not watch these keys."""
        return f"{self.prefix[:-1]}%calls/"

    @property
    def answers(self) -> str:
        return f"{self.prefix[:-1]}%answers/"

    @property
    def exchanges(self) -> str:
        """Prefix of the keys for agents' exchanges (:class:`.Exchange`). Leaders do not watch these keys."""
        return f"{self.prefix[:-1]}%exchanges/"

    def leaving(self, round: int) -> str:  # noqa: A002 -- the field's own word
        """Return the key that names the node that a user drains in this round. Only one node can set it."""
        return f"{self.prefix[:-1]}%leaving/{round}"

    def rank(self, node_rank: int) -> str:
        """Return the key of a node rank. It names the agent that has the rank, and has that agent's lease."""
        return f"{self.ranks}{node_rank}"

    def forget_rounds(self) -> list[Operation]:
        """Return operations that delete the keys of a closed job's rounds: the store may outlive the job."""
        folders = (self.slots, self.tables, self.dones, self.evidences, self.farewells)
        return [DeletePrefix(each) for each in (*folders, self.barred, self.refusal)]

    def store(self, round: int) -> str:  # noqa: A002 -- the field's own word
        """Return the key prefix of a round's user data. It is outside :attr:`prefix`, which leaders watch."""
        return f"{self.prefix[:-1]}%stores/{round}/"

    @property
    def job_store(self) -> str:
        """Prefix of the keys that a job's processes share across all rounds. For workers it is below
        :func:`workers_scope`, because their token allows no other keys.
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


# --- validation ---

MOST = 2**53 - 1
"""Largest rank, round number or count. All JSON implementations represent it exactly."""

LATEST = 2**63 - 1
"""Latest time, in nanoseconds."""

MAX_NAME = 1024
"""Maximum number of characters in a name or an address, so that a table of 99 nodes fits into one write."""

_SHOWN = 40
"""Number of characters of an invalid value that are shown in an error message."""


class DamagedError(ValueError):
    """Raised with a description if a record is damaged, or was not written by elasticrs."""


def decode(value: bytes) -> Any:
    """Decode JSON. Raise :class:`DamagedError` for anything else, such as the number NaN."""
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"not JSON ({type(error).__name__})") from error


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _is_whole(low: int | None, high: int | None) -> Check:
    return lambda value: (
        type(value) is int and (low is None or low <= value) and (high is None or value <= high)
    )


def one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values


def row_of(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def list_of(check: Check, most: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


WHOLE = _is_whole(-MOST, MOST)
INT = _is_whole(None, None)
COUNT = _is_whole(0, MOST)
POSITIVE = _is_whole(1, MOST)
PORT = _is_whole(0, 65535)
TIME = _is_whole(0, LATEST)
FLAG, TEXT = (lambda value: isinstance(value, bool)), (lambda value: isinstance(value, str))


def NAME(value: Any) -> bool:  # noqa: N802 -- a check, like those above
    return isinstance(value, str) and len(value) <= MAX_NAME


def ADDRESS(value: Any) -> bool:  # noqa: N802
    # Require printable text, because environment variables can contain neither NUL nor surrogates.
    return NAME(value) and value.isprintable()


def SPAN(value: Any) -> bool:  # noqa: N802
    return type(value) in (int, float) and 0 <= value <= MOST


def _by_type(record: type[Value]) -> dict[str, Check]:
    """Return a check of each field's values, by the field's type. For unknown types, all values pass."""
    checks = {"str": TEXT, "int": COUNT, "float": SPAN, "bool": FLAG, "Sequence[str]": list_of(TEXT, 1000)}
    kinds = {name: kind.removesuffix(" | None") for name, kind in record.__annotations__.items()}
    return {name: checks.get(kind, lambda _: True) for name, kind in kinds.items()}


CAUSE: dict[str, Check] = {
    **_by_type(Cause),
    **dict.fromkeys(("group_rank", "step", "reached"), WHOLE),
    **dict.fromkeys(("time_ns", "error_ns"), TIME),
    "exitcode": optional(WHOLE),
}


def checked_fields(record: Any, checks: Mapping[str, Check], required: Iterable[str]) -> dict[str, Any]:
    """Return ``record`` without null fields, or raise :class:`DamagedError` if it fails its ``checks``."""
    if not isinstance(record, dict):
        raise DamagedError(f"{_shown(record)} is not an object")
    found = {name: value for name, value in record.items() if value is not None}
    for name, value in found.items():
        if name not in checks or not checks[name](value):
            raise DamagedError(f"{_shown(name)} is {_shown(value)}")
    missing = [name for name in required if name not in found]
    if missing:
        raise DamagedError(f"it has no {missing[0]}")
    return found


def checked_row(record: Any, checks: Sequence[Check]) -> list[Any]:
    """Return the list ``record`` if each value passes its check, or raise :class:`DamagedError`."""
    if not row_of(*checks)(record):
        raise DamagedError(f"{_shown(record)} is not a list of the expected values")
    found: list[Any] = record
    return found


def checked_cause(record: Any) -> dict[str, Any] | None:
    """Return the fields of a failure's cause without invalid ones; ``None`` if it is no object. A cause only
    decides which failure is reported first, so invalid fields are no error. Unknown fields are kept.
    """
    if not isinstance(record, dict):
        return None
    return {name: value for name, value in record.items() if name not in CAUSE or CAUSE[name](value)}


def _shown(value: Any) -> str:
    text = f"{type(value).__name__}" if isinstance(value, (dict, list)) else ascii(value)[: _SHOWN + 1]
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# --- records ---

PROTOCOL = 2
"""Major version of keys, records and rules, which must be the same for all agents of a job."""

MAX_HEAD = 6144
MAX_CAUSE = 2304
MAX_TEXT = 384
CAUSE_FIELDS = [name for name in CAUSE if name not in ("frame", "lines")]
"""Fields of a cause that are kept even if the cause is too large."""

_MAX_SHORT = 128


def encode(record: object) -> bytes:
    """Encode a record as ASCII-only JSON, because file names may have characters that UTF-8 cannot encode."""
    return json.dumps(record, separators=(",", ":")).encode("ascii")


def damage(key: str, error: DamagedError) -> str:
    return f"the record {key} in the rendezvous store is damaged: {error}"


def cut(text: str, limit: int) -> str:
    """Shorten text to at most ``limit`` encoded bytes. Shortened text ends with ``...``."""
    if len(encode(text)) <= limit + 2:
        return text
    kept = text[:limit]
    while len(encode(kept)) > limit - 1:
        kept = kept[: len(kept) * 3 // 4]
    return kept + "..."


def bound_cause(cause: Mapping[str, Any] | None, limit: int = MAX_CAUSE) -> dict[str, Any] | None:
    """Cut a failure's cause to ``limit`` bytes. First drop the oldest lines of the worker's stderr, then
    shorten long texts, and at last drop all fields except ``CAUSE_FIELDS``.
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
            key: cut(each, _MAX_SHORT) if isinstance(each := bounded[key], str) else each
            for key in CAUSE_FIELDS
            if isinstance(bounded.get(key), (str, int, float))
        }
    return bounded


def time_of(cause: Mapping[str, Any] | None) -> int | None:
    """Return the time of a failure on the store's wall clock, in nanoseconds."""
    return cause.get("time_ns") if cause else None


def step_of(cause: Mapping[str, Any] | None) -> int | None:
    return cause.get("step") if cause else None


GROUNDS = ("stopped", "behind", "elsewhere", "apart", "oldest")
"""Kinds of evidence that a rank keeps the other ranks waiting, from strongest to weakest."""


def blame_of(cause: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """Return a key by which causes of hangs are sorted, so that the worker that probably blocks the others is
    first. Return ``None`` if ``cause`` is not a hang.
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
    """Return the seconds since a hung worker's last heartbeat."""
    silence = cause.get("silence") if cause else None
    if blame_of(cause) is None or not isinstance(silence, (int, float)):
        return None
    return max(0.0, float(silence))


def is_of_same_node(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return true if the same agent has reported both causes: their nodes and group ranks are the same."""
    return all(one.get(name) == other.get(name) for name in ("node", "group_rank"))


def may_be_first(own: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> bool:
    """Return true if the failure ``own`` may precede ``recorded``, or is the same one with more details."""
    if recorded:
        if is_of_same_node(own, recorded):
            return True
        # A recorded failure without a message may be a consequence of another: the worker's error file, which
        # would show that, had not been read when the failure was recorded.
        may_be_consequence = recorded.get("is_consequence") or recorded.get("message") is None
        if may_be_consequence and not own.get("is_consequence"):
            return True
        if own.get("is_consequence") and not may_be_consequence:
            return False
    blame, other_blame = blame_of(own), blame_of(recorded)
    if blame is not None and other_blame is not None:
        return blame <= other_blame
    time, other_time = time_of(own), time_of(recorded)
    return other_time is None or (time is not None and time <= other_time)


class Node(Value):
    """Record of an agent's registration in the store.

    Args:
        address: local address of this node's connection to the store. Other nodes use ``local_addr`` instead,
            if the user has given it, and ``fallback_addr`` instead of a loopback address.
        hint: number by which the nodes' ranks are ordered. It takes precedence over the node's name.
        port: port of the listener for the workers' store of the next round.
        idle: last round whose workers are known to have exited on this node.
        cause: failure of this node in round ``idle`` that may precede the recorded failure.
        unfit: why a check found the node unfit after round ``idle``.
        serves_only: true if the node has been excluded, but stays to host the store.
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
    unfit: str | None = None
    serves_only: bool | None = None

    def encode(self) -> bytes:
        return encode({name: each for name, each in self.fields().items() if each is not None})

    @staticmethod
    def decode(value: bytes) -> Node:
        fields = checked_fields(decode(value), _NODE, _NODE_REQUIRED)
        return Node(**{**fields, "cause": checked_cause(fields.get("cause"))})

    @property
    def shown(self) -> str:
        seen = self.fallback_addr if is_loopback_name(self.address) and self.fallback_addr else self.address
        return f"{self.name} ({self.local_addr or seen})"


class Head(Value):
    """State of the job, called the head. Only transactions that compare its revision may change it.

    Args:
        round: 0 if the job was closed before its first round.
        form: name of the proposal that became this round.
        used: number of restarts that the job has used.
        master: address and port of the round's workers' store.
        end: how the round ended; in state ``RUNNING``, how the previous round ended. The leader's verdict
            adds ``charged`` and, where they apply, ``delay`` (seconds until the next round), ``excluded``
            (member) and ``note`` (line for the user about suspect nodes).
        cause: first failure in that round, over all nodes.
        history: data about earlier failures, for the restart policy; see :meth:`failures`.
        permanent: true if the job was closed because another attempt would fail in the same way.
        short_losses: number of consecutive short rounds that lost a node.
        setups: number of consecutive rounds whose workers could not be started.
        time_ns: when the job was closed, on the store's wall clock. It is never compared.
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
    history: dict[str, Any] | None = None
    permanent: bool = False
    losses: int = 0
    short_losses: int = 0
    setups: int = 0
    outcome: str | None = None
    reason: str | None = None
    time_ns: int = 0

    def encode(self) -> bytes:
        """Encode in at most :data:`MAX_HEAD` bytes. Truncate long names and messages."""
        end = self.end and {
            key: cut(each, _MAX_SHORT if key == "node" else MAX_TEXT) if isinstance(each, str) else each
            for key, each in self.end.items()
        }
        fields = {**self.fields(), "end": end, "cause": bound_cause(self.cause)}
        fields["reason"] = self.reason and cut(self.reason, MAX_TEXT)
        fields["master"] = (cut(self.master[0], _MAX_SHORT * 2), self.master[1])
        return encode({name: each for name, each in fields.items() if each is not None})

    @staticmethod
    def decode(value: bytes) -> Head:
        if len(value) > MAX_HEAD:
            raise DamagedError(f"it has {len(value)} bytes")
        fields = checked_fields(decode(value), _HEAD, ("state", "round"))
        fields["cause"] = checked_cause(fields.get("cause"))
        if fields.get("history") is not None:
            fields["history"] = checked_fields(fields["history"], _HISTORY, ())
        if fields.get("end") is not None:
            fields["end"] = checked_fields(fields["end"], _END, ("kind",))
        return Head(**{**fields, "master": tuple(fields.get("master", ("", 0)))})

    @property
    def is_judged(self) -> bool:
        return self.state == "ENDED" and "charged" in (self.end or {})

    @property
    def delay(self) -> float:
        """Restart delay in seconds."""
        return float((self.end or {}).get("delay", 0.0))

    @property
    def note(self) -> str:
        return str((self.end or {}).get("note", ""))

    @property
    def excluded_agent(self) -> str | None:
        member = (self.end or {}).get("excluded")
        return None if member is None else agent_of(member)

    @property
    def failures(self) -> FailureHistory:
        kept = {name: _with_tuples(each) for name, each in (self.history or {}).items()}
        return FailureHistory(self.used, **kept)

    def with_failures(self, failures: FailureHistory) -> Head:
        """Return a copy of the head with this failure history, in which long names are truncated."""
        fields, defaults = failures.fields(), FailureHistory.defaults()
        used = fields.pop("charged")
        kept = {name: _shortened(each) for name, each in fields.items() if each != defaults[name]}
        return self.replaced(used=used, history=kept or None)

    @staticmethod
    def read(entry: Entry) -> Head:
        """Decode the job's state. If it is damaged, return the state of a job that failed for that reason."""
        try:
            return Head.decode(entry.value or b"")
        except DamagedError as error:
            return Head("CLOSED", 0, outcome="failed", reason=damage(entry.key, error))


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, (list, tuple)) else value


def _shortened(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shortened, value))
    if isinstance(value, str):
        return cut(value, _MAX_SHORT)
    return round(value, 3) if isinstance(value, float) else value


class Seat(Value):
    """Row of a round's member table. It is used to report about members whose registration was deleted."""

    member: str
    name: str
    address: str


class Slot(Value):
    """Ranks of a member for a proposed round, valid once the job's state names its ``round`` and ``form``."""

    round: int
    form: str
    group_rank: int
    first_rank: int
    first_role_rank: int
    role_world_size: int

    def encode(self) -> bytes:
        """Encode the slot as a compact list, because the store holds one slot for every member."""
        return encode(self.values())

    @staticmethod
    def decode(value: bytes) -> Slot:
        return Slot(*checked_row(decode(value), _SLOT))

    def fits(self, head: Head, nproc: int) -> bool:
        return (
            all(head.master)
            and self.group_rank < head.size <= head.world_size
            and self.first_rank + nproc <= head.world_size
            and self.first_role_rank + nproc <= self.role_world_size <= head.world_size
        )


def table_of(value: bytes) -> list[Seat]:
    rows = decode(value)
    if not isinstance(rows, list):
        raise DamagedError("not a list")
    seats = [Seat(*checked_row(row, _SEAT)) for row in rows]
    if not all(is_member(seat.member) for seat in seats):
        raise DamagedError("a seat without a member")
    return seats


def holder_of(value: bytes) -> tuple[str, str]:
    agent, _, shown = checked_row(decode(value), (TEXT,) * 3)
    return agent, shown


def job_of(value: bytes) -> dict[str, Any]:
    """Decode the job record. Its fields vary with the release that wrote it."""
    job = decode(value)
    plain = (str, int, bool, type(None))
    if not isinstance(job, dict):
        raise DamagedError("not the settings of a job")
    command = job.pop("command", None)
    if not all(isinstance(each, plain) for each in job.values()):
        raise DamagedError("not the settings of a job")
    if command is not None:
        fields = checked_fields(command, _COMMAND, _COMMAND)
        command = Command(**{**fields, "words": tuple(fields["words"])})
    return {**job, "command": command}


def text_of(value: bytes | None) -> str:
    text = decode(value or b"")
    if not NAME(text):
        raise DamagedError("not a text of the expected length")
    return str(text)


def check_done(value: bytes) -> None:
    if not isinstance(decode(value), dict):
        raise DamagedError("not the summary of a node")


_MOST_WORDS = 2000
_NODE_REQUIRED = ("name", "host", "address", "role", "nproc", "port", "idle")
_NODE = {
    **_by_type(Node),
    **dict.fromkeys(("name", "host"), NAME),
    **dict.fromkeys(("address", "local_addr", "fallback_addr"), ADDRESS),
    "nproc": POSITIVE,
    "port": PORT,
    "hint": INT,
}
_HEAD = {
    **_by_type(Head),
    "state": one_of("RUNNING", "ENDED", "CLOSED"),
    "form": NAME,
    "master": row_of(ADDRESS, PORT),
    "outcome": one_of("succeeded", "failed", "timeout", "aborted"),
    "time_ns": TIME,
}
_END = {
    **dict.fromkeys(("node", "message", "member", "note"), TEXT),
    "excluded": is_member,
    **dict.fromkeys(("fatal", "charged"), FLAG),
    "delay": SPAN,
    "kind": one_of("failure", "lost", "left", "scale", "setup", "asked"),
    "group_rank": WHOLE,
}
_COMMAND = {
    "words": lambda value: bool(value) and list_of(TEXT, _MOST_WORDS)(value),
    **dict.fromkeys(("place", "node"), TEXT),
    "user": COUNT,
}
_HISTORY = {
    **dict.fromkeys(("same", "without_progress", "excluded"), COUNT),
    "start_error": row_of(NAME, NAME),
    "implicated": list_of(row_of(NAME, COUNT), MAX_SUSPECTS),
    "charged_at": list_of(SPAN, MAX_IN_WINDOW),
    "last": row_of(NAME, NAME, optional(WHOLE), optional(WHOLE)),
    "reached": WHOLE,
    "has_started": FLAG,
}
_SLOT = (COUNT, NAME, COUNT, COUNT, COUNT, COUNT)
_SEAT = (NAME, NAME, ADDRESS)


def master_addr(nodes: Sequence[Node]) -> str:
    """Return an address at which all nodes can reach the first of ``nodes``, which are sorted by group rank.
    It is the address that the user gave for that node, or else the local address of its connection to the
    store, because that one is known to work. It is a loopback address only if all nodes are on one host, or
    the node has no other address.
    """
    first = nodes[0]
    if first.local_addr:
        return first.local_addr
    if not is_loopback_name(first.address):
        return first.address
    if any(node.host != first.host for node in nodes) and first.fallback_addr:
        return first.fallback_addr
    return first.address
