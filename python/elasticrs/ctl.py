"""Entry points ``elasticctl`` and ``python -m elasticrs.ctl``: looks at jobs here, and acts on them.

Exit codes: 0 done, 1 failed, 2 wrong arguments or several jobs to choose from, 3 done without an agreed step,
4 no such job, 5 refused.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Carry out one command.

    Args:
        args: command line without the program name; ``sys.argv`` if ``None``.

    Returns:
        the exit code.

    Raises:
        SystemExit: the command line asks for help.
    """
    from elasticrs._engine.cli.control import run

    return run(sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    sys.exit(main())
