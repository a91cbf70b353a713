"""Kill workers at random, to test how jobs react to failures."""

from __future__ import annotations

import os
import random
import signal
import threading

__all__ = ["start_fault_injection_thread"]


def start_fault_injection_thread(fault_injection_rate: float, interval_in_sec: float) -> threading.Thread:
    """Start a thread that kills this process with SIGKILL at a random time.

    Args:
        fault_injection_rate: Probability of a kill in each interval, from 0 to 1 (else ``ValueError``).
        interval_in_sec: Length of an interval, in seconds, above 0 (else ``ValueError``).
    """
    if not 0 <= fault_injection_rate <= 1:
        raise ValueError(f"fault_injection_rate: got {fault_injection_rate}, expected 0 to 1")
    if not interval_in_sec > 0:
        raise ValueError(f"interval_in_sec: got {interval_in_sec}, expected more than 0")
    # Do not use the program's random seed, because workers with the same seed would all be killed together.
    numbers, pause = random.SystemRandom(), threading.Event()

    def run() -> None:
        while not pause.wait(interval_in_sec):
            if numbers.random() < fault_injection_rate:
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=run, name="fault-injection", daemon=True)
    thread.start()
    return thread
