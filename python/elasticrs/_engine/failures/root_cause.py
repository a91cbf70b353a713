"""Find the root cause of a failed job: the failure that came first and caused the others.

- **ROOT-0** The nodes' agreement on a root cause takes precedence over what a single node saw first.
- **ROOT-1** The root cause is the worker whose exit was noticed first. If times are equal, the first in the
  mapping counts.
- **ROOT-2** A worker that elasticrs had signalled before it exited is a victim. A victim is chosen as root
  cause only if no other worker failed.
- **ROOT-3** A worker that recorded an uncaught error *before* the first exit was noticed is not a victim. It
  failed at the time of the record, because with torch, a process often takes longer to exit than its peers
  take to notice its closed connections. A program that runs for another minute has survived the error.
- **ROOT-4** If a worker exits by itself without an exception (``os._exit``, a crash), exceptions that
  only report a lost peer are consequences if they were raised in the five seconds before this exit, because
  a process closes its connections before the kernel reports its exit.
- **ROOT-5** If these times are missing (in failures that code written for torch creates), the smallest
  timestamp in seconds counts, as in torch. If timestamps are equal, the first in the mapping counts.
- **ROOT-6** An exception that only reports a lost or silent peer is a consequence, unless no other worker
  failed by itself within five seconds.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs._engine.failures.failure import ProcessFailure

RECORD_WINDOW_NS = 60_000_000_000
WAVE_NS = 5_000_000_000


def failed_ns(failure: ProcessFailure) -> int | None:
    """Return when a worker recorded its error, or when its exit was noticed, in monotonic nanoseconds."""
    seen, recorded = failure.seen_ns, failure.recorded_ns
    if seen is None:
        return None
    if recorded is None or failure.recorded_pid != failure.pid:
        return seen
    return recorded if seen - RECORD_WINDOW_NS <= recorded <= seen else seen


def failed_wall_ns(failure: ProcessFailure) -> int:
    """Return the time of :func:`failed_ns` on this node's wall clock, in nanoseconds since 1970."""
    return failure.wall_ns + (failed_ns(failure) or 0) - (failure.seen_ns or 0)


def _times(failures: Mapping[int, ProcessFailure]) -> dict[int, int | None]:
    """Return the time at which each worker failed by ROOT-3 and ROOT-4; ``None`` if it is unknown."""
    found = {rank: failed_ns(failure) for rank, failure in failures.items()}
    silent = [failure.seen_ns for failure in failures.values() if _is_silent(failure)]
    for rank, failure in failures.items():
        recorded = found[rank]
        if recorded is None or recorded != failure.recorded_ns:
            continue
        later = [end for end in silent if end is not None and recorded < end <= recorded + WAVE_NS]
        if later and failure.is_lost_peer:
            found[rank] = min(later) + 1
    return found


def _is_silent(failure: ProcessFailure) -> bool:
    return failure.sent_signal is None and failure.recorded_ns is None and failure.cause is None


def in_order(failures: Mapping[int, ProcessFailure]) -> list[int]:
    known = _times(failures)
    if None in known.values():
        return sorted(failures, key=lambda rank: failures[rank].timestamp)
    return sorted(failures, key=lambda rank: known[rank] or 0)


def victims(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Return the workers that exited because elasticrs stopped them."""
    unprompted = (f.seen_ns for f in failures.values() if f.sent_signal is None and f.seen_ns is not None)
    first, known = min(unprompted, default=0), _times(failures)

    def failed_before(rank: int) -> bool:
        failed = known[rank]
        return failed is not None and failed != failures[rank].seen_ns and failed < first

    return [rank for rank in failures if failures[rank].sent_signal is not None and not failed_before(rank)]


def root_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the rank of the root cause. Raise ``ValueError`` if there are no failures."""
    for rank, failure in failures.items():
        if failure.is_first:
            return rank
    spared = set(victims(failures))
    order = in_order(failures)
    if not order:
        raise ValueError("no failures")
    own = [rank for rank in order if rank not in spared]
    first = own[0] if own else order[0]
    if failures[first].is_lost_peer:
        known = _times(failures)
        latest = (known[first] or 0) + WAVE_NS
        causes = (rank for rank in own if not failures[rank].is_lost_peer)
        return next((rank for rank in causes if (known[rank] or 0) <= latest), first)
    return first
