"""Alias of ``python -m torch.distributed.launch``, which passes ``--local-rank=N`` to each script."""

from __future__ import annotations

import os
import sys

from elasticrs import launch
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import TextRequested, parse


def with_local_rank(argv: list[str]) -> list[str]:
    """Return the command line with the ``--local-rank`` argument for the script, which old scripts expect."""
    try:
        args = parse(argv, os.environ)
    except (UsageError, TextRequested):
        # Ignore this: the launcher parses the arguments again, and then reports the error or prints the text.
        return argv
    if args.use_env:
        return argv
    behind = len(argv) - len(args.training_script_args)
    return [*argv[:behind], "--local-rank=${local_rank}", *argv[behind:]]


def main() -> None:
    """Launch the job that the command line describes. If it fails, exit with its exit code."""
    sys.argv[1:] = with_local_rank(sys.argv[1:])
    launch.main()


if __name__ == "__main__":
    main()
