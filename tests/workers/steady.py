"""A worker for tests that kill or stop it. It writes numbered lines endlessly, and reacts to signals.

SIGUSR1: exit 0. SIGUSR2: exit 1. SIGTERM and SIGINT: say so and go on if STUBBORN is set, else exit 143.

Beside its log it keeps a count of the lines that the kernel accepted, in ``$COUNTS/<rank>.<attempt>``: what
the log must hold, however the worker or the launcher died.
"""

import os
import select
import signal

RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def on_stop(signum, frame):
    os.write(2, f"STOPPING {RANK} {ATTEMPT}\n".encode())
    if "STUBBORN" not in os.environ:
        os._exit(143)


signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
signal.signal(signal.SIGUSR2, lambda *_: os._exit(1))
signal.signal(signal.SIGTERM, on_stop)
signal.signal(signal.SIGINT, on_stop)

counter = os.open(f"{os.environ['COUNTS']}/{RANK}.{ATTEMPT}", os.O_WRONLY | os.O_CREAT, 0o644)
os.write(2, f"READY {RANK} {ATTEMPT} {os.getpid()}\n".encode())
number = 0
while True:
    os.write(1, f"line {number}\n".encode())
    number += 1
    os.pwrite(counter, b"%012d" % number, 0)
    select.select([], [], [], 0.002)
