"""The command line as a table: names, conversions, help. Nothing is parsed here.

The table replaces :mod:`argparse` on the launch path, which costs 13 ms with this many options;
:func:`elasticrs.run.get_args_parser` builds an argparse parser from the same table for programs that want
one.
"""

from __future__ import annotations

from elasticrs import config
from elasticrs._value import Value
from elasticrs.logs import parse_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import KW_ONLY

OURS = "elasticrs"
NEWER = frozenset(("exit-barrier-timeout",))
"""Ours, until torch has them: in its sources, not yet in a release."""
"""The group of options that torchrun does not have."""

SHELLS = ("bash", "zsh", "tcsh")


class Option(Value):
    """One option.

    Args:
        name: its long name with dashes; underscores are accepted as well.
        default: what it is without the option and its variable.
        convert: text to value; raises ``ValueError`` with what is expected. ``None`` makes it a flag.
        help: for ``--help``.
        short: a letter.
        metavar: what stands for the value in ``--help``.
        group: :data:`OURS` for an option that torchrun does not have.
        has_variable: whether ``PET_<NAME>`` sets it.
    """

    name: str
    default: object
    convert: Callable[[str], object] | None
    help: str
    _: KW_ONLY
    short: str | None = None
    metavar: str = "VALUE"
    group: str = "torchrun"
    has_variable: bool = True

    @property
    def dest(self) -> str:
        """The name of its attribute."""
        return self.name.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """True if the option takes no value."""
        return self.convert is None

    @property
    def flag(self) -> str:
        """Its name as it is typed."""
        return "--" + self.name

    @property
    def variable(self) -> str:
        """The environment variable that gives its default."""
        return "PET_" + self.dest.upper()


def _count(text: str) -> int:
    expected = "a whole number, 0 or more"
    try:
        value = int(text)
    except ValueError:
        raise ValueError(expected) from None
    if value < 0:
        raise ValueError(expected)
    return value


def _interval(text: str) -> float:
    value = config.seconds(text)
    if value == 0:
        raise ValueError("seconds, more than 0")
    return value


def _port(text: str) -> int:
    expected = "a port, 0 to 65535"
    try:
        value = int(text)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 <= value < 2**16:
        raise ValueError(expected)
    return value


def _nodes(text: str) -> tuple[int, int]:
    expected = "N or MIN:MAX with 1 <= MIN <= MAX"
    parts = text.split(":")
    try:
        low, high = int(parts[0]), int(parts[-1])
    except ValueError:
        raise ValueError(expected) from None
    if len(parts) > 2 or not 0 < low <= high:
        raise ValueError(expected)
    return low, high


def _workers(text: str) -> int | str:
    expected = "a whole number from 1, cpu, gpu, xpu or auto"
    # Torch can be extended with devices of other names.
    if text.isidentifier():
        return text
    try:
        value = int(text)
    except ValueError:
        raise ValueError(expected) from None
    if value < 1:
        raise ValueError(expected)
    return value


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1] and text[0] not in text[1:-1]:
        # No shell has taken them off: the arguments came as a list, say in YAML.
        text = text[1:-1]
    for entry in filter(None, text.split(",")):
        key, _, value = entry.partition("=")
        if not key.strip() or not value.strip():
            raise ValueError("KEY=VALUE,KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError("local ranks separated by commas, such as 0,3")
    return frozenset(map(int, parts))


def _texts(text: str) -> tuple[str, ...]:
    # Two commas are one that belongs to the text.
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _affinity(text: str) -> str:
    if text not in config.AFFINITY_MODES:
        raise ValueError("node, socket, exclusive or core-complex")
    return text


def _shell(text: str) -> str:
    if text not in SHELLS:
        raise ValueError("bash, zsh or tcsh")
    return text


def _start_method(text: str) -> str:
    if text not in ("spawn", "fork", "forkserver"):
        raise ValueError("spawn, fork or forkserver")
    return text


def _health_port(text: str) -> int:
    return config.health_port(text)


def _hang_timeout(text: str) -> float | str:
    name, colon, least = text.partition(":")
    try:
        if name != "auto":
            return _interval(text)
        if colon:
            _interval(least)
    except ValueError:
        raise ValueError("seconds, more than 0, auto or auto:SECONDS") from None
    return text


def _stop_scope(text: str) -> str:
    if text not in config.STOP_SCOPES:
        raise ValueError("worker or group")
    return text


def _drain(text: str) -> str:
    if text not in ("node", "job"):
        raise ValueError("node or job")
    return text


OPTIONS: tuple[Option, ...] = (
    Option("nnodes", (1, 1), _nodes, "number of nodes, or a range MIN:MAX (default 1)", metavar="N|MIN:MAX"),
    Option(
        "nproc-per-node",
        1,
        _workers,
        "workers on this node: a number, cpu, gpu, xpu or auto (default 1)",
        metavar="N",
    ),
    Option("standalone", False, None, "run on this node alone, with a free port and a random job id"),
    Option(
        "rdzv-backend",
        "static",
        str,
        "how nodes meet: c10d (also called elasticrs), static (the default), or one from a package",
        metavar="NAME",
    ),
    Option(
        "rdzv-endpoint",
        "",
        str,
        "HOST[:PORT] of the node that hosts the rendezvous store (port 29400); the same on all nodes",
        metavar="ENDPOINT",
    ),
    Option("rdzv-id", "none", str, "name of the job, the same on all nodes", metavar="ID"),
    Option("rdzv-conf", {}, _pairs, "rendezvous settings, listed below", metavar="KEY=VALUE,…"),
    Option(
        "max-restarts",
        0,
        _count,
        "how many times the workers are restarted before the job fails (default 0)",
        metavar="N",
    ),
    Option(
        "monitor-interval",
        config.DEFAULT_MONITOR_INTERVAL,
        _interval,
        "for a rendezvous backend or agent class that polls; ours react at once (default 0.1)",
        metavar="SECONDS",
    ),
    Option(
        "start-method",
        "spawn",
        _start_method,
        "with --run-path, how workers are started: spawn (the default), fork or forkserver",
        metavar="METHOD",
    ),
    Option(
        "event-log-handler",
        "null",
        str,
        "where events go: null (default), console, file:PATH, an entry point in elasticrs.event_handlers",
        metavar="NAME",
    ),
    Option(
        "role",
        "default",
        str,
        'role of the workers, in their environment and in log lines (default "default")',
        metavar="NAME",
    ),
    Option("module", False, None, "the script is a module, as in python -m", short="m"),
    Option("no-python", False, None, "the script is a program: run it without Python"),
    Option("run-path", False, None, "run the script with runpy.run_path in a function worker"),
    Option(
        "log-dir",
        None,
        str,
        "folder for log files; each run creates a folder of its own in it (default: a temporary one)",
        metavar="FOLDER",
    ),
    Option(
        "redirects",
        0,
        parse_streams,
        "write to files instead of the console: 1 stdout, 2 stderr, 3 both; by local rank: 0:1,1:3",
        short="r",
        metavar="STREAMS",
    ),
    Option(
        "tee",
        0,
        parse_streams,
        "write to files and show on the console, each line with its rank; same values",
        short="t",
        metavar="STREAMS",
    ),
    Option(
        "local-ranks-filter",
        None,
        _ranks,
        "show only these local ranks on the console, such as 0,3",
        metavar="RANKS",
    ),
    Option(
        "log-line-prefix-template",
        None,
        str,
        "prefix of --tee lines; may use ${role_name}, ${local_rank}, ${rank}, ${hostname}",
        metavar="TEXT",
    ),
    Option(
        "duplicate-stdout-filters",
        (),
        _texts,
        "copy --tee lines that contain one of these texts to filtered_stdout.log; write ,, for a comma",
        metavar="TEXT,…",
    ),
    Option(
        "duplicate-stderr-filters",
        (),
        _texts,
        "the same for stderr and filtered_stderr.log",
        metavar="TEXT,…",
    ),
    Option(
        "node-rank",
        0,
        _count,
        "rank of this node (static), or its place in the order of nodes (c10d); default 0",
        metavar="N",
    ),
    Option(
        "master-addr", "127.0.0.1", str, "address of node rank 0, for the static rendezvous", metavar="HOST"
    ),
    Option(
        "master-port",
        None,
        _port,
        "port on node rank 0 (default: 29500 for several nodes, a free one on one node)",
        metavar="PORT",
    ),
    Option(
        "local-addr",
        None,
        str,
        "address at which other nodes reach this one (default: detected)",
        metavar="HOST",
    ),
    Option(
        "logs-specs",
        None,
        str,
        "class that decides where output goes: an entry point in torchrun.logs_specs",
        metavar="NAME",
        has_variable=False,
    ),
    Option(
        "numa-binding",
        None,
        _affinity,
        "bind workers to CPUs near their GPUs: node, socket, exclusive or core-complex",
        metavar="MODE",
        has_variable=False,
    ),
    Option(
        "signals-to-handle",
        config.DEFAULT_SIGNALS,
        config.parse_signals,
        "signals that stop the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        metavar="NAMES",
    ),
    Option(
        "shutdown-timeout",
        None,
        config.seconds,
        "seconds between the stop signal and SIGKILL (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)",
        metavar="SECONDS",
    ),
    Option(
        "virtual-local-rank",
        False,
        None,
        "each worker sees LOCAL_RANK=0 and only its own GPU, as device 0",
    ),
    Option(
        "print-completion",
        None,
        _shell,
        "print a completion script for bash, zsh or tcsh, and exit (needs shtab)",
        metavar="SHELL",
        has_variable=False,
    ),
    Option(
        "exit-barrier-timeout",
        None,
        config.seconds,
        "how long a finished node waits for the others (TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT or 300)",
        metavar="SECONDS",
        group=OURS,
    ),
    Option(
        "linger",
        config.DEFAULT_LINGER,
        config.seconds,
        "after success, seconds that processes left behind by workers may go on (default 5)",
        metavar="SECONDS",
        group=OURS,
    ),
    Option(
        "signals-to-forward",
        None,
        config.parse_forwarded,
        "signals that the workers get and that do nothing else (default USR1,USR2)",
        metavar="NAMES",
        group=OURS,
    ),
    Option(
        "stop-scope",
        None,
        _stop_scope,
        "whom a stop signals first: the worker, and the rest of its process group when it has ended, or the "
        "whole group (default worker, group with --no-python)",
        metavar="worker|group",
        group=OURS,
    ),
    Option(
        "exit-timeout",
        config.DEFAULT_EXIT_TIMEOUT,
        config.seconds,
        "a rank that has not ended this long after an uncaught exception has failed (default 10; 0: never)",
        metavar="SECONDS",
        group=OURS,
    ),
    Option(
        "drain",
        None,
        _drain,
        "what a signal to this agent ends: node (the default; the others go on) or the whole job",
        metavar="node|job",
        group=OURS,
    ),
    Option(
        "hang-timeout",
        None,
        _hang_timeout,
        "a rank without a heartbeat for this long has failed; auto[:LEAST] learns the limit from steps",
        metavar="SECONDS|auto",
        group=OURS,
    ),
    Option(
        "hang-startup-timeout",
        None,
        _interval,
        "the same, from the start of the workers to the first heartbeat (default: no limit)",
        metavar="SECONDS",
        group=OURS,
    ),
    Option(
        "use-env",
        False,
        None,
        "accepted for command lines of torch.distributed.launch; always on",
        group=OURS,
    ),
    Option(
        "health-check-port",
        None,
        _health_port,
        "port for /healthz, /readyz, /metrics, /status (default: TORCHELASTIC_HEALTH_CHECK_PORT)",
        metavar="PORT",
        group=OURS,
    ),
    Option(
        "health-check-host",
        None,
        str,
        "address that the health check server listens on (default: ELASTICRS_HEALTH_CHECK_HOST or 127.0.0.1)",
        metavar="HOST",
        group=OURS,
    ),
    Option(
        "health-check-timeout",
        config.DEFAULT_HEALTH_TIMEOUT,
        config.seconds,
        "seconds without progress after which /healthz answers 503 (default 60)",
        metavar="SECONDS",
        group=OURS,
    ),
    Option(
        "keep-descendants",
        False,
        None,
        "after success, leave processes that workers left behind alone",
        group=OURS,
    ),
    Option(
        "capture-stderr",
        False,
        None,
        "write stderr of all workers to files as well, so that the failure report shows the last lines",
        group=OURS,
    ),
)
