"""Entry points ``python -m elasticrs.launch`` and ``elasticrun``, with torch's function names."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import more modules
import gc
import sys

_program = "/" + (sys.argv or [""])[0]
_is_command = __name__ == "__main__" or _program.endswith(("/elasticrun", "/elasticrs/__main__.py"))
_ends_by_sigint = _is_command and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _is_command:
    # Block signals, because a signal during the imports would kill this process without a report.
    _held = _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2
    _before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _held)
if _ends_by_sigint:
    # Let Ctrl-C kill this process during the imports, because it would otherwise print a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
if _is_command:
    # The agent creates few reference cycles. The collector's default threshold of 700 costs 2 ms per launch.
    gc.set_threshold(20_000)

from elasticrs import lazy  # noqa: E402
from elasticrs._engine.cli import command_line  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any


def __getattr__(name: str) -> object:
    # Import lazily, because `elasticrun` does not use argparse.
    return lazy(__name__, name, {"elasticrs.run": ("get_args_parser", "run")})


def main(args: Sequence[str] | None = None) -> None:
    """Launch a job and wait until it has finished.

    Args:
        args: command line without the program name. If ``None``, this process is the launcher: it reads
            ``sys.argv``, prints errors, and exits with the exit code of the job if that is not 0.

    Raises:
        ChildFailedError: workers failed.
        RuntimeError: ``--nnodes`` has more than two parts.
        SignalException: a signal asked the job to stop.
        SystemExit: the command line has a mistake, or the launcher failed.
        ValueError: a value is invalid, or options cannot be combined.
    """
    if args is not None:
        launch(parse_args(args))
    elif code := command_line.main(
        ends_by_sigint=_ends_by_sigint, signal_mask=_before if _is_command else None
    ):
        sys.exit(code)


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``args`` (``sys.argv[1:]`` if ``None``). A mistake raises ``SystemExit(2)``, as in argparse."""
    from elasticrs.run import get_args_parser

    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="the local rank is only in the environment, not in the script's arguments",
    )
    return parser.parse_args(args)


def launch(args: Any) -> None:
    """Run the job of a namespace from :func:`parse_args`.

    As in torch, without ``use_env``, scripts get ``--local-rank=N``, and other programs raise ``ValueError``.
    """
    from elasticrs.run import run

    if args.no_python and not args.use_env:
        raise ValueError("--no-python needs --use-env: a program of any kind gets no --local-rank")
    run(args)


if __name__ == "__main__":
    main()
