"""Functions for the programs of the kit: choose a device, run endless kernels, and report events."""

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

DEVICE = os.environ["KIT_DEVICE"]
ON_GPU = DEVICE == "cuda"
BACKEND = "nccl" if ON_GPU else "gloo"
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
RANK = int(os.environ["RANK"])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])


def report(what: str, **facts: object) -> None:
    """Send an event to the kit in a single write, so that the events of several workers do not mix."""
    event = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "rank": RANK, "attempt": ATTEMPT}
    fd = os.open(os.environ["KIT_EVENTS"], os.O_WRONLY)
    os.write(fd, (json.dumps({**event, **facts}) + "\n").encode())
    os.close(fd)


def choose_device() -> None:
    """Select this worker's GPU. If there are fewer GPUs than workers, several workers share a GPU."""
    if ON_GPU:
        torch.cuda.set_device(LOCAL_RANK % torch.cuda.device_count())


def free_memory() -> int | None:
    """Return the free bytes of this worker's GPU, or ``None`` on a CPU."""
    return torch.cuda.mem_get_info()[0] if ON_GPU else None


def start_endless_kernel() -> None:
    """Queue a kernel that runs for days. Do nothing on a CPU, where :func:`wait_for_device` never returns."""
    if ON_GPU:
        torch.cuda._sleep(10**15)


def wait_for_device() -> None:
    """Wait for all queued kernels. On a CPU, compute forever, because nothing can be queued there."""
    if ON_GPU:
        torch.cuda.synchronize()
        return
    matrix = torch.ones(256, 256)
    while True:
        torch.mm(matrix, matrix)


class Stream:
    """A stream of the GPU: runs functions one after the other. On a CPU, a thread does that."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if ON_GPU else None
        self._thread = ThreadPoolExecutor(1)

    def run(self, function: Callable[[], object] = lambda: None) -> "Mark":
        """Queue a function. Return an event after it in the stream."""
        if self._stream is None:
            return Mark(self._thread.submit(function))
        with torch.cuda.stream(self._stream):
            function()
            event = torch.cuda.Event()
            event.record()
        return Mark(event)


class Mark:
    """An event in a stream."""

    def __init__(self, event: "torch.cuda.Event | Future[object]") -> None:
        self._event = event

    def is_reached(self) -> bool:
        return self._event.done() if isinstance(self._event, Future) else self._event.query()

    def wait(self) -> None:
        if isinstance(self._event, Future):
            self._event.result()
        else:
            self._event.synchronize()


def occupy(seconds: float) -> None:
    """Let the current stream do nothing else for about this time."""
    if ON_GPU:
        torch.cuda._sleep(int(seconds * 1e9))
    else:
        threading.Event().wait(seconds)


def write_driver_file(name: str, text: str) -> None:
    """Write a line to a file of the simulated GPU driver. For runs on a CPU only."""
    with open(os.path.join(os.environ["FAKE_NVML"], name), "w", encoding="utf-8") as file:
        file.write(f"{text}\n")


def wait_for_calls(function: str, count: int) -> None:
    """Wait until a function of the simulated GPU driver has been called ``count`` times. For runs on a CPU
    only.
    """
    with open(os.path.join(os.environ["FAKE_NVML"], "calls"), encoding="utf-8") as calls:
        for line in calls:
            count -= line == f"{function}\n"
            if count == 0:
                return
