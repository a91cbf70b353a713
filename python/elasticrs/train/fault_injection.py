"""Workers that die by chance, for trials."""

from __future__ import annotations

import os
import random
import signal
import threading

__all__ = ["start_fault_injection_thread"]


def start_fault_injection_thread(rate: float, interval_s: float) -> threading.Thread:
    """Let this process end by SIGKILL, sooner or later.

    Args:
        rate: how likely in each interval: 0 never, 1 surely.
        interval_s: seconds between two draws.

    Raises:
        ValueError: a rate that is no probability, or an interval that is no time.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate: got {rate}, expected 0 to 1")
    if not interval_s > 0:
        raise ValueError(f"interval_s: got {interval_s}, expected more than 0")
    # A program that seeds its numbers would let all of its workers die at once.
    numbers, pause = random.SystemRandom(), threading.Event()

    def run() -> None:
        while not pause.wait(interval_s):
            if numbers.random() < rate:
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=run, name="fault-injection", daemon=True)
    thread.start()
    return thread
