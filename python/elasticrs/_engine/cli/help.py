"""Text of ``--help``, generated from the tables of options and settings. This module imports nothing slow."""

from __future__ import annotations

import os

from elasticrs._engine.job.options import OURS, SECTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticrs._engine.job.options import Option
    from elasticrs._engine.nodes.transport.settings import Key

WIDTH = 80
_COLUMN = 28

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
        *("nproc-per-node", "max-restarts", "on-failure", "warm"),
        *("nnodes", "standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id"),
        *("log-dir", "redirects", "tee"),
        *("shutdown-timeout", "hang-timeout"),
    )
)
"""Options that plain ``--help`` explains. Of all other options, it only lists the names."""

TOPICS = ("all", "rdzv")


def help_text(program: str, topic: str = "") -> str:
    """Return the help text: common options, ``all`` options, or settings of ``--rdzv-conf`` (``rdzv``)."""
    lines = _settings() if topic == "rdzv" else _overview(program, shows_all=topic == "all")
    return os.linesep.join(lines) + os.linesep


def _overview(program: str, *, shows_all: bool) -> Iterator[str]:
    yield f"usage: {program} [options] script [arguments of the script]"
    yield ""
    yield from wrapped(
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
            yield from wrapped(f"also: {', '.join(others)}", "  ")
    yield ""
    yield from wrapped(
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
    yield from wrapped(
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


def _row(head: str, text: str) -> Iterator[str]:
    indent = " " * _COLUMN
    lines = wrapped(text, indent)
    if len(head) + 2 > _COLUMN:
        yield head
    else:
        yield head.ljust(_COLUMN) + next(lines)[_COLUMN:]
    yield from lines


def wrapped(text: str, indent: str) -> Iterator[str]:
    """Wrap the text at word boundaries. ``textwrap`` would import ``re``, which takes milliseconds."""
    line = indent
    for word in text.split():
        if len(line) + 1 + len(word) > WIDTH and line != indent:
            yield line
            line = indent
        line += word if line == indent else f" {word}"
    yield line
