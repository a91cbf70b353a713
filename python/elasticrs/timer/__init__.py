"""Expiration timers, which kill a worker if a code block takes too long.

The interface is the same as in ``torch.distributed.elastic.timer``. In a worker that was started with
``TORCHELASTIC_ENABLE_FILE_TIMER=1``::

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))

    with timer.expires(after=60, scope="step"):
        loss.backward()

The agent kills this worker and restarts the group if the block takes more than a minute. With
``--hang-timeout``, timers are not needed, because calling ``timer.heartbeat(step)`` in each step is enough.
Importing this package is cheap, because it does not load the native code of elasticrs, and loads few modules
that the interpreter has not loaded at startup.
"""

from elasticrs import lazy
from elasticrs._engine.inside.heartbeats import heartbeat
from elasticrs.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer, configure, expires
from elasticrs.timer.file_based_local_timer import FileTimerClient, FileTimerRequest
from elasticrs.timer.local_timer import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.timer.file_server import FileTimerServer

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
    # Load the server only on demand, because workers use only the clients.
    homes = {"elasticrs.timer.file_server": ("FileTimerServer",)}
    return lazy(__name__, name, homes, ("debug_info_logging",))
