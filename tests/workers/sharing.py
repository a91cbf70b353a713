"""A rank that shares memory with other processes: a segment, semaphores, and a child process that inherits
both.

Arguments: ``wait``; ``ignore``, as that, but SIGTERM does nothing; or what becomes of rank 1: ``fail`` or
``die``. Then, for torch's memory, the sharing strategy of each attempt.
"""

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

SIZE = 4 << 20


def loader() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()


def hold() -> object:
    segment = shared_memory.SharedMemory(create=True, size=SIZE)
    segment.buf[:] = bytes(SIZE)
    context = multiprocessing.get_context("spawn")
    locks = [context.Lock() for _ in range(4)]
    if tracker := resource_tracker._resource_tracker._pid:
        # After we are killed, it has one second. It may take longer to start.
        status = Path(f"/proc/{tracker}/status")
        while not int(status.read_text().partition("SigIgn:")[2].split()[0], 16) >> signal.SIGTERM - 1 & 1:
            pass
    if os.fork() == 0:
        loader()
    return segment, locks


def hold_of_torch(strategy: str) -> object:
    """Share memory through torch, with a manager process and a spawned process that holds a tensor."""
    import torch
    import torch.multiprocessing as multiprocessing

    multiprocessing.set_sharing_strategy(strategy)
    tensor = torch.zeros(SIZE // 4).share_memory_()
    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    child = context.Process(target=serve, args=(tensor, manager.Event(), context.Lock()))
    child.start()
    return tensor, manager, child


def serve(tensor: object, event: object, lock: object) -> None:
    signal.pause()


def meet(fifo: str, flags: int) -> None:
    """Wait for the other rank. A process that is killed while it creates a semaphore leaks it under any
    launcher.
    """
    with suppress(FileExistsError):
        os.mkfifo(fifo)
    os.close(os.open(fifo, flags))


def main() -> None:
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    word, *strategies = sys.argv[1:]
    held = hold_of_torch(strategies[int(attempt)]) if strategies else hold()
    if word == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, f"HELD {rank} {attempt}\n".encode())
    meet(f"ready.{attempt}", os.O_WRONLY if rank == "0" else os.O_RDONLY)
    if rank == "1" and word == "fail":
        os._exit(3)
    if rank == "1" and word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
    del held


if __name__ == "__main__":
    main()
