"""Find the root cause of a failed job: the failure that came first and caused the others.

- **ROOT-0** If the nodes of a job have agreed on a root cause, it takes precedence over what a single node
  saw first.
- **ROOT-1** The order of the exits decides: the root cause is the worker whose exit was noticed first, in
  nanoseconds. If several exits were noticed at the same time, the first in the mapping counts.
- **ROOT-2** A worker that elasticrs had signalled before it exited is a victim. It is the root cause only if
  there is no other candidate.
- **ROOT-3** A worker that recorded an uncaught error *before* the first exit was noticed is not a victim. It
  failed at the time of the record. With torch, a process often takes longer to exit than its peers take to
  notice its closed connections. This rule applies only if the worker exited within a minute after the record,
  because a program that runs for longer has survived the error.
- **ROOT-4** A worker may exit by itself without an exception (``os._exit``, a crash). If another worker
  recorded an exception in the five seconds before that exit was noticed, and the exception only reports a
  lost peer, then the exception is a consequence of the exit. A process closes its connections before the
  kernel reports its exit, so its peers may fail first.
- **ROOT-5** If these times are missing (for failures that were created by code written for torch), torch's
  rule applies: the smallest timestamp in seconds counts, and among equal timestamps the first in the mapping.
- **ROOT-6** An exception that only reports a lost or silent peer is a consequence. It is the root cause only
  if no other worker failed by itself within five seconds.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticrs._engine.failures.failure import ProcessFailure

RECORD_WINDOW_NS = 60_000_000_000
WAVE_NS = 5_000_000_000


def failed_ns(failure: ProcessFailure) -> int | None:
    """Return the time at which a worker failed, in monotonic nanoseconds. This is the time when it recorded
    its error, if known; otherwise, the time when its exit was noticed.
    """
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
    """Return the time at which each worker failed, keyed by global rank.

    The time of a recorded error takes precedence over the time of the exit (ROOT-3). An error that only
    reports a lost peer is placed after the exit that caused it (ROOT-4).
    """
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
    """Return true if the worker exited on its own without recording an exception."""
    return failure.sent_signal is None and failure.recorded_ns is None and failure.cause is None


def in_order(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Return the global ranks in the order in which the workers failed."""
    known = _times(failures)
    if None in known.values():
        return sorted(failures, key=lambda rank: failures[rank].timestamp)
    return sorted(failures, key=lambda rank: known[rank] or 0)


def victims(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Return the global ranks of the victims: workers that exited because elasticrs stopped them."""
    unprompted = (f.seen_ns for f in failures.values() if f.sent_signal is None and f.seen_ns is not None)
    first, known = min(unprompted, default=0), _times(failures)

    def failed_before(rank: int) -> bool:
        failed = known[rank]
        return failed is not None and failed != failures[rank].seen_ns and failed < first

    return [rank for rank in failures if failures[rank].sent_signal is not None and not failed_before(rank)]


def root_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the global rank of the root cause.

    Raises:
        ValueError: there are no failures.
    """
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
