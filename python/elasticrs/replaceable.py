"""Whose workers may be replaced one by one: ``--on-failure replace``."""

from __future__ import annotations

from elasticrs import warm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.warm import Entry

_WORDS = (b"elasticrs.train", b"elasticrs import train", b"torchelastic")
_ALL = "only all workers can be restarted"


def why_not(entry: Entry, start_method: str = "spawn", back_end: str | None = None) -> str | None:
    """Return why not; ``None`` if the others can go on when one of the workers has failed.

    Args:
        entry: what the workers run.
        start_method: of functions.
        back_end: how the nodes meet, if workers cannot meet there by themselves.
    """
    if start_method != "spawn":
        return f"with start method {start_method} {_ALL}; use spawn"
    if back_end is not None:
        return f"with {back_end} {_ALL}; use c10d or etcd"
    if not warm.mentions(entry, _WORDS):
        return f"{entry.name} does not use elasticrs.train, which lets the other workers go on"
    return None
