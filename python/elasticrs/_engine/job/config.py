"""Settings of a job. Each setting is declared once, with its default, as a field.

Programs can also pass the settings in :class:`WorkerSettings` and :class:`UnresolvedSettings`, which the
public dataclasses inherit. An option gets its default from the field with its name; see :mod:`.options`.
"""

from __future__ import annotations

import os
import sys

from elasticrs._engine.job.value import Record, Value, fresh, shared_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from dataclasses import KW_ONLY
    from typing import Any, Literal, TypeAlias, TypeVar

    from elasticrs._engine.job.restart_policy import RestartSettings

    T = TypeVar("T")

    OnFailure: TypeAlias = Literal["restart", "replace"]
    """Reaction to a failed worker. Not an enumeration, because importing :mod:`enum` takes 3 ms."""

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
DEFAULT_SHUTDOWN_TIMEOUT = 30.0
DEFAULT_EXIT_BARRIER_TIMEOUT = 300.0
DEFAULT_LINGER = 5.0
DEFAULT_MONITOR_INTERVAL = 0.1
LOG_PREFIXES = ("auto", "time", "none")
DEFAULT_MASTER_PORT = 29500
DEFAULT_PORT = 29400
"""Default port of the rendezvous store, as in torch."""
DEFAULT_HEALTH_TIMEOUT = 60.0
LOOPBACK = "127.0.0.1"
UNINTERRUPTIBLE_STATE_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
START_METHODS = ("spawn", "fork", "forkserver")
AFFINITY_MODES = ("node", "socket", "exclusive", "core-complex")
DEFAULT_PREFIX_TEMPLATE = "[${role_name}${local_rank}]:"
PREFIX_NAMES = ("role_name", "local_rank", "rank", "hostname")
CONTROL_FOLDERS = "/tmp/elasticrs-"
"""Path of the folder of a user's control sockets, without the number of the user at its end."""
LONGEST = 1e9
"""Maximum number of seconds for a time limit. It prevents overflows, because the core counts nanoseconds."""
SAFETY_TICK = 5.0
"""Seconds after which the agent checks its state even if no event has arrived."""


class UsageError(ValueError):
    """Raised for a user's mistake. The message is one line: option, given value, accepted values."""


@shared_fields
class WorkerSettings:
    """Worker settings that do not exist in torch, available on the command line and in the Python API.
    :class:`JobSpec`, :class:`~elasticrs.launcher.LaunchConfig` and
    :class:`~elasticrs.agent.server.WorkerSpec` inherit them.

    Args:
        hang_timeout: seconds without a heartbeat after which a rank is considered failed. ``"auto"`` derives
            the limit from the duration of its steps, ``"auto:SECONDS"`` also sets a minimum (default 60), and
            ``None`` disables the check.
        hang_startup_timeout: seconds allowed from the start of the workers to the first heartbeat; ``None``
            for no limit.
        hang_exit_timeout: seconds allowed from the return of a worker's program or function to the exit of
            its process, if heartbeats are checked; 0 for no limit.
        exit_timeout: seconds within which a worker must exit after an uncaught exception. A worker that takes
            longer is considered failed. 0 for no limit.
        warm_timeout: time limit for importing the modules of ``warm``, in seconds. After that time, workers
            start cold.
        on_failure: reaction to a failed worker: ``"restart"`` restarts all workers, ``"replace"`` replaces
            only the failed worker. Replacement is for functions and scripts that use :mod:`elasticrs.train`;
            it is not possible with ``fork`` and ``forkserver``.
        restart_delay: time to wait before the workers are restarted: a duration such as ``"30s"``, or
            ``"FIRST..LONGEST"``, such as ``"1s..5m"``. The delay doubles with every failure without progress.
            Each delay is then shortened by a random amount, at most by half. ``"0"`` for no delay.
        max_same_failures: number of equal failures without progress after which the job stops, even if
            restarts are left; 0 for no limit. Failures are equal if the same exception is raised at the same
            place, on the same rank or in the same training step.
        max_excluded_nodes: maximum number of unfit nodes that a job on several nodes may exclude; 0 for none.
        fatal_exit_codes: exit codes of workers for which the job stops without a restart, such as
            ``"3,40-49"``.
        exit_codes: exit code for a failed job. The launcher exits with this code, and programs can read it
            from :class:`elasticrs.errors.JobFailedError`. ``"torchrun"``: always 1. ``"verdict"``: 93 if
            another attempt would fail in the same way, 193 if this node is unfit, otherwise 1.
            ``"verdict:PERMANENT,UNFIT"`` uses other codes than 93 and 193. ``"worker"``: the exit code of the
            worker that failed first, or 128 plus the number of the signal that killed it.
        keep: true to keep the training state of programs that use Lightning or the Hugging Face Trainer, even
            if they do not use ``elasticrs.Keep``.
        keep_memory: maximum memory for copies of the training states of all workers of this node: a share of
            the available memory, such as ``"40%"``, or a number of bytes, such as ``"20G"``. ``"0"`` keeps
            nothing.
        keep_grace: maximum seconds for which a stop of the workers waits until they have copied their
            training state.
        keep_peers: 1 to copy sharded training state to a partner node as well, so that the loss of one node
            costs only the steps since that copy; 0 not to do so.
        keep_bandwidth: maximum bytes per second that this node sends to its partner, such as ``"500M"``;
            ``"0"`` for no limit.
        keep_save: folder in which the kept state of a job is saved when the job fails or is
            stopped. A later job with the same folder goes on from there. ``None``: not saved.
        log_prefix: ``"time"`` adds the time to the prefix of elasticrs's own lines, ``"none"`` does not, and
            ``"auto"`` adds it unless the lines are written to a terminal. If ``None``, the value comes from
            ``PET_LOG_PREFIX``; the default is ``"auto"``.
    """

    __slots__ = ()

    hang_timeout: float | str | None = None
    hang_startup_timeout: float | None = None
    hang_exit_timeout: float = 1800.0
    exit_timeout: float = 10.0
    warm_timeout: float = 120.0
    on_failure: OnFailure = "restart"
    restart_delay: str = "0"
    max_same_failures: int = 3
    max_excluded_nodes: int = 3
    fatal_exit_codes: str = ""
    exit_codes: str = "torchrun"
    keep: bool = False
    keep_memory: str = "40%"
    keep_grace: float = 10.0
    keep_peers: int = 0
    keep_bandwidth: str = "0"
    keep_save: str | None = None
    log_prefix: str | None = None


@shared_fields
class UnresolvedSettings:
    """More worker settings that do not exist in torch. Their defaults depend on the program or on other
    settings, so :class:`JobSpec` stores only the resolved values. :class:`~elasticrs.launcher.LaunchConfig`
    and :class:`~elasticrs.agent.server.WorkerSpec` inherit these settings.

    Args:
        signals_to_forward: names of signals, separated by commas. The agent passes these signals on to the
            workers, without any other effect. If ``None``, SIGUSR1 and SIGUSR2 are passed on, except if they
            stop the job or the program has a handler for them.
        stop_scope: processes that receive the first signal of a stop. ``"worker"``: the worker, and the rest
            of its process group once the worker has exited. ``"group"``: the worker's whole process group.
            ``None`` means ``"worker"`` for functions and for programs run by a Python interpreter, and
            ``"group"`` for other programs.
        warm: modules to import once, before the workers are forked: ``"auto"``, or names separated by commas;
            ``"off"`` for none.
    """

    __slots__ = ()

    signals_to_forward: str | None = None
    stop_scope: str | None = None
    warm: str = "off"


class Preload(Value):
    """Steps before the workers are forked, such as imports; see :mod:`.warm` for their format.

    Args:
        steps: steps in order. If they contain no modules, workers start cold.
        is_explicit: true if the user has named the modules.
        remarks: messages to the user, one line each.
        folders: folders of the user's own modules, which are not preloaded.
    """

    steps: tuple[str, ...] = ()
    is_explicit: bool = False
    remarks: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(step for step in self.steps if "=" not in step)


class LogSettings(Value):
    """Destinations of the workers' output; see also the options' help in :mod:`.options`.

    Args:
        log_dir: base directory of log files; ``None`` for a temporary directory. ``/dev/null``: no files.
        redirects: streams for files only, as bits (1: stdout, 2: stderr), for all ranks or by local rank.
        tee: the same, for streams that go to a file and to the console.
        local_ranks_filter: local ranks that are shown on the console; ``None`` for all.
        logs_specs: name or object of a user's class that chooses all destinations instead.
    """

    log_dir: str | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    local_ranks_filter: frozenset[int] | None = None
    log_line_prefix_template: str | None = None
    capture_stderr: bool = False
    duplicate_stdout_filters: Sequence[str] = ()
    duplicate_stderr_filters: Sequence[str] = ()
    logs_specs: Any = None


class JobSpec(Record, WorkerSettings):
    """A job, as one node's agent sees it. See also the options' help in :mod:`.options`.

    Args:
        command: program, function, or (if ``run_path``) script that the workers run, with its arguments.
        variables: environment variables that each worker gets in addition.
        notices: lines about the settings, printed before the job starts.
        name: script, program or function, for the report.
        shutdown_timeout: seconds between the first signal of a stop and SIGKILL.
        signals: signals on which the agent stops the job.
        forwarded: signals that the agent only passes on to the workers.
        linger: seconds for which descendants of successful workers may continue; ``None`` never stops them.
        master_addr: address at which rank 0 hosts the workers' store.
        master_port: port of that store; a new port for every attempt if ``None``.
        cpus: CPUs that each worker may use, by local rank; ``None`` for the CPUs of the agent.
        uninterruptible_state_timeout: limit in seconds for workers' uninterruptible sleep; 0 for none.
        make_handler: function that returns a rendezvous handler of the program or of another package, which
            assigns the ranks. ``None`` without such a handler. The next two fields are for this handler.
        exit_barrier_timeout: seconds to wait for other nodes at the job's end; ``None`` for the default.
        monitor_interval: seconds between two questions whether nodes wait to join.
        health_check_port: ``None`` for no server, 0 for any free port.
        health_check_host: address of the server; ``None`` for the default of :class:`.HealthCheckServer`.
    """

    nproc: int
    run_id: str
    _: KW_ONLY
    command: Sequence[Any] = ()
    run_path: bool = False
    start_method: str = "spawn"
    variables: Mapping[str, str] = fresh(factory=dict)
    logs: LogSettings = LogSettings()
    notices: Sequence[str] = ()
    role: str = "default"
    name: str = ""
    max_restarts: int = 0
    report: str | None = None
    node_check: Sequence[str] | None = None
    node_check_timeout: float = 60.0
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT
    signals: Sequence[int] = ()
    forwarded: Sequence[int] = ()
    stop_scope: str = "worker"
    linger: float | None = DEFAULT_LINGER
    master_addr: str = "localhost"
    master_port: int | None = None
    cpus: Sequence[Sequence[int]] | None = None
    virtual_local_rank: bool = False
    uninterruptible_state_timeout: float = 0.0
    preload: Preload | None = None
    rendezvous: Any = None
    make_handler: Callable[[], Any] | None = None
    exit_barrier_timeout: float | None = None
    monitor_interval: float = DEFAULT_MONITOR_INTERVAL
    rdzv_backend: str = "c10d"
    event_log_handler: str = "null"
    has_metrics: bool = False
    health_check_port: int | None = None
    health_check_host: str | None = None
    health_check_timeout: float = DEFAULT_HEALTH_TIMEOUT

    @property
    def entry_point(self) -> str:
        """Name of the workers' program or function in events."""
        first = self.command[0] if self.command else ""
        return str(first.__qualname__) if callable(first) else os.path.basename(first)

    @property
    def is_multi_node(self) -> bool:
        return self.rendezvous is not None

    @property
    def has_peers(self) -> bool:
        """True if the job may have other nodes."""
        return self.is_multi_node or self.make_handler is not None

    @property
    def is_observed(self) -> bool:
        return self.event_log_handler != "null" or self.has_metrics or self.health_check_port is not None

    @property
    def event_log(self) -> str | None:
        """Absolute path of the job's event log; ``None`` if events are not written to a file."""
        kind, _, path = self.event_log_handler.partition(":")
        return os.path.abspath(path) if kind == "file" else None

    @property
    def restart_settings(self) -> RestartSettings:
        from elasticrs._engine.job.restart_policy import RestartSettings

        window = getattr(self.max_restarts, "window", None)
        first, longest = delays(self.restart_delay)
        # With --on-failure replace, exclude no node, because its healthy workers would have to stop, too.
        most = None if self.on_failure == "replace" else self.max_excluded_nodes
        return RestartSettings(int(self.max_restarts), window, first, longest, self.max_same_failures, most)

    @property
    def fatal_codes(self) -> frozenset[int]:
        return exit_codes(self.fatal_exit_codes)


def random_run_id() -> str:
    """Return a random UUID (version 4), as torchrun does for a job without an id."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
_NOT_FORWARDED = frozenset(
    (*_UNCATCHABLE, "SIGCHLD", "SIGTSTP", "SIGCONT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
)
"""Signals that cannot be caught, have a meaning for the agent, or report an error in the agent itself."""


def parse_signals(names: str) -> tuple[int, ...]:
    """Parse signal names such as ``SIGTERM,SIGUSR1``. A ``ValueError`` says what is expected."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name in _UNCATCHABLE:
            raise ValueError(f"names of signals that can be caught (not {name})")
    return _signals(found, "names of signals such as SIGTERM,SIGUSR1")


def parse_forwarded(names: str) -> tuple[int, ...]:
    """Parse signal names such as ``SIGUSR1,USR2``. A ``ValueError`` says what is expected."""
    found = ["SIG" + name.strip().upper().removeprefix("SIG") for name in names.split(",") if name.strip()]
    return _signals(found, "names of signals that can be passed on, such as USR1,USR2", _NOT_FORWARDED)


def _signals(names: Sequence[str], expected: str, refused: Collection[str] = ()) -> tuple[int, ...]:
    import signal

    known = signal.Signals.__members__
    for name in names:
        if name not in known or name in refused:
            raise ValueError(f"{expected} (not {name})")
    return tuple(int(known[name]) for name in names)


def forwarded_signals(given: Sequence[int] | None, handled: Sequence[int]) -> tuple[int, ...]:
    """Return the signals to pass on to workers. Raise ``ValueError`` if one of ``given`` stops the job."""
    import signal

    if given is None:
        return tuple(signum for signum in (signal.SIGUSR1, signal.SIGUSR2) if signum not in handled)
    both = [signal.Signals(signum).name for signum in given if signum in handled]
    if both:
        raise ValueError(f"signals that do not stop the job (not {','.join(both)})")
    return tuple(given)


def forwarded_by_name(names: str | None, handled: Sequence[int]) -> tuple[int, ...] | None:
    if names is None:
        return None
    try:
        return forwarded_signals(parse_forwarded(names), handled)
    except ValueError as error:
        raise ValueError(f"signals_to_forward: got {names!r}, expected {error}") from None


def health_port(text: str) -> int:
    limit = 65535
    if not (text.isascii() and text.isdecimal()) or int(text) > limit:
        raise ValueError(f"a port from 0 (any that is free) to {limit}")
    return int(text)


def shutdown_timeout_from(environ: Mapping[str, str]) -> float:
    return _value_from(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds, DEFAULT_SHUTDOWN_TIMEOUT)


def exit_barrier_timeout_from(environ: Mapping[str, str]) -> float:
    return _value_from(environ, "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", seconds, DEFAULT_EXIT_BARRIER_TIMEOUT)


def log_prefix_from(environ: Mapping[str, str]) -> str:
    return _value_from(environ, "PET_LOG_PREFIX", one_of(*LOG_PREFIXES), "auto")


def uninterruptible_state_timeout_from(environ: Mapping[str, str]) -> float:
    """Return the maximum seconds of uninterruptible sleep; 0 for no limit. As in torch, invalid text is 0."""
    try:
        return float(environ.get(UNINTERRUPTIBLE_STATE_VARIABLE, "0"))
    except ValueError:
        return 0.0


def control_folder_from(environ: Mapping[str, str]) -> str:
    """Return the folder of the sockets over which ``elasticctl`` connects to this user's agents; empty if
    agents open no socket. Do not use ``XDG_RUNTIME_DIR``, because it is deleted at logout while jobs
    continue.
    """
    return environ.get("ELASTICRS_CONTROL_DIR", f"{CONTROL_FOLDERS}{os.geteuid()}")


def _value_from(environ: Mapping[str, str], name: str, read: Callable[[object], T], default: T) -> T:
    text = environ.get(name)
    if not text:
        return default
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{name}: got {text!r}, expected {error}") from None


def parse_streams(text: str) -> int | dict[int, int]:
    """Parse ``--redirects`` or ``--tee``: bits (1: stdout, 2: stderr), also by local rank (``0:1,12:3``)."""
    if text in ("0", "1", "2", "3"):
        return int(text)
    chosen: dict[int, int] = {}
    for entry in text.split(","):
        rank, colon, value = entry.partition(":")
        if not (colon and rank.isascii() and rank.isdecimal() and value in ("0", "1", "2", "3")):
            raise ValueError("0, 1 (stdout), 2 (stderr), 3 (both), or LOCAL_RANK:N,LOCAL_RANK:N")
        chosen[int(rank)] = int(value)
    return chosen


def check_start_method(name: str) -> None:
    if name not in START_METHODS:
        raise ValueError(f"start_method: got {name!r}, expected one of {', '.join(START_METHODS)}")


def default_stop_scope(entrypoint: object) -> str:
    """Return the default of ``stop_scope``: ``"worker"`` for Python, because a worker may need its helper
    processes while it saves; ``"group"`` for other programs, because shells do not pass signals on.
    """
    is_python = callable(entrypoint) or entrypoint in (sys.executable, os.environ.get("PYTHON_EXEC"))
    return "worker" if is_python or _is_named_python(entrypoint) else "group"


def _is_named_python(program: object) -> bool:
    if not isinstance(program, str):
        return False
    name = os.path.basename(program)
    version = name.removeprefix("python").removesuffix("t")
    return name.startswith("python") and not version.strip("0123456789.")


def hang_limits(timeout: float | str) -> tuple[float | None, float | None]:
    """Parse the option --hang-timeout. Return two values: the limit in seconds (``None`` for ``auto``), and
    the smallest limit that ``auto`` may learn.
    """
    if not isinstance(timeout, str):
        return float(timeout), None
    name, colon, least = timeout.partition(":")
    if name != "auto":
        raise ValueError(timeout)
    return None, seconds(least) if colon else None


def seconds_within(
    low: float, high: float = LONGEST, *, above: bool = False, expected: str = ""
) -> Callable[[object], float]:
    """Return a function that parses durations in seconds, from ``low`` to ``high``. With ``above``, ``low``
    itself is invalid. For invalid values, the function raises a ``ValueError`` that says what is expected.
    """
    if not expected and high < LONGEST:
        expected = f"seconds, {low:g} to {high:g}"
    elif not expected:
        least = f"more than {low:g}" if above else f"{low:g} or more"
        expected = f"seconds or a duration such as 10m, {least}"

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(expected)
        try:
            number = in_seconds(value) if isinstance(value, str) else float(value)
        except (ValueError, OverflowError):
            raise ValueError(expected) from None
        if number > high == LONGEST:
            raise ValueError(f"seconds, {LONGEST:.0f} at most")
        # Negate the test to reject NaN, because every comparison with NaN is false.
        if not low <= number <= high or (above and number == low):
            raise ValueError(expected)
        return number

    return read


seconds = seconds_within(0)


def whole(low: int, high: float = float("inf"), *, expected: str = "") -> Callable[[object], int]:
    """Return a function that parses whole numbers, ``low`` to ``high``. Its ``ValueError`` says what is
    valid.
    """
    expected = expected or f"a whole number from {low}"

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(expected)
        try:
            number = int(value)
        except ValueError:
            raise ValueError(expected) from None
        if not low <= number <= high:
            raise ValueError(expected)
        return number

    return read


def one_of(*names: str) -> Callable[[object], str]:
    """Return a function that accepts only these names. Its ``ValueError`` lists them."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{', '.join(names[:-1])} or {names[-1]}")
        return value

    return read


_NOT_REPLACEABLE = "single workers cannot be replaced"


def why_not_replaceable(start_method: str = "spawn", back_end: str | None = None) -> str | None:
    """Return why individual workers cannot be replaced; ``None`` if they can be. ``back_end`` names the
    rendezvous of the nodes, if workers cannot join it.
    A program without ``elasticrs.train`` is not rejected, because an installed package may use it.
    """
    if start_method != "spawn":
        return f"with start method {start_method}, {_NOT_REPLACEABLE}; use spawn"
    if back_end is not None:
        return f"with {back_end}, {_NOT_REPLACEABLE}; use c10d or etcd"
    return None


MAX_IN_WINDOW = 100
"""Maximum number of restarts in a window, because a record of limited size keeps their times."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class MaxRestarts(int):
    """Maximum number of restarts, within ``window`` seconds or (``None``) in the whole job.
    A subclass of ``int``, because programs expect an ``int`` as in torchrun.
    """

    window: float | None = None

    @staticmethod
    def parse(text: str) -> MaxRestarts:
        number, slash, window = text.partition("/")
        if not (number.isascii() and number.isdecimal()) or (slash and not window):
            raise ValueError("a whole number, 0 or more, or a number per duration such as 3/1h")
        found = MaxRestarts(number)
        if slash:
            try:
                found.window = _policy_duration(window)
            except ValueError as error:
                raise ValueError(f"a number per duration such as 3/1h, with {error}") from None
            if not 1 <= found <= MAX_IN_WINDOW:
                raise ValueError(f"1 to {MAX_IN_WINDOW} restarts per duration")
        return found


def in_seconds(text: str) -> float:
    """Parse a duration with or without a unit, such as ``90``, ``1.5s``, ``10m``, ``1h`` or ``2d``."""
    unit = _UNITS.get(text[-1:])
    return float(text[:-1] if unit else text) * (unit or 1.0)


_policy_duration = seconds_within(
    0, 30 * 86400.0, above=True, expected="a duration such as 30s, 10m, 1h or 2d, of at most 30 days"
)


def delays(text: str) -> tuple[float, float]:
    """Parse ``0``, a duration, or ``FIRST..LONGEST``. Return the first and the longest delay in seconds."""
    if text == "0":
        return 0.0, 0.0
    first, dots, longest = text.partition("..")
    try:
        least = _policy_duration(first)
        most = _policy_duration(longest) if dots else least
    except ValueError as error:
        raise ValueError(f"{error}, or FIRST..LONGEST such as 1s..5m") from None
    if most < least:
        raise ValueError("FIRST..LONGEST, where LONGEST is not shorter than FIRST")
    return least, most


def exit_codes(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        low, dash, high = part.partition("-")
        codes = (low, high if dash else low)
        if not all(code.isascii() and code.isdecimal() and 1 <= int(code) <= 255 for code in codes):
            raise ValueError("exit codes from 1 to 255, such as 3,40-49")
        span = range(int(codes[0]), int(codes[1]) + 1)
        if not span or not found.isdisjoint(span):
            raise ValueError(f"exit codes in ascending ranges that do not overlap (not {part})")
        found.update(span)
    return frozenset(found)


_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def keep_memory(text: str) -> tuple[float, int]:
    """Parse the option ``--keep-memory``: a share of memory, such as ``40%``, or a number of bytes, such as
    ``20G``. Return two values: the share, such as 0.4, and the number of bytes. One of them is always 0.
    """
    number, unit = text[:-1], text[-1:].upper()
    try:
        if unit == "%" and 0 <= (share := float(number)) <= 90:
            return share / 100, 0
        size = float(number) * _BYTES[unit] if unit in _BYTES else float(text)
        if unit != "%" and 0 <= size <= 1 << 50:
            return 0.0, int(size)
    except ValueError:
        pass
    raise ValueError("a share of memory from 0% to 90%, a number of bytes such as 20G, or 0")


def keep_bandwidth(text: str) -> int:
    """Parse the option ``--keep-bandwidth``: bytes per second, such as ``500M``; 0 for no limit."""
    try:
        share, rate = keep_memory(text)
        if not share and (not rate or rate >= _BYTES["M"]):
            return rate
    except ValueError:
        pass
    raise ValueError("bytes per second such as 500M, at least 1M, or 0 for no limit")


def folder(text: str) -> str:
    """Check that a path is not that of a file, so that a folder can be created there."""
    if os.path.isfile(text):
        raise ValueError("the path of a folder")
    return text


class ExitCodes(Value):
    """Exit codes of the launcher for a failed job; see ``exit_codes`` in :class:`.WorkerSettings`."""

    kind: str = "torchrun"
    permanent: int = 93
    unfit: int = 193

    @staticmethod
    def parse(text: str) -> ExitCodes:
        kind, colon, numbers = text.partition(":")
        expected = "torchrun, worker, verdict or verdict:PERMANENT,UNFIT (two codes from 3 to 255)"
        if kind not in ("torchrun", "worker", "verdict") or (colon and kind != "verdict"):
            raise ValueError(expected)
        if not colon:
            return ExitCodes(kind)
        codes = numbers.split(",")
        if len(codes) != 2 or not all(code.isascii() and code.isdecimal() for code in codes):
            raise ValueError(expected)
        permanent, unfit = map(int, codes)
        # 0, 1 and 2 already mean success, failure and a usage error.
        if permanent == unfit or not all(3 <= code <= 255 for code in (permanent, unfit)):
            raise ValueError(expected)
        return ExitCodes(kind, permanent, unfit)


NVML = "nvml"
"""Value of ``--node-check`` that stands for elasticrs's own check, and not for a command."""


class HealthSource(Value):
    """A node health check: elasticrs's own check with NVML, or a user's program and its arguments (``words``,
    which are empty for NVML).
    """

    title: str
    words: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> HealthSource:
        name, colon, _ = text.strip().partition(":")
        if name in ("gpud", "nvhcd"):
            raise ValueError(
                f"a command, because the source {name} is gone: copy contrib/node-checks/{name}.sh from the"
                f" project, and pass 'bash /PATH/{name}.sh'"
            )
        if name != NVML:
            return HealthSource("the node check", _words(text))
        if colon:
            raise ValueError(name)
        return HealthSource(NVML)


def _words(text: str) -> tuple[str, ...]:
    import shlex

    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words:
        raise ValueError("a program and its arguments, with closed quotes")
    return tuple(words)


def report_path(text: str) -> str:
    """Return the path. The text may be a path or ``file:PATH``, as for events."""
    path = text.removeprefix("file:")
    if not path:
        raise ValueError("PATH or file:PATH")
    return path
