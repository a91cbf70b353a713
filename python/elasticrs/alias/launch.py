"""What ``python -m torch.distributed.launch`` runs under the alias.

As torch's: without ``--use-env`` each script gets ``--local-rank=N`` in front of its arguments. For all
else it is :mod:`elasticrs.launch`.
"""

from __future__ import annotations

import os
import sys

from elasticrs import launch
from elasticrs.config import UsageError
from elasticrs.launcher.arguments import HelpRequested, parse


def with_local_rank(argv: list[str]) -> list[str]:
    """Return the command line (without the program) with the argument that scripts of that time expect."""
    try:
        args = parse(argv, os.environ)
    except (UsageError, HelpRequested):
        # The launcher says what is wrong, or prints what was asked for.
        return argv
    if args.use_env:
        return argv
    behind = len(argv) - len(args.training_script_args)
    return [*argv[:behind], "--local-rank=${local_rank}", *argv[behind:]]


def main() -> None:
    """Launch the job that the command line describes; exit with its exit code if that is not 0."""
    sys.argv[1:] = with_local_rank(sys.argv[1:])
    launch.main()


if __name__ == "__main__":
    main()
