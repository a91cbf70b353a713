"""Table of the command-line options, each declared once, for all parsers, ``--help`` and programs.

The default comes from the field with the option's name in :mod:`.config`, if there is one.

:func:`parse` reads words as argparse would, as far as users of torchrun can notice a difference. It replaces
:mod:`argparse`, which takes 13 ms with this many options. All words after the script's name are arguments of
the script.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from elasticrs._engine.job import config
from elasticrs._engine.job.config import JobSpec, LogSettings, UnresolvedSettings, UsageError, WorkerSettings
from elasticrs._engine.job.value import Value, defaults_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from dataclasses import KW_ONLY
    from typing import Any

OURS = "elasticrs"
"""Group of the options that torchrun does not have."""
NEWER = frozenset(("exit-barrier-timeout",))
"""Options in torch's source code that no release has yet."""

SHELLS = ("bash", "zsh", "tcsh")
TOPICS = ("all", "rdzv")
"""Words that ``--help`` accepts."""


class Namespace(SimpleNamespace):
    """Values of all options, by name with underscores. ``given`` has the names on the command line."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Kind(Value):
    """Kind of value of an option. ``convert`` parses it. ``needs`` says in errors which values are valid."""

    convert: Callable[[str], object]
    metavar: str
    needs: str = ""


class Option(Value):
    """A command-line option.

    Args:
        name: long name with dashes. Underscores are accepted as well.
        kind: kind of value; ``None`` for a flag.
        has_variable: true if ``PET_<NAME>`` also sets the option.
        typed: default as text, if torchrun stores the value of this option as text.
        repeats: true if the option may be repeated. Its value is a tuple.
        since: first version with the option, or ``unreleased``, which ``tools/bump.py`` replaces. Empty if
            the option is in every release.
    """

    name: str
    help: str
    default: object
    kind: Kind | None = None
    _: KW_ONLY
    short: str | None = None
    group: str = "torchrun"
    has_variable: bool = True
    typed: str | None = None
    repeats: bool = False
    since: str = ""

    @property
    def dest(self) -> str:
        """Name of the attribute in an argparse namespace."""
        return self.name.replace("-", "_")

    @property
    def default_as_typed(self) -> object:
        """Default value as torchrun stores it in an argparse namespace."""
        if self.typed is not None:
            return self.typed
        return list(self.default) if isinstance(self.default, tuple) else self.default

    @property
    def flag(self) -> str:
        return "--" + self.name

    @property
    def variable(self) -> str:
        return "PET_" + self.dest.upper()


_number_of_workers = config.whole(1, expected="a whole number from 1, cpu, gpu, xpu or auto")
_interval = config.seconds_within(0, above=True)


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
    # Accept any identifier, because torch extensions can add device types.
    return text if text.isidentifier() else _number_of_workers(text)


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1] and text[0] not in text[1:-1]:
        # Remove quotes that no shell has removed, for example from a YAML list.
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
    # A double comma stands for a literal comma.
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _hang_timeout(text: str) -> float | str:
    name, colon, least = text.partition(":")
    try:
        if name != "auto":
            return _interval(text)
        if colon:
            _interval(least)
    except ValueError:
        raise ValueError("seconds or a duration such as 10m, more than 0, auto or auto:DURATION") from None
    return text


def _text_of(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a converter that checks a text with ``parse``, but returns the text itself."""

    def convert(text: str) -> str:
        parse(text)
        return text

    return convert


def _node_check(text: str) -> tuple[str]:
    config.HealthSource.parse(text)
    return (text,)


def _warm(text: str) -> str:
    expected = "off, auto, or names of modules separated by commas, such as torch,numpy"
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(expected if name == text else f"{expected} (not {name!r})")
    if len(names) > 1 and not {"off", "auto"}.isdisjoint(names):
        raise ValueError(f"{expected} (off and auto stand alone)")
    return ",".join(names)


SECONDS = Kind(config.seconds, "DURATION")
EXIT_TIMEOUT = Kind(config.seconds, "DURATION", "seconds, 0 for any time")
INTERVAL = Kind(_interval, "DURATION", "seconds above 0")
HANG_TIMEOUT = Kind(_hang_timeout, "DURATION|auto", "seconds above 0, 'auto' or 'auto:SECONDS'")
ON_FAILURE = Kind(config.one_of("restart", "replace"), "restart|replace", "'restart' or 'replace'")
MAX_RESTARTS = Kind(config.MaxRestarts.parse, "N|N/DURATION")
RESTART_DELAY = Kind(_text_of(config.delays), "FIRST..LONGEST")
REPORT = Kind(config.report_path, "PATH")
NODE_CHECK = Kind(_node_check, "COMMAND|SOURCE")
KEEP_PEERS = Kind(config.whole(0, 1, expected="0 or 1"), "0|1")
KEEP_BANDWIDTH = Kind(_text_of(config.keep_bandwidth), "BYTES")
FATAL_EXIT_CODES = Kind(_text_of(config.exit_codes), "CODES")
KEEP_MEMORY = Kind(_text_of(config.keep_memory), "SHARE%|BYTES")
EXIT_CODES = Kind(_text_of(config.ExitCodes.parse), "torchrun|verdict|worker")
STOP_SCOPE = Kind(config.one_of("worker", "group"), "worker|group", "'worker' or 'group'")
WARM = Kind(_warm, "auto|MODULE,…", "'off', 'auto' or names of modules separated by commas")
COUNT = Kind(config.whole(0, expected="a whole number, 0 or more"), "N")
PORT = Kind(config.whole(0, 65535, expected="a port, 0 to 65535"), "PORT")
HEALTH_PORT = Kind(config.health_port, "PORT")
NODES = Kind(_nodes, "N|MIN:MAX")
WORKERS = Kind(_workers, "N")
STREAMS = Kind(config.parse_streams, "STREAMS")
RANKS = Kind(_ranks, "RANKS")
PAIRS = Kind(_pairs, "KEY=VALUE,…")
TEXTS = Kind(_texts, "TEXT,…")
NAME, HOST, TEXT = Kind(str, "NAME"), Kind(str, "HOST"), Kind(str, "TEXT")
STOP_SIGNALS = Kind(config.parse_signals, "NAMES")
FORWARDED_SIGNALS = Kind(config.parse_forwarded, "NAMES")
START_METHOD = Kind(config.one_of(*config.START_METHODS), "METHOD")
AFFINITY = Kind(config.one_of(*config.AFFINITY_MODES), "MODE")
DRAIN = Kind(config.one_of("node", "job"), "node|job")
LOG_PREFIX = Kind(config.one_of(*config.LOG_PREFIXES), "auto|time|none", "'auto', 'time' or 'none'")
SHELL = Kind(config.one_of(*SHELLS), "SHELL")

_DEFAULTS = {
    **JobSpec.defaults(),
    **LogSettings.defaults(),
    **defaults_of(UnresolvedSettings),
}


def _setting(name: str, text: str, kind: Kind | None = None, **more: Any) -> Option:
    """Return the option for a setting. The setting's default replaces ``{default}`` in the option's help."""
    default = _DEFAULTS[name.replace("-", "_")]
    if "{default}" in text:
        text = text.replace("{default}", f"{default:g}")
    return Option(name, text, default, kind, **more)


# fmt: off
SECTIONS: dict[str, tuple[Option, ...]] = {
    "Workers": (
        Option("nproc-per-node", "workers on this node: a number, cpu, gpu, xpu or auto (default 1)",
               1, WORKERS, typed="1"),
        _setting("max-restarts", "number of restarts before the job fails "
                 "(default {default}), or how many times per duration, such as 3/1h", MAX_RESTARTS),
        _setting("restart-delay", "time to wait before a restart, such as 30s, or 1s..5m to double the delay "
                 "with every failure without progress (default 0). Each delay is drawn at random between "
                 "half and all of this time", RESTART_DELAY, group=OURS),
        _setting("max-same-failures", "how many equal failures without progress end the job although "
                 "restarts are left (default {default}; 0: no limit)", COUNT, group=OURS),
        _setting("max-excluded-nodes", "maximum number of unfit nodes that the job excludes (default "
                 "{default})", COUNT, group=OURS),
        _setting("fatal-exit-codes", "exit codes of workers that end the job without a restart, such as "
                 "3,40-49", FATAL_EXIT_CODES, group=OURS),
        _setting("exit-codes", "exit code of a failed job: torchrun (always 1; the default), verdict (93 if "
                 "another attempt would fail alike, 193 if this node is unfit, otherwise 1) or worker (that "
                 "of the worker that failed first)", EXIT_CODES, group=OURS),
        _setting("node-check", "health check of this node, before it joins the job and after each failure: a "
                 "command (exit code 0: fit) or nvml; may be repeated",
                 NODE_CHECK, group=OURS, repeats=True),
        _setting("node-check-timeout", "seconds after which a check is killed (default {default})",
                 INTERVAL, group=OURS),
        _setting("on-failure", "after a failure, restart all workers (the default), or replace only the "
                 "failed one (for elasticrs.train)", ON_FAILURE, group=OURS),
        Option("module", "run the script as a module, as python -m does", False, short="m"),
        Option("no-python", "run the script as a program, without Python", False),
        Option("run-path", "run the script with runpy.run_path in a function worker", False),
        Option("start-method", "with --run-path, how workers are started: spawn (the default), fork or "
               "forkserver", "spawn", START_METHOD),
        _setting("warm", "import modules once, and then fork the workers: auto (the modules of the script), "
                 "or names (default off)", WARM, group=OURS),
        _setting("warm-timeout", "seconds after which the workers start without these imports "
                 "(default {default})", INTERVAL, group=OURS),
        _setting("keep", "Lightning and Hugging Face scripts go on at the step of the failure; others use "
                 "elasticrs.Keep", group=OURS),
        _setting("keep-memory", "memory for kept state on this node: a share of the available memory, or "
                 "bytes such as 20G (default 40%; 0: keep nothing)", KEEP_MEMORY, group=OURS),
        _setting("keep-grace", "seconds for which a stop waits until the workers have kept their state "
                 "(default {default}; 0: do not wait)", SECONDS, group=OURS),
        _setting("keep-peers", "1: also copy sharded state to a partner node, so that the loss of one node "
                 "costs only the steps since that copy (default {default})", KEEP_PEERS, group=OURS),
        _setting("keep-bandwidth", "bytes per second that a node sends to its partner, such as 500M "
                 "(default 0: no limit)", KEEP_BANDWIDTH, group=OURS),
        _setting("keep-save", "folder in which the next job finds the kept state",
                 Kind(config.folder, "FOLDER", "the path of a folder"), group=OURS),
        _setting("role", 'role of the workers, in their environment and in log lines (default "default")',
                 NAME),
        Option("numa-binding", "bind workers to CPUs near their GPUs: node, socket, exclusive or "
               "core-complex", None, AFFINITY, has_variable=False),
        _setting("virtual-local-rank", "each worker sees LOCAL_RANK=0 and only its own GPU, as device 0"),
    ),
    "Nodes": (
        Option("nnodes", "number of nodes, or a range MIN:MAX (default 1)", (1, 1), NODES, typed="1:1"),
        Option("standalone", "run on this node alone, with a free port and a random job id", False),
        Option("rdzv-backend", "how nodes meet: c10d (also called elasticrs), etcd, static (the default), or "
               "a backend of a package", "static", NAME),
        Option("rdzv-endpoint", "HOST[:PORT] of the node with the rendezvous store (port 29400), or those of "
               "etcd's members (port 2379), separated by commas; the same on all nodes", "",
               Kind(str, "ENDPOINT")),
        Option("rdzv-id", "name of the job, the same on all nodes", "none", Kind(str, "ID")),
        Option("rdzv-conf", "rendezvous settings; --help rdzv lists them", {}, PAIRS, typed=""),
        Option("node-rank", "rank of this node (static), or its place in the order of nodes (c10d, etcd); "
               "default 0", 0, COUNT),
        Option("master-addr", "address of node rank 0, for the static rendezvous", "127.0.0.1", HOST),
        Option("master-port", "port on node rank 0 (default: 29500 for several nodes, a free one on one "
               "node)", None, PORT),
        Option("local-addr", "address at which other nodes reach this one (default: detected)", None, HOST),
        Option("no-scheduler", "ignore the environment variables of Slurm and Kubernetes, which otherwise "
               "provide defaults for the options above",
               False, group=OURS),
        Option("drain", "what a stop signal to this agent stops: node (only this node; the default) or job",
               None, DRAIN, group=OURS),
        Option("exit-barrier-timeout", "seconds that a finished node waits for the other nodes "
               "(TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT or 300)", None, SECONDS, group=OURS),
    ),
    "Output": (
        _setting("report", "write a JSON report of the job when it ends, to file:PATH", REPORT, group=OURS),
        _setting("log-dir", "folder for log files; each run creates its own folder in it (default: a "
                 "temporary folder)", Kind(str, "FOLDER")),
        _setting("redirects", "write to files instead of the console: 1 stdout, 2 stderr, 3 both; by local "
                 "rank: 0:1,1:3", STREAMS, short="r", typed="0"),
        _setting("tee", "write to files and show on the console, each line with its rank; values as for "
                 "--redirects",
                 STREAMS, short="t", typed="0"),
        _setting("capture-stderr", "write stderr of all workers to files as well, so that the failure report "
                 "shows the last lines", group=OURS),
        _setting("log-prefix", "timestamps in the launcher's own lines: auto (the default: not on a "
                 "terminal), time or none", LOG_PREFIX, group=OURS),
        _setting("local-ranks-filter", "show only these local ranks on the console, such as 0,3", RANKS,
                 typed=""),
        _setting("log-line-prefix-template", "prefix of --tee lines; may use ${role_name}, ${local_rank}, "
                 "${rank}, ${hostname}", TEXT, typed=""),
        _setting("duplicate-stdout-filters", "copy --tee lines that contain one of these texts to "
                 "filtered_stdout.log; write ,, for a comma", TEXTS),
        _setting("duplicate-stderr-filters", "the same for stderr and filtered_stderr.log", TEXTS),
        _setting("logs-specs", "class that chooses the log files: an entry point in torchrun.logs_specs",
                 NAME, has_variable=False),
    ),
    "Stops and hangs": (
        Option("signals-to-handle", "signals that stop the job (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
               config.parse_signals(config.DEFAULT_SIGNALS), STOP_SIGNALS, typed=config.DEFAULT_SIGNALS),
        _setting("signals-to-forward", "signals that are only passed on to the workers (default "
                 "USR1,USR2)", FORWARDED_SIGNALS, group=OURS),
        _setting("stop-scope", "what a stop signals first: worker (the rest of its process group once it has "
                 "exited) or group (the whole process group; the default with --no-python)",
                 STOP_SCOPE, group=OURS),
        Option("shutdown-timeout", "seconds between the stop signal and SIGKILL (default: "
               "TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)", None, SECONDS),
        _setting("exit-timeout", "seconds after an uncaught exception until a rank that has not exited is "
                 "considered failed, and is killed unless its exit makes progress (default {default}; 0: "
                 "never)",
                 EXIT_TIMEOUT, group=OURS),
        _setting("linger", "after success, seconds until leftover processes of workers are killed "
                 "(default {default})", SECONDS, group=OURS),
        Option("keep-descendants", "after success, do not kill leftover processes of workers",
               False, group=OURS),
        _setting("hang-timeout", "seconds without a heartbeat after which a rank is considered failed; "
                 "auto[:LEAST] learns "
                 "the limit from steps", HANG_TIMEOUT, group=OURS),
        _setting("hang-startup-timeout", "the same from the start of the workers until the first heartbeat "
                 "(default: no limit)", INTERVAL, group=OURS),
        _setting("hang-exit-timeout", "the same from the return of the program until the exit of the process "
                 "(default {default}; 0: no limit)", EXIT_TIMEOUT, group=OURS),
    ),
    "Monitoring": (
        _setting("health-check-port", "port for /healthz, /readyz, /metrics, /status, and a page for "
                 "browsers at / (default: TORCHELASTIC_HEALTH_CHECK_PORT)", HEALTH_PORT, group=OURS),
        Option("health-check-host", "address that the health check server listens on (default: "
               "ELASTICRS_HEALTH_CHECK_HOST or 127.0.0.1)", None, HOST, group=OURS),
        _setting("health-check-timeout", "seconds without progress after which /healthz answers 503 "
                 "(default {default})", SECONDS, group=OURS),
        _setting("event-log-handler", "destination of events: null (default), console, file:PATH, an entry "
                 "point "
                 "in elasticrs.event_handlers", NAME),
        Option("monitor-interval", "seconds between two polls of a rendezvous backend or agent class that "
               "polls; those of elasticrs wait for events "
               "(default 0.1)", config.DEFAULT_MONITOR_INTERVAL, INTERVAL),
    ),
    "Other": (
        Option("check", "report what would change for a torchrun command line, without running it", None,
               Kind(str, "torchrun ARGS…"), has_variable=False, group=OURS),
        Option("print-completion", "print a completion script for bash, zsh or tcsh, and exit (needs shtab)",
               None, SHELL, has_variable=False),
        Option("use-env", "accepted for command lines of torch.distributed.launch; always on",
               False, group=OURS),
    ),
}
# fmt: on
"""All options, in the sections and the order of ``--help``."""

OPTIONS = tuple(option for options in SECTIONS.values() for option in options)

_BY_NAME = {option.name: option for option in OPTIONS}
_BY_LETTER = {option.short: option for option in OPTIONS if option.short}
_REPEATED = frozenset(option.dest for option in OPTIONS if option.repeats)
_HELP_HINT = "; --help all lists the options"
_MIN_COMMON_PREFIX = 4
"""Minimum length of the prefix that an unknown option and the suggested option share."""
_BY_DEST = {option.dest: option for option in OPTIONS}


def set_by_variables(environ: Mapping[str, str]) -> set[str]:
    return {option.dest for option in OPTIONS if option.has_variable and option.variable in environ}


class TextRequested(Exception):  # noqa: N818 -- not an error
    """Raised for an option such as ``--help``, which only prints text. ``words`` are the option's values."""

    def __init__(self, what: str, *words: str) -> None:
        super().__init__(what)
        self.what = what
        self.words = words


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Namespace:
    """Parse the command line; it overrides ``PET_*`` variables. Raise ``UsageError`` or ``TextRequested``."""
    values: dict[str, object] = {}
    script: str | None = None
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument != "--" and argument.startswith("-") and len(argument) > 1:
            for name, value in _read(argument, arguments).items():
                earlier = values.get(name) if name in _REPEATED else None
                values[name] = earlier + value if isinstance(earlier, tuple) else value  # type: ignore[operator]
            continue
        script = next(arguments, None) if argument == "--" else argument
        rest = list(arguments)
    given = frozenset(values)
    values = {**_defaults(environ, values), **values}
    if script is None:
        raise UsageError("no script given: elasticrun [options] script [arguments of the script]")
    return Namespace(**values, given=given, training_script=script, training_script_args=rest)


def _read(argument: str, arguments: Iterator[str]) -> dict[str, object]:
    if argument.startswith("--"):
        name, equals, text = argument.partition("=")
        try:
            option = _find(name)
        except TextRequested as request:
            if request.what == "help":
                raise _help(text if equals else next(arguments, ""), is_exact=bool(equals)) from None
            raise
        if option.kind is None:
            if equals:
                raise UsageError(f"{option.flag}: got {text!r}, expected no value")
            return {option.dest: True}
        value = converted(option.kind, option.flag, text if equals else _value(option, arguments))
        if option.name in ("print-completion", "check"):
            raise TextRequested(option.name, str(value), *arguments)
        return {option.dest: value}
    letter, tail = argument[1], argument[2:]
    if letter == "h":
        raise _help(tail or next(arguments, ""), is_exact=False)
    found = _BY_LETTER.get(letter)
    if found is None:
        near = _suggestion(argument[1:])
        # The word may combine short options, so name only the first, unless it resembles a long option.
        raise UsageError(f"unknown option {argument if near != _HELP_HINT else '-' + letter}{near}")
    if found.kind is None:
        more = _read("-" + tail, arguments) if tail else {}
        return {found.dest: True, **more}
    text = tail[1:] if tail.startswith("=") else tail
    return {found.dest: converted(found.kind, "-" + letter, text or _value(found, arguments))}


def _help(word: str, *, is_exact: bool) -> TextRequested:
    """Return the exception that shows the help for ``--help=TOPIC`` (``is_exact``) or ``--help TOPIC``.
    Without ``=``, the next word may also be the script or another option.
    """
    is_script = not word or word.startswith("-") or "." in word or os.path.exists(word)
    if word not in TOPICS and (is_exact or not is_script):
        raise UsageError(f"--help: got {word!r}, expected " + " or ".join(TOPICS))
    return TextRequested("help", *([word] if word in TOPICS else []))


def _find(typed: str) -> Option:
    name = typed[2:].replace("_", "-")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in ("help", "version"):
        raise TextRequested(name)
    candidates = [option for option in OPTIONS if name and option.name.startswith(name)]
    # Prefer torchrun's options, because every abbreviation that torchrun accepts must also work here.
    torchs = [option for option in candidates if option.group != OURS]
    if not torchs and name and "help".startswith(name):
        raise TextRequested("help")
    candidates = torchs or [option for option in candidates if option.name in NEWER] or candidates
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UsageError(f"{typed} could be " + " or ".join(option.flag for option in candidates))
    raise UsageError(f"unknown option {typed}{_suggestion(name)}")


def near_name(typed: str, names: Iterable[str]) -> str | None:
    """Return the name that a user has probably meant, or ``None`` if no name is similar."""
    import difflib

    known, typed = list(names), typed.partition("=")[0].lower().replace("_", "-")
    near = difflib.get_close_matches(typed, known, 1)
    if not near:
        # Suggest a name with the same start, such as nproc-per-node for nprocs.
        near = [name for name in known if name.startswith(typed[: max(_MIN_COMMON_PREFIX, len(typed) - 1)])]
    return near[0] if near else None


def _suggestion(name: str) -> str:
    near = near_name(name, _BY_NAME)
    return f" (did you mean --{near}?)" if near else _HELP_HINT


def _value(option: Option, arguments: Iterator[str]) -> str:
    text = next(arguments, None)
    # Like argparse, reject values that look like options. Negative numbers and text with spaces are accepted.
    if text is None or (text.startswith("-") and len(text) > 1 and " " not in text and not _is_number(text)):
        example = f"{option.flag} {option.kind.metavar if option.kind is not None else ''}"
        raise UsageError(f"{option.flag}: a value is missing, as in {example}")
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def converted(kind: Kind, name: str, text: str) -> object:
    """Convert the text of the option or variable ``name``. For an invalid text, raise a usage error."""
    try:
        return kind.convert(text)
    except ValueError as error:
        raise UsageError(f"{name}: got {text!r}, expected {error}") from None


def _defaults(environ: Mapping[str, str], given: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for option in OPTIONS:
        found[option.dest] = option.default
        text = environ.get(option.variable) if option.has_variable else None
        if text is None or option.dest in given:
            continue
        if option.kind is None:
            try:
                found[option.dest] = bool(int(text))
            except ValueError:
                raise UsageError(f"{option.variable}: got {text!r}, expected 0 or 1") from None
        else:
            found[option.dest] = converted(option.kind, option.variable, text)
    return found


def check(settings: WorkerSettings) -> None:
    """Validate settings of a program by the rules of the command line. ``None`` is valid. A ``ValueError``
    says what is expected. A ``max_restarts`` string such as ``"3/1h"`` is converted.
    """
    for name in (*WorkerSettings.__annotations__, *UnresolvedSettings.__annotations__):
        kind, value = _BY_DEST[name].kind, getattr(settings, name)
        if kind is None and not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
        if kind is None or value is None:
            continue
        expected = kind.needs
        try:
            # Numbers as strings are valid only on the command line.
            is_right = isinstance(kind.convert(str(value)), int | float) != isinstance(value, str)
        except ValueError as error:
            expected, is_right = expected or str(error), False
        if not is_right:
            raise ValueError(f"{name} must be {expected}, got {value!r}")
    most = getattr(settings, "max_restarts", 0)
    if isinstance(most, str):
        try:
            settings.max_restarts = config.MaxRestarts.parse(most)  # type: ignore[attr-defined]
        except ValueError as error:
            raise ValueError(f"max_restarts must be {error}, got {most!r}") from None
    if settings.hang_startup_timeout is not None and settings.hang_timeout is None:
        raise ValueError("hang_startup_timeout needs hang_timeout: seconds or 'auto'")
