"""Workers that die by chance, for trials."""

from __future__ import annotations

import os
import random
import signal
import threading

__all__ = ["start_fault_injection_thread"]


def start_fault_injection_thread(fault_injection_rate: float, interval_in_sec: float) -> threading.Thread:
    """Let this process end by SIGKILL, sooner or later.

    Args:
        fault_injection_rate: probability of dying in each interval, from 0 to 1.
        interval_in_sec: seconds between two draws.

    Raises:
        ValueError: a rate that is no probability, or an interval that is no time.
    """
    if not 0 <= fault_injection_rate <= 1:
        raise ValueError(f"fault_injection_rate: got {fault_injection_rate}, expected 0 to 1")
    if not interval_in_sec > 0:
        raise ValueError(f"interval_in_sec: got {interval_in_sec}, expected more than 0")
    # A program that seeds its numbers would let all of its workers die at once.
    numbers, pause = random.SystemRandom(), threading.Event()

    def run() -> None:
        while not pause.wait(interval_in_sec):
            if numbers.random() < fault_injection_rate:
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=run, name="fault-injection", daemon=True)
    thread.start()
    return thread
