"""The functions of ``torch.distributed.launch``, the launcher before torchrun.

They differ from those of :mod:`elasticrs.run` in one point: without ``--use-env`` each script gets
``--local-rank=N`` in front of its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticrs.run import get_args_parser, run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["get_args_parser", "launch", "parse_args", "run"]


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Read a command line; a mistake ends the process with exit code 2, as in argparse.

    Args:
        args: without the program; the interpreter's own when ``None``.
    """
    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="the local rank is only in the environment, not in the script's arguments",
    )
    return parser.parse_args(args)


def launch(args: Any) -> None:
    """Run what a namespace of :func:`parse_args` says.

    Raises:
        ValueError: a program that is no Python script, without ``use_env`` (as in torch).
    """
    if args.no_python and not args.use_env:
        raise ValueError("--no-python needs --use-env: a program of any kind gets no --local-rank")
    run(args)
