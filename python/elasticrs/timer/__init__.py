"""Expiration timers, which kill a worker if a code block takes too long, as in torch.

In a worker that was started with ``TORCHELASTIC_ENABLE_FILE_TIMER=1``::

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))

    with timer.expires(after=60, scope="step"):
        loss.backward()

If the block takes more than a minute, the agent kills this worker and restarts the group. With
``--hang-timeout``, call ``timer.heartbeat(step)`` in each step instead.
"""

from elasticrs import lazy
from elasticrs._engine.inside.heartbeats import heartbeat
from elasticrs.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer, configure, expires
from elasticrs.timer.file_based_local_timer import FileTimerClient, FileTimerRequest, FileTimerServer
from elasticrs.timer.local_timer import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
    "heartbeat",
]


def __getattr__(name: str) -> object:
    return lazy(__name__, name, {}, ("debug_info_logging",))
