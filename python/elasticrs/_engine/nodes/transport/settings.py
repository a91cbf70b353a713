"""Settings of the elastic rendezvous, from ``--rdzv-conf`` or ``rdzv_configs``. Settings that torch also has
have torch's names. Settings that only torch needs are checked, but have no effect.

- **SET-1** An unknown key is an error. Torch ignores it, so that a typo silently has no effect.
- **SET-2** Durations may have fractions of a second. Torch truncates them.
- **SET-3** No text that this module creates contains the token.
"""

from __future__ import annotations

import os

from elasticrs._engine.job.config import (
    DEFAULT_EXIT_BARRIER_TIMEOUT,
    DEFAULT_SHUTDOWN_TIMEOUT,
    UsageError,
    exit_barrier_timeout_from,
    one_of,
    seconds_within,
    whole,
)
from elasticrs._engine.job.value import Value
from elasticrs._engine.workers.plan import TOKEN_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import KW_ONLY
    from typing import Any, ClassVar


_TRUTH = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}
_SETTLE_MARGIN = 5.0
_MAX_TOKEN_BYTES = 4096


class Key(Value):
    """Definition of one setting. ``read`` converts text or a Python value, or raises ``ValueError`` with the
    expected format. If ``is_stored`` is false, the setting itself is not stored: it only changes another
    setting, or has no effect.
    """

    name: str
    default: object
    read: Callable[[object], object]
    help: str
    _: KW_ONLY
    is_stored: bool = True


# --- conversions ---


def _or_off(read: Callable[[object], object]) -> Callable[[object], object]:
    def read_or_off(value: object) -> object:
        if value is None or (isinstance(value, str) and value.lower() == "off"):
            return None
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or off") from None

    return read_or_off


def truth(value: object) -> bool:
    if isinstance(value, (bool, int, str)):
        found = _TRUTH.get(str(int(value) if isinstance(value, bool) else value).lower())
        if found is not None:
            return found
    raise ValueError("1 or 0 (or true, false, yes, no)")


def _store_type(value: object) -> str:
    kind = str(value).lower()
    if kind == "file":
        raise ValueError("tcp: only the backend c10d supports a rendezvous in a file")
    if kind != "tcp":
        raise ValueError("tcp")
    return kind


def _address(value: object) -> str:
    from elasticrs._engine.nodes.transport.addresses import packed

    text = str(value).strip()
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if packed(host) is None:
        raise ValueError("the numeric address of an interface of this node")
    return host


def _port_range(value: object) -> tuple[int, int]:
    expected = "LOW-HIGH with 1 <= LOW <= HIGH <= 65535"
    low, dash, high = str(value).partition("-")
    try:
        ports = int(low), int(high if dash else low)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 < ports[0] <= ports[1] < 2**16:
        raise ValueError(expected)
    return ports


def _token(value: object) -> bytes:
    data = value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")
    if not 0 < len(data) <= _MAX_TOKEN_BYTES:
        raise ValueError(f"1 to {_MAX_TOKEN_BYTES} bytes")
    return data


def path(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("the path of a file")
    return os.fspath(value)


_duration, _positive = seconds_within(0), seconds_within(0, above=True)


def _key(default: object, read: Callable[[object], object], help: str) -> Any:  # noqa: A002 -- as in Key
    return default, read, help


class Settings(Value):
    """Settings of a rendezvous. Durations are in seconds. Settings that are class variables are checked, but
    not stored. ``settle`` defaults to 5 s plus two lease times plus ``grace`` (seconds that workers may take
    to stop). It includes a second lease time because a store that was unreachable for almost one lease time
    restarts all leases when it is back.
    """

    _secret = "token"

    is_settle_given: bool
    # fmt: off
    # --- time limits ---
    join_timeout: float = _key(600.0, _positive, "seconds to wait until MIN nodes have joined")
    last_call_timeout: float = _key(30.0, _duration,
        "seconds to wait for more nodes after MIN have joined, at the first start")
    restart_call_timeout: float = _key(0.0, _duration,
        "seconds to wait for a replacement before continuing with fewer nodes")
    scale_up_delay: float = _key(1.0, _duration,
        "seconds between the arrival of a new node and the restart that includes it")
    settle: float = _key(None, _positive,
        "seconds to wait for nodes of a lost round to stop; default: grace + 2 leases + 5")
    close_timeout: float = _key(30.0, _duration,
        "seconds that the host of the store waits for the other nodes when the job ends")
    exit_barrier_timeout: float = _key(DEFAULT_EXIT_BARRIER_TIMEOUT, _duration,
        "seconds that a finished node waits for the other nodes")
    store_lost_timeout: float = _key(10.0, _duration,
        "seconds to reconnect to a lost store before this node gives up")
    connect_timeout: float = _key(5.0, _positive, "seconds for one attempt to connect")
    keep_alive_interval: float = _key(1.0, seconds_within(0.05, 3600),
        "seconds between two keep-alive messages")
    keep_alive_max_attempt: int = _key(5, whole(3), "missed keep-alive messages after which a node is lost")
    store_grace: ClassVar = _key(None, seconds_within(1, 86400),
        "seconds that the store may be away, or a node silent, before the node is lost; in place of"
        " keep_alive_max_attempt")
    stall_timeout: float | None = _key(60.0, _or_off(seconds_within(1)),
        "seconds that an agent may hang before it counts as lost; or off")
    # --- restarts and losses ---
    scale_up: bool = _key(True, truth,
        "1: restart a running job to include new nodes; 0: they wait as spares")
    max_node_losses: int | None = _key(None, _or_off(whole(0)),
        "number of lost nodes that the job survives; default: any number")
    max_short_losses: int = _key(10, whole(1),
        "the job fails after this many short rounds in a row that lost a node")
    short_round: float = _key(60.0, _duration, "seconds; a round that loses a node sooner is a short one")
    # --- nodes, addresses and access ---
    is_host: bool | None = _key(None, truth,
        "1: this agent hosts the store; 0: it does not; default: decided by the endpoint")
    bind_addr: str | None = _key(None, _address,
        "address on which the store listens; default: all interfaces")
    worker_port_range: tuple[int, int] | None = _key(None, _port_range,
        "LOW-HIGH, ports for the workers' store; default: any free port")
    order_hint: int | None = _key(None, whole(0),
        "nodes with a smaller number get smaller ranks; default: --node-rank")
    rank: int | None = _key(None, whole(0),
        "rank of this node with static; on the command line use --node-rank")
    homogeneous: bool = _key(False, truth,
        "1: refuse a node with another number of workers or another role")
    same_command: bool = _key(True, truth,
        "1: refuse a node whose program, arguments or user are not those of the job; 0: they may differ")
    fresh: bool = _key(False, truth,
        "1: start over if all agents of an earlier job with this id have died")
    drain: str = _key("node", one_of("node", "job"),
        "node or job: a signal to one agent stops its node, or the whole job")
    token: bytes | None = _key(None, _token,
        "shared secret of all agents; visible to all users of the machine, so prefer token_file")
    token_file: str | None = _key(None, path, "file that contains the token")
    # --- settings of torch ---
    store_type: ClassVar = _key("tcp", _store_type, "tcp")
    heartbeat_timeout: ClassVar = _key(5.0, _positive, "no effect")
    read_timeout: ClassVar = _key(60.0, _positive, "no effect")
    cas_backoff_max_seconds: ClassVar = _key(0.0, _duration, "no effect")
    timeout: ClassVar = _key(900.0, _positive, "join_timeout of static")
    # fmt: on

    def __init__(
        self, values: Mapping[str, object] | None = None, *, grace: float = DEFAULT_SHUTDOWN_TIMEOUT
    ) -> None:
        given = values or {}
        for key in KEYS:
            if key.is_stored:
                setattr(self, key.name, given.get(key.name, key.default))
        is_settle_given = given.get("settle") is not None
        object.__setattr__(self, "is_settle_given", is_settle_given)
        if not is_settle_given:
            object.__setattr__(self, "settle", grace + 2 * self.ttl + _SETTLE_MARGIN)

    def adapted(self, *, grace: float, exit_barrier_timeout: float | None = None) -> Settings:
        """Return a copy with these times in seconds, which become known only after reading the settings."""
        values = self.fields()
        if not self.is_settle_given:
            del values["settle"]
        if exit_barrier_timeout is not None:
            values["exit_barrier_timeout"] = exit_barrier_timeout
        return Settings(values, grace=grace)

    @property
    def ttl(self) -> float:
        """Seconds without a keep-alive message after which a node is considered lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @property
    def patience(self) -> float:
        """Seconds to wait for a round: the longest time that a leader may need. The leader may start up to
        ``join_timeout`` later than this agent. It waits first for enough nodes, then for additional nodes.
        """
        return 2 * self.join_timeout + max(self.last_call_timeout, self.restart_call_timeout)

    @property
    def rank_timeout(self) -> float:
        """Seconds to wait for a taken node rank: by then, the lease of a dead node with it has expired."""
        return self.ttl + 1.0


_DECLARED = {**vars(Settings), **Settings._defaults}
KEYS = tuple(
    Key(name, *_DECLARED[name], is_stored=name in Settings._defaults)
    for name in Settings.__annotations__
    if name != "is_settle_given"
)
"""All settings."""

BY_NAME = {key.name: key for key in KEYS}


def read_settings(
    given: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    source: str = "--rdzv-conf",
    grace: float = DEFAULT_SHUTDOWN_TIMEOUT,
    exit_barrier_timeout: float | None = None,
    others: tuple[str, ...] = (),
) -> tuple[Settings, list[str]]:
    """Check and convert the settings, which are text or values of a Python program. Return them and a list of
    messages to the user, or raise :class:`.UsageError` with a message of one line. The token and the exit
    barrier's timeout may come from ``environ``. Times are in seconds. ``source`` (origin of the settings) and
    ``others`` (further valid keys) are for messages.
    """
    for name in given:
        if name not in BY_NAME:
            known = tuple(dict.fromkeys((*BY_NAME, *others)))
            raise UsageError(
                f"{source}: unknown key {name}{_suggestion(name, known)}; known: {', '.join(known)}"
            )
    values: dict[str, Any] = {name: read_value(BY_NAME[name], value, source) for name, value in given.items()}
    notices: list[str] = []
    if (store_grace := values.get("store_grace")) is not None:
        if "keep_alive_max_attempt" in values:
            raise UsageError(f"{source}: store_grace and keep_alive_max_attempt cannot be combined")
        interval = values.get("keep_alive_interval", BY_NAME["keep_alive_interval"].default)
        values["keep_alive_max_attempt"] = max(3, int(-(-store_grace // interval)))
    values["token"] = _find_token(values, environ, source, notices)
    if exit_barrier_timeout is not None:
        values["exit_barrier_timeout"] = exit_barrier_timeout
    else:
        values["exit_barrier_timeout"] = exit_barrier_timeout_of(given, environ, source)
    settings = Settings(values, grace=grace)
    if settings.settle <= settings.ttl:
        lease = "lease_ttl" if "lease_ttl" in others else "keep_alive_interval x keep_alive_max_attempt"
        if "settle" not in given:
            raise UsageError(f"{source}: {lease}: got {settings.ttl:g} seconds, expected fewer")
        raise UsageError(
            f"{source}: settle: got {given['settle']!r}, expected seconds, more than {lease} "
            f"({settings.ttl:g})"
        )
    return settings, notices


def exit_barrier_timeout_of(given: Mapping[str, object], environ: Mapping[str, str], source: str) -> float:
    """Return how many seconds a finished node waits for other nodes, if no command-line option says it."""
    name = "exit_barrier_timeout"
    if given.get(name) is None:
        return exit_barrier_timeout_from(environ)
    return Settings({name: read_value(BY_NAME[name], given[name], source)}).exit_barrier_timeout


def read_value(key: Key, value: object, source: str) -> Any:
    """Convert the value of one setting, or raise :class:`.UsageError` with a message of one line."""
    try:
        return key.read(value)
    except ValueError as error:
        shown = "a secret" if key.name == "token" else repr(value)
        raise UsageError(f"{source}: {key.name}: got {shown}, expected {error}") from None


def _suggestion(name: str, known: tuple[str, ...]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _find_token(
    values: Mapping[str, object], environ: Mapping[str, str], source: str, notices: list[str]
) -> object:
    token, path = values.get("token"), values.get("token_file")
    if token is not None and path is not None:
        raise UsageError(f"{source}: token and token_file cannot be combined")
    if token is not None:
        return token
    if isinstance(path, str):
        return read_secret("token", path, source, notices)
    text = environ.get(TOKEN_VARIABLE)
    if text is None:
        return None
    try:
        return _token(text)
    except ValueError as error:
        raise UsageError(f"{TOKEN_VARIABLE}: got {len(text)} characters, expected {error}") from None


def read_secret(what: str, path: str, source: str, notices: list[str]) -> bytes:
    """Read the secret ``what`` from a file, or raise :class:`.UsageError`. Warn if every user can read it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_TOKEN_BYTES + 2)
    except OSError as error:
        raise UsageError(f"{source}: {what}_file: {path!r} cannot be read: {error.strerror}") from None
    if mode & 0o007:
        notices.append(f"the {what} in {path} can be read by every user of this machine: chmod o-rwx {path}")
    # Strip the trailing newline that most editors add.
    data = data.rstrip(b"\r\n")
    try:
        return _token(data)
    except ValueError as error:
        raise UsageError(
            f"{source}: {what}_file: {path!r} holds {len(data)} bytes, expected {error}"
        ) from None
