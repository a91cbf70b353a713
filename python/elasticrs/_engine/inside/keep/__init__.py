"""Keeps copies of a program's training state in memory that the agent owns, so that they survive the
program's processes. See :class:`elasticrs.Keep`.
"""

import sys


def keep_own() -> None:
    """Copy the training state of this process, if it uses ``Keep``, because an error ends its program. Wait
    for the copy only for a limited time.
    """
    keeper = sys.modules.get("elasticrs._engine.inside.keep.keeper")
    if keeper is not None:
        keeper.keep_own()


def keep_before_stop() -> None:
    """Copy the training state of this process, which is about to be stopped. Do so only if it uses ``Keep``,
    and could not copy its state later, when the agent orders a copy. Call this between two steps.
    """
    keeper = sys.modules.get("elasticrs._engine.inside.keep.keeper")
    if keeper is not None:
        keeper.keep_before_stop()
