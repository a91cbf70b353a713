"""Send a heartbeat after each step in which the program has not sent one, for ``--hang-timeout``."""

from __future__ import annotations

import os

from elasticrs._engine.inside.heartbeats import Section, heartbeat_unless_given

_meeting = Section("meeting of the workers", None)
_is_meeting = False
_count = 0
_are_watched: bool | None = None


def begin_meeting() -> None:
    """Suspend the heartbeat time limit until the next step has finished, because workers that hang in a
    rendezvous are detected by other means.

    After the last rendezvous, the limit stays suspended, because training has no further steps.
    """
    global _is_meeting  # noqa: PLW0603 -- process-wide, like the heartbeats
    # Do nothing before the first heartbeat, because until then only the time limit for the start applies.
    if _count > 0 and not _is_meeting:
        _is_meeting = True
        _meeting.__enter__()


def step_is_done() -> None:
    """Send a heartbeat, unless the program has already sent one during the step."""
    global _is_meeting, _count, _are_watched  # noqa: PLW0603 -- see above
    if _are_watched is None:
        # Read the environment here, because this module may have been imported in the nursery (the parent
        # process) before it forked this worker.
        _are_watched = "ELASTICRS_HEARTBEAT" in os.environ
    if not _are_watched:
        return
    if _is_meeting:
        _is_meeting = False
        _meeting.__exit__(None, None, None)
    _count = heartbeat_unless_given(_count)
