"""Argparse parser with all options, for programs that extend torchrun's parser and for shell completion."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, SHELLS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OLD_LAUNCHERS = "use_env"
"""Option that only torch's older launcher (``torch.distributed.launch``) has."""


def get_args_parser() -> argparse.ArgumentParser:
    """Return an argparse parser with all options, spelled with dashes and with underscores. ``PET_*``
    variables set the defaults.

    As in torch, options that torchrun stores as text accept any text. Their values are checked only when the
    namespace is used. An invalid value raises an exception at that point.
    """
    parser = argparse.ArgumentParser(prog="elasticrun")
    for option in OPTIONS:
        if option.dest in {OLD_LAUNCHERS, "check"}:
            continue
        spellings = dict.fromkeys((option.flag, "--" + option.dest))
        names = [f"-{option.short}", *spellings] if option.short else list(spellings)
        text = os.environ.get(option.variable) if option.has_variable else None
        how: dict[str, Any] = {"help": option.help.replace("%", "%%")}
        if option.name == "print-completion":
            how |= {"action": _PrintCompletion, "choices": SHELLS}
        elif option.kind is None:
            how |= {"action": "store_true", "default": bool(int("0" if text is None else text))}
        elif option.repeats:
            convert = _converter(option.kind)
            default = option.default if text is None else convert(text)
            how |= {"action": _Repeat, "type": convert, "default": default, "metavar": option.kind.metavar}
        else:
            convert = _converter(option.kind) if option.typed is None else str
            default = option.default_as_typed if text is None else text
            how |= {"type": convert, "default": default, "metavar": option.kind.metavar}
        parser.add_argument(*names, **how)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def completion(shell: str) -> str:
    """Return a script that completes the command line in bash, zsh or tcsh. Needs the package ``shtab``."""
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


class _Repeat(argparse.Action):
    """Replaces the default of a repeatable option by the values that the user gives."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 -- argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(() if earlier is self.default else earlier), *values])


def _converter(kind: Kind) -> Callable[[str], object]:
    def convert(text: str) -> object:
        try:
            value = kind.convert(text)
        except UsageError:
            raise
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {error}") from None
        return list(value) if isinstance(value, tuple) else value

    return convert
