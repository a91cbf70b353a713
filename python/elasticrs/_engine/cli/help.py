"""Texts that ``--help`` and ``--check`` print. Slow modules are imported only when they are needed.

``--help`` is generated from the tables of options and settings. ``--check torchrun ARGS…`` describes how
elasticrun would run a torchrun command line; ``docs/compatibility.md`` explains the differences.
"""

from __future__ import annotations

import os

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, OURS, SECTIONS, TextRequested, parse, set_by_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from elasticrs._engine.job.config import JobSpec
    from elasticrs._engine.job.options import Namespace, Option
    from elasticrs._engine.nodes.transport.settings import Key

WIDTH = 80
_COLUMN, _CHECK_COLUMN = 28, 22
"""Columns in which the explanations of ``--help`` and of ``--check`` begin."""

_EXAMPLES = (
    (
        "one node, a worker for each GPU, up to three restarts",
        "--nproc-per-node gpu --max-restarts 3 train.py",
    ),
    (
        "two to four nodes; the same command on each",
        "--nnodes 2:4 --nproc-per-node gpu --rdzv-backend c10d \\\n"
        "      --rdzv-id job1 --rdzv-endpoint node1:29400 train.py --epochs 10",
    ),
)


COMMON = frozenset(
    (
        *("nproc-per-node", "max-restarts", "on-failure", "warm", "keep", "keep-save"),
        *("nnodes", "standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id"),
        *("log-dir", "redirects", "tee"),
        *("shutdown-timeout", "hang-timeout"),
    )
)
"""Options that plain ``--help`` explains. Of all other options, it only lists the names."""


def help_text(program: str, topic: str = "") -> str:
    """Return the help text: common options, ``all`` options, or settings of ``--rdzv-conf`` (``rdzv``)."""
    lines = _settings() if topic == "rdzv" else _overview(program, shows_all=topic == "all")
    return os.linesep.join(lines) + os.linesep


def _overview(program: str, *, shows_all: bool) -> Iterator[str]:
    yield f"usage: {program} [options] script [arguments of the script]"
    yield ""
    yield from _wrapped(
        "Start the workers of a distributed PyTorch job, watch them, and restart all of them when one fails.",
        "",
    )
    yield from ("", "Examples:")
    for meaning, command in _EXAMPLES:
        yield f"  # {meaning}"
        yield from f"  {program} {command}".split("\n")
    for title, options in SECTIONS.items():
        yield from ("", f"{title}:")
        for option in options:
            if shows_all or option.name in COMMON:
                yield from _row(_head(option), option.help)
        if title == "Other":
            yield from _row("  -h, --help [TOPIC]", "this text, --help all (every option) or --help rdzv")
            yield from _row("  --version", "show the version")
        others = [option.flag for option in options if option.name not in COMMON]
        if others and not shows_all:
            yield from _wrapped(f"also: {', '.join(others)}", "  ")
    yield ""
    yield from _wrapped(
        "Options marked * are not in torchrun. Underscores can replace dashes, and a name can be shortened "
        "if it stays unambiguous. PET_<NAME> in the environment sets the default of an option, such "
        "as PET_MAX_RESTARTS=3. A DURATION is in seconds, or has a unit: 90, 1.5m, 2h.",
        "",
    )


def _head(option: Option) -> str:
    mark = "*" if option.group == OURS else " "
    names = f"-{option.short}, {option.flag}" if option.short else option.flag
    return f"{mark} {names}" if option.kind is None else f"{mark} {names} {option.kind.metavar}"


def _settings() -> Iterator[str]:
    from elasticrs._engine.nodes.transport import etcd_site, settings

    yield "Settings for --rdzv-conf KEY=VALUE,…:"
    yield from _rows(settings.KEYS)
    yield "Only for etcd:"
    yield from _rows(etcd_site.KEYS)
    yield from _wrapped(
        "Torch's timeout is the join_timeout of static and etcd. Torch's store_type can be tcp, or file with "
        "c10d: the nodes then meet in the file that --rdzv-endpoint names. Torch's heartbeat_timeout, "
        "cas_backoff_max_seconds and, except for etcd, read_timeout are accepted, but have no effect.",
        "",
    )


def _rows(keys: Iterable[Key]) -> Iterator[str]:
    for key in keys:
        # Skip torch's settings that have a default, because the text below the table describes them.
        if key.is_stored or key.default is None:
            yield from _row(f"  {key.name}", key.help + _default(key.default))


def _default(value: object) -> str:
    if value is None or isinstance(value, bool):
        return ""
    return f" (default {value:g})" if isinstance(value, float) else f" (default {value})"


def _row(head: str, text: str, column: int = _COLUMN) -> Iterator[str]:
    lines = _wrapped(text, " " * column)
    if len(head) >= column:
        yield head
    else:
        yield head.ljust(column) + next(lines)[column:]
    yield from lines


def _wrapped(text: str, indent: str) -> Iterator[str]:
    """Wrap the text at word boundaries. ``textwrap`` would import ``re``, which takes milliseconds."""
    line = indent
    for word in text.split():
        if len(line) + 1 + len(word) > WIDTH and line != indent:
            yield line
            line = indent
        line += word if line == indent else f" {word}"
    yield line


_TORCHRUN, _OLD_LAUNCHER = "torchrun", "torch.distributed.launch"
_MODULES = (["torch.distributed.run"], [_OLD_LAUNCHER])


def check(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the text that ``--check`` prints, and the exit code: 0, or 2 if elasticrun would not run the job
    on this node. Raise ``UsageError`` if ``words`` is not a torchrun command line that runs a job.
    """
    from elasticrs._engine.cli.arguments import check_limits, resolve

    program, argv = _program(words)
    try:
        args = parse(argv, environ)
        job = resolve(args, environ)
        check_limits(job)
    except TextRequested:
        raise UsageError("--check: this command line only prints text; it runs no job") from None
    except UsageError as error:
        return f"elasticrun would not run this here: {error}{os.linesep}", 2
    given = frozenset(name.replace("_", "-") for name in args.given | set_by_variables(environ))
    rows = _differences(program, args, given, job, environ)
    differences = [(subject, text) for applies, subject, text in rows if applies]
    return os.linesep.join(_comparison(argv, given, differences, job.notices)) + os.linesep, 0


def _program(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    first = os.path.basename(words[0])
    if first == _TORCHRUN:
        return _TORCHRUN, words[1:]
    if first.startswith("python") and words[1:2] == ["-m"] and list(words[2:3]) in _MODULES:
        return (_OLD_LAUNCHER if words[2] == _OLD_LAUNCHER else _TORCHRUN), words[3:]
    raise UsageError(
        f"--check: got {words[0]!r}, expected torchrun, or python -m torch.distributed.run, and its arguments"
    )


def _comparison(
    argv: Sequence[str],
    given: frozenset[str],
    differences: Sequence[tuple[str, str]],
    notices: Sequence[str],
) -> Iterator[str]:
    import shlex

    yield "elasticrun would run this here."
    yield from ("", "The same job with elasticrun:", f"  elasticrun {shlex.join(argv)}", "")
    different = {subject for subject, _ in differences}
    options = [option for option in OPTIONS if option.name in given]
    equal = [each.flag for each in options if each.group != OURS and each.flag not in different]
    same = ", ".join((*equal, "script, arguments and environment of the workers"))
    yield from _row("same", same, _CHECK_COLUMN)
    ours = [each.flag for each in options if each.group == OURS and each.dest != "use_env"]
    if ours:
        yield from _row("not in torchrun", ", ".join(ours), _CHECK_COLUMN)
    yield from ("", "What differs from torchrun:")
    for subject, text in differences:
        yield from _row(f"  {subject}", text, _CHECK_COLUMN)
    if notices:
        yield from ("", "What the launcher would say:")
        for notice in notices:
            yield from _wrapped(notice, "  ")
    yield from ("", 'Details: the page "Compatibility with torchrun" of the documentation')


def _differences(
    program: str, args: Namespace, given: frozenset[str], job: JobSpec, environ: Mapping[str, str]
) -> tuple[tuple[bool, str, str], ...]:
    """Return the differences between torchrun and elasticrun: whether each affects this command line, its
    option or subject, and its text. ``given`` has the options that the command line or environment sets.
    """
    backend = "" if job.rendezvous is None else job.rendezvous.backend
    is_elastic = backend in ("c10d", "etcd")
    restarts = int(args.max_restarts) > 0
    # fmt: off
    return (
        (is_elastic, "--nnodes",
         "a lost node is noticed within seconds, and the others restart without it, which uses no restart; "
         "all nodes must use elasticrun, with equal --nnodes and --max-restarts"),
        (bool(backend), "script",
         "its name, arguments and user must be the same on all nodes (--rdzv-conf same_command=0: need "
         "not)"),
        (backend == "static", "--nnodes",
         "if a node is lost, the others wait until a node with its rank joins; all nodes must use "
         "elasticrun"),
        (restarts and bool(backend), "--max-restarts",
         "counted for the whole job, also in TORCHELASTIC_RESTART_COUNT (torchrun: by each node)"),
        (restarts, "--max-restarts",
         "a failure that repeats without progress, or that no restart can fix, ends the job earlier "
         "(--max-same-failures 0: never)"),
        (backend == "etcd", "--rdzv-backend",
         "etcd's API v3, etcd 3.4 or newer (torchrun: v2, which etcd 3.6 lacks)"),
        (backend == "c10d", "--rdzv-endpoint",
         "a store of elasticrs; a TCPStore that a program hosts there is refused"),
        (is_elastic and "last_call_timeout" in args.rdzv_conf, "--rdzv-conf",
         "last_call_timeout applies to the first start only, and restart_call_timeout (0) to restarts"),
        (is_elastic and "node-rank" in given, "--node-rank", "orders the nodes (torchrun: no effect)"),
        (is_elastic and args.local_addr is None, "MASTER_ADDR",
         "the address of rank 0's node, not its name"),
        (job.make_handler is None and job.master_port is None, "MASTER_PORT",
         "a new store and port for every attempt (torchrun: one store for the job)"),
        (job.master_port is not None, "workers' store",
         "hosted by rank 0, so TORCHELASTIC_USE_AGENT_STORE is False (torchrun: by the launcher)"),
        (args.nproc_per_node in ("gpu", "auto"), "--nproc-per-node",
         "counted from the driver's files; torch is queried only if they do not help"),
        ("tee" in given, "--tee", "a line that is written in parts is shown as one line"),
        (not {"log-dir", "tee", "redirects"}.isdisjoint(given), "--log-dir",
         "folders of attempts are never deleted or reused; the name of the run's folder contains the host"),
        ("numa-binding" in given, "--numa-binding", "system calls in the worker; numactl is not needed"),
        ("shutdown-timeout" in given, "--shutdown-timeout", "applies to every kind of stop"),
        ("monitor-interval" in given and job.make_handler is None, "--monitor-interval",
         "no effect: exits are reported by the kernel"),
        ("event-log-handler" in given, "--event-log-handler", "events have times (torchrun: 0)"),
        (environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1", "file timers",
         "an expired timer ends its worker (torchrun: the launcher too)"),
        (program == _OLD_LAUNCHER and not args.use_env, "--local-rank",
         "not passed to the script; write --local-rank='${local_rank}' after its name if it needs that"),
        (True, "signals",
         "those ignored at the start (nohup, &) stay ignored; USR1 and USR2 are passed on to the workers"),
        (True, "leftover processes",
         "all processes that workers leave behind are killed, even if the launcher is killed"),
        (True, "failure report",
         "ranks that were stopped are not listed as failures; tracebacks without @record"),
        (True, "exit code", "2 and one line for a usage error; otherwise equal"),
    )
    # fmt: on
