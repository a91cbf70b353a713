"""Comparison of torchrun's parser and ours on random command lines and ``PET_*`` variables.

``python -m compat.command_lines --cases 500 --seed 0`` prints each on which they do not agree. They agree
when both refuse, or when both accept and every option that both have means the same. Ours may refuse a value
that torch takes for now and fails on later.
"""

import argparse
import contextlib
import io
import os
import random
import sys
from typing import Any

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, OURS, TextRequested, parse

SHARED = tuple(option for option in OPTIONS if option.group != OURS and option.name != "print-completion")
VALUES = {
    "nnodes": ("1", "2", "1:4", "4:1", "a", "1:2:3"),
    "nproc-per-node": ("1", "8", "gpu", "auto", "0", "x y"),
    "rdzv-conf": ("", "a=1", "timeout=3,join_timeout=5", "a"),
    "redirects": ("0", "3", "0:1,1:2", "4"),
    "tee": ("1", "0:3", "x"),
    "signals-to-handle": ("SIGTERM", "SIGTERM,SIGUSR1", "SIGNONE"),
    "start-method": ("spawn", "fork", "thread"),
    "numa-binding": ("node", "core-complex", "all"),
    "local-ranks-filter": ("0", "0,1", "one"),
    "duplicate-stdout-filters": ("a", "a,b", "a,,b"),
    "duplicate-stderr-filters": ("a,b",),
    "shutdown-timeout": ("0", "30", "-1", "none"),
}
NUMBERS = ("0", "1", "2.5", "-1", "none")
TEXTS = ("a", "some text", "-x", "--x", "a=b")
COUNTED = {"max-restarts", "monitor-interval", "node-rank", "master-port", "shutdown-timeout"}


def values_of(name: str) -> tuple[str, ...]:
    """Return valid and invalid values for an option."""
    return VALUES.get(name) or (NUMBERS if name in COUNTED else TEXTS)


def spelled(name: str, chance: random.Random) -> str:
    """Return a random spelling of an option: sometimes abbreviated and possibly ambiguous, rarely
    misspelled.
    """
    name = name.replace("-", "_") if chance.random() < 0.3 else name
    if chance.random() < 0.2:
        first = 1 + max(name.find("-"), name.find("_"))
        name = name[: chance.randint(first + 1, len(name))]
    return "--" + name + ("x" if chance.random() < 0.02 else "")


def command_line(chance: random.Random) -> list[str]:
    """Return a random command line: some options and, in most cases, a script with arguments."""
    argv: list[str] = []
    for option in chance.sample(SHARED, chance.choice((0, 1, 1, 2, 3, 5))):
        typed = spelled(option.name, chance)
        if option.short and chance.random() < 0.4:
            typed = "-" + option.short
        if option.kind is None:
            argv.append(typed)
            continue
        value = chance.choice(values_of(option.name))
        form = chance.random()
        # If a misspelled option contains a space, argparse takes it for the script. Do not join such a value
        # with `=`.
        if typed.startswith("--") and form < 0.5 and " " not in value:
            argv.append(f"{typed}={value}")
        elif not typed.startswith("--") and form < 0.5:
            argv.append(typed + value)
        else:
            argv += [typed, value]
    if chance.random() < 0.1:
        argv.append("--")
    if chance.random() < 0.95:
        argv.append("train.py")
        argv += chance.choice(([], ["--role", "x"], ["-m"], ["a", "--", "b"], ["--nnodes=2"]))
    return argv


def variables(chance: random.Random) -> dict[str, str]:
    """Return random values for some ``PET_*`` variables."""
    found: dict[str, str] = {}
    for option in chance.sample(SHARED, chance.choice((0, 0, 1, 2, 4))):
        if option.kind is None:
            found[option.variable] = chance.choice(("0", "1", "2"))
        else:
            found[option.variable] = chance.choice(values_of(option.name))
    return found


def theirs(argv: list[str]) -> argparse.Namespace | None:
    """Parse a command line with torch's parser. Return ``None`` if the parser rejects it."""
    from torch.distributed.run import get_args_parser

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return get_args_parser().parse_args(argv)
        except SystemExit:
            return None


def meant(read: argparse.Namespace) -> dict[str, Any]:
    """Convert the values from torch's parser as our launcher would convert them.

    Raises:
        ValueError: one of them is a mistake.
    """
    found: dict[str, Any] = {}
    for option in SHARED:
        value = getattr(read, option.dest)
        is_text = option.kind is not None and (isinstance(value, str) or value is not None)
        found[option.dest] = option.kind.convert(as_text(value)) if is_text else value
    # Treat an empty template as unset.
    found["log_line_prefix_template"] = read.log_line_prefix_template or None
    found["training_script"] = read.training_script
    found["training_script_args"] = read.training_script_args
    return found


def as_text(value: object) -> str:
    """Return an option's value as the user typed it. Torch splits some values into lists."""
    if isinstance(value, list):
        return ",".join(part.replace(",", ",,") for part in value)
    return str(value)


def disagreement(argv: list[str]) -> str | None:
    """Describe how the two parsers disagree about a command line. ``None`` if they agree."""
    read = theirs(argv)
    try:
        ours = vars(parse(argv, os.environ))
    except (UsageError, TextRequested) as refused:
        if read is None:
            return None
        try:
            meant(read)
        except ValueError:
            return None
        return f"only torch takes it; ours: {refused}"
    if read is None:
        return "only ours takes it"
    try:
        expected = meant(read)
    except ValueError as error:
        return f"ours takes what it should refuse: {error}"
    different = {name: (value, ours[name]) for name, value in expected.items() if ours[name] != value}
    return f"{different}" if different else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong = 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        chance = random.Random(seed)
        argv, given = command_line(chance), variables(chance)
        os.environ.update(given)
        found = disagreement(argv)
        for name in given:
            del os.environ[name]
        if found is not None:
            wrong += 1
            print(f"{seed}: {argv} {given}: {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
