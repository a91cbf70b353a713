"""Signs of life that the loop gives for a step in which the program gives none; for ``--hang-timeout``."""

from __future__ import annotations

import os

from elasticrs.timer.heartbeats import Section, heartbeat_unless_given

_meeting = Section("meeting of the workers", None)
_is_meeting = False
_count = 0
_are_watched: bool | None = None


def begin_meeting() -> None:
    """From here to the end of the next step a worker may take any time: who is stuck is found otherwise, and
    after the last meeting there are no steps.
    """
    global _is_meeting  # noqa: PLW0603 -- of the process, as its heartbeats are
    # Until the first sign of life the limit of a start counts.
    if _count > 0 and not _is_meeting:
        _is_meeting = True
        _meeting.__enter__()


def step_is_done() -> None:
    """Give a heartbeat, unless the step had one."""
    global _is_meeting, _count, _are_watched  # noqa: PLW0603 -- see above
    if _are_watched is None:
        # Not before: this module may have been imported by the nursery.
        _are_watched = "ELASTICRS_HEARTBEAT" in os.environ
    if not _are_watched:
        return
    if _is_meeting:
        _is_meeting = False
        _meeting.__exit__(None, None, None)
    _count = heartbeat_unless_given(_count)
