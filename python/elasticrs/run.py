"""``python -m elasticrs.run``, and torch's functions behind its command line (``torch.distributed.run``).

For programs that build on torchrun's own parser. The command line itself goes through
:mod:`elasticrs.launch`, which does not need argparse.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from elasticrs.config import UsageError
from elasticrs.launch import main
from elasticrs.launcher.arguments import Namespace, parse
from elasticrs.launcher.options import OPTIONS, Option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["get_args_parser", "main", "parse_args"]


def get_args_parser() -> argparse.ArgumentParser:
    """An argparse parser with all options in both spellings, and defaults from ``PET_*`` variables."""
    parser = argparse.ArgumentParser(prog="elasticrun")
    for option in OPTIONS:
        spellings = dict.fromkeys((option.flag, "--" + option.dest))
        names = [f"-{option.short}", *spellings] if option.short else list(spellings)
        if option.is_flag:
            default = bool(int(os.environ.get(option.variable, "0")))
            parser.add_argument(*names, action="store_true", default=default, help=option.help)
        else:
            parser.add_argument(
                *names,
                type=_converter(option),
                default=os.environ.get(option.variable, option.default),
                help=option.help.replace("%", "%%"),
                metavar=option.metavar,
            )
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def parse_args(args: Sequence[str] | None = None) -> Namespace:
    """Read a command line.

    Args:
        args: without the program; the interpreter's own when ``None``.

    Raises:
        UsageError: one line for the user.
    """
    return parse(sys.argv[1:] if args is None else args, os.environ)


def _converter(option: Option) -> Callable[[str], object]:
    def convert(text: str) -> object:
        if option.convert is None:
            raise TypeError(f"{option.flag} is a flag")
        try:
            return option.convert(text)
        except UsageError:
            raise
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {error}") from None

    return convert


if __name__ == "__main__":
    sys.exit(main())
