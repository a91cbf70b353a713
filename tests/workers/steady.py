"""A worker for tests that kill or stop it, or break its log. It writes numbered lines endlessly, and reacts
to signals.

SIGUSR1: exit 0. SIGUSR2: exit 1. SIGTERM and SIGINT: say so and go on if STUBBORN is set, else exit 143.

Its standard output is one stream of bytes, the same in every attempt: whatever part of a write the kernel
refuses is written again. How much the kernel accepted is kept in ``$COUNTS/<rank>.<attempt>``: what the log
must hold, however the worker or the launcher died. What the worker has to say goes to the named pipe
``$EVENTS``, for which no log is needed, or else to standard error.
"""

import os
import select
import signal

WIDTH = 120

RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
events = os.open(os.environ["EVENTS"], os.O_WRONLY) if "EVENTS" in os.environ else 2


def tell(what):
    os.write(events, f"{what} {RANK} {ATTEMPT} {os.getpid()}\n".encode())


def on_stop(signum, frame):
    tell("STOPPING")
    if "STUBBORN" not in os.environ:
        os._exit(143)


signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
signal.signal(signal.SIGUSR2, lambda *_: os._exit(1))
signal.signal(signal.SIGTERM, on_stop)
signal.signal(signal.SIGINT, on_stop)

counter = os.open(f"{os.environ['COUNTS']}/{RANK}.{ATTEMPT}", os.O_WRONLY | os.O_CREAT, 0o644)
tell("READY")
accepted = 0
refused = set()
while True:
    number, done = divmod(accepted, WIDTH)
    try:
        accepted += os.write(1, (b"%0*d\n" % (WIDTH - 1, number))[done:])
    except OSError as error:
        if error.errno not in refused:
            refused.add(error.errno)
            tell(f"REFUSED {error.errno}")
    os.pwrite(counter, b"%012d" % accepted, 0)
    select.select([], [], [], 0.002)
