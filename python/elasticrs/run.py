"""``python -m elasticrs.run``, and torch's functions behind its command line (``torch.distributed.run``).

For programs that build on torchrun's own parser. The command line itself goes through
:mod:`elasticrs.launch`, which does not need argparse.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from elasticrs._worker.run_path import run_script_path
from elasticrs.config import UsageError
from elasticrs.launch import main
from elasticrs.launcher.arguments import Namespace, parse
from elasticrs.launcher.options import OPTIONS, SHELLS, Option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["get_args_parser", "main", "parse_args", "run_script_path"]


def get_args_parser() -> argparse.ArgumentParser:
    """An argparse parser with all options in both spellings, and defaults from ``PET_*`` variables."""
    parser = argparse.ArgumentParser(prog="elasticrun")
    for option in OPTIONS:
        spellings = dict.fromkeys((option.flag, "--" + option.dest))
        names = [f"-{option.short}", *spellings] if option.short else list(spellings)
        if option.name == "print-completion":
            parser.add_argument(*names, action=_PrintCompletion, choices=SHELLS, help=option.help)
        elif option.is_flag:
            default = bool(int(os.environ.get(option.variable, "0")))
            parser.add_argument(*names, action="store_true", default=default, help=option.help)
        else:
            parser.add_argument(
                *names,
                type=_converter(option),
                default=os.environ.get(option.variable, option.default)
                if option.has_variable
                else option.default,
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


def completion(shell: str) -> str:
    """A script that completes the command line.

    Args:
        shell: bash, zsh or tcsh.

    Raises:
        ImportError: the package ``shtab`` is not installed.
    """
    import shtab

    text: str = shtab.complete(get_args_parser(), shell=shell)
    return text + os.linesep


class _PrintCompletion(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 -- argparse's signature
        values: object,
        option_string: str | None = None,
    ) -> None:
        try:
            sys.stdout.write(completion(str(values)))
        except ImportError:
            parser.exit(
                1, f"{option_string} needs the package shtab: pip install 'elasticrs[completion]'{os.linesep}"
            )
        parser.exit()


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
