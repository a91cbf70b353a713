"""Let custom training loops and frameworks take part in a job without :func:`~elasticrs.train.train`."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

from elasticrs._engine.workers.node_page import page_of
from elasticrs.train import groups
from elasticrs.train.agent import agent_place
from elasticrs.train.meeting_url import parse
from elasticrs.train.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from elasticrs._engine.nodes.protocol.messages import Stop
    from elasticrs.train.membership import Round

__all__ = ["Participant", "on_change"]


def on_change(callback: Callable[[Stop], None] | None = None, init_method: str | None = None) -> Participant:
    """Join the job with a custom training loop, so that the loop survives failures of other workers.

    ::

        with elasticrs.train.on_change() as job:
            while not is_finished(model):
                job.meet()                               # a new round: RANK, WORLD_SIZE, MASTER_* are set
                try:
                    job.init_process_group("gloo")
                    synchronise(model)                   # the most advanced worker sends to all
                    while not is_finished(model):
                        step(model)
                        if job.passed():                 # once after each step
                            break
                except RuntimeError:                     # a collective was aborted
                    roll_back(model)
            job.close()                                  # end the job for all workers

    Args:
        callback: Called on a separate thread with a :class:`.Stop` as soon as a round ends for this worker.
            It should abort the communication that this library does not know, unless the stop is
            ``planned``. Must not raise.
        init_method: Rendezvous URL, as for :class:`CoordinatorP2P`. ``None`` for the agent's.

    Raises:
        RuntimeError: This process was not started by an agent.
        ValueError: The URL is invalid.
    """
    place = agent_place() if init_method is None else parse(init_method, os.environ)
    member = Membership(
        place.rendezvous, place.backend, on_change=callback, stuck_timeout=place.stuck_timeout
    )
    if init_method is None:
        member.page = page_of(os.environ)
    return Participant(member)


class Participant:
    """Membership of a worker in a job. Only :meth:`close` ends the job, not the end of a ``with`` block."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._is_over = False

    def meet(self) -> Round:
        """Destroy the process group, wait for the next rendezvous round, and return that round.

        Raises:
            RendezvousError: this worker cannot join; ``RendezvousClosedError`` if the job has ended.
        """
        groups.destroy()
        return self._member.meet()

    def init_process_group(self, backend: str, timeout: float = 10.0) -> None:
        """Create a default process group whose collectives (``timeout`` in seconds) can be aborted.

        If a program creates its default group in another way, it must do so in a block
        ``with round.connections.recorded()``. Raise ``RuntimeError`` if the round has ended, so that the
        program must call :meth:`meet`.
        """
        current = self._member.round
        if current is None:
            raise RuntimeError("there is no round: call meet() first")
        if "nccl" in backend:
            self._member.abort = groups.abort
        span = datetime.timedelta(seconds=timeout)
        with current.connections.recorded():
            store = groups.connect(current.master_addr, current.master_port, lambda: self._member.is_broken)
            groups.create(backend, store, current.rank, current.world_size, span)
        groups.record_further_groups(current.connections)

    def passed(self) -> bool:
        """Count a completed step. Return true if the program must now call :meth:`meet`.

        The call sends no message, but may block while the workers agree on their last step.
        """
        return self._member.passed()

    def announce_end(self) -> None:
        """Announce that this worker has finished. The others stop after the same number of steps."""
        self._member.announce_end()

    def close(self) -> None:
        """End the job for all workers."""
        self._is_over = True
        self._member.shutdown()
        groups.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._is_over:
            self._member.leave()
            groups.destroy()
