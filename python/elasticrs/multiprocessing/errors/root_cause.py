"""Which of several failures came first, and which are only its consequences.

- **ROOT-0** What the nodes of a job have agreed upon is the root cause, whatever a single one saw first.
- **ROOT-1** The kernel's order decides: the end that was seen first, in nanoseconds; of those seen in one
  wake-up, the first in the mapping.
- **ROOT-2** A worker that we had signalled before it ended is a victim, and never the root cause while there
  is another.
- **ROOT-3** A worker that recorded an uncaught error *before* the first end was seen is no victim, and failed
  at that time. With torch a process often takes longer to go than its peers take to notice that its
  connections are closed. Only in the last minute before: an error that a program survived longer than that
  did not end it.
- **ROOT-4** An exception that only says that a peer was lost is a consequence of the end of a worker that
  ended by itself and left no exception (``os._exit``, a crash), if that end was seen within five seconds
  after the record. A process closes its connections before the kernel tells of its end, so its peers may be
  quicker.
- **ROOT-5** Without such times (failures made by code that knows only torch's form) torch's rule stands: the
  smallest timestamp in seconds, the first in the mapping of equal ones.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs.multiprocessing.errors.failure import ProcessFailure

RECORD_WINDOW_NS = 60_000_000_000
WAVE_NS = 5_000_000_000

_LOST_PEER = (
    *("connection closed", "connection reset", "connection aborted", "connection was closed", "broken pipe"),
    *("socket closed", "failed to recv, got 0 bytes", "remote process exited", "connectionreseterror"),
)
"""Words of gloo, NCCL, torch's stores and Python for a connection whose other end is gone."""


def failed_ns(failure: ProcessFailure) -> int | None:
    """When the worker failed, monotonic: when it recorded its error, or else when its end was seen."""
    seen, recorded = failure.seen_ns, failure.recorded_ns
    if seen is None:
        return None
    if recorded is None or failure.recorded_pid != failure.pid:
        return seen
    return recorded if seen - RECORD_WINDOW_NS <= recorded <= seen else seen


def _times(failures: Mapping[int, ProcessFailure]) -> dict[int, int | None]:
    """When each worker failed, by global rank: what puts them in order (ROOT-3, ROOT-4)."""
    found = {rank: failed_ns(failure) for rank, failure in failures.items()}
    silent = [failure.seen_ns for failure in failures.values() if _is_silent(failure)]
    for rank, failure in failures.items():
        recorded = found[rank]
        if recorded is None or recorded != failure.recorded_ns:
            continue
        later = [end for end in silent if end is not None and recorded < end <= recorded + WAVE_NS]
        if later and _lost_a_peer(failure):
            found[rank] = min(later) + 1
    return found


def _is_silent(failure: ProcessFailure) -> bool:
    """True if the worker ended by itself and left no exception."""
    return failure.sent_signal is None and failure.recorded_ns is None and failure.cause is None


def _lost_a_peer(failure: ProcessFailure) -> bool:
    text = str(failure.message).lower()
    return any(words in text for words in _LOST_PEER)


def in_order(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """The global ranks in the order in which the workers failed."""
    known = _times(failures)
    if None in known.values():
        return sorted(failures, key=lambda rank: failures[rank].timestamp)
    return sorted(failures, key=lambda rank: known[rank] or 0)


def victims(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Return the global ranks of the workers that we stopped."""
    unprompted = (f.seen_ns for f in failures.values() if f.sent_signal is None and f.seen_ns is not None)
    first, known = min(unprompted, default=0), _times(failures)

    def failed_before(rank: int) -> bool:
        failed = known[rank]
        return failed is not None and failed != failures[rank].seen_ns and failed < first

    return [rank for rank in failures if failures[rank].sent_signal is not None and not failed_before(rank)]


def root_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """The global rank of the root cause.

    Raises:
        ValueError: no failures.
    """
    for rank, failure in failures.items():
        if failure.is_first:
            return rank
    spared = set(victims(failures))
    order = in_order(failures)
    if not order:
        raise ValueError("no failures")
    return next((rank for rank in order if rank not in spared), order[0])
