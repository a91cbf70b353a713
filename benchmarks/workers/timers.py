"""A worker with timers or heartbeats. A timer expires, a worker hangs, many records are written, or the cost
of a call is measured.
"""

import json
import os
import signal
import sys
import time

from report import report

FIFO = os.environ.get("TORCHELASTIC_TIMER_FILE", "")
HOUR = 3600


def record(scope, expires, signum=0):
    """Return a record in the format of both torch's and elasticrs's client."""
    fields = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": scope,
        "expiration_time": expires,
        "signal": signum,
    }
    return json.dumps(fields).encode() + b"\n"


def write(data):
    """Open the FIFO for each write, as torch's client does. torch's server would otherwise wait until the
    FIFO is closed.
    """
    fd = os.open(FIFO, os.O_WRONLY)
    while data:
        data = data[os.write(fd, data) :]
    os.close(fd)


def expire(timers):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM})
    for number in range(timers - 1):
        write(record(f"far/{number}", time.time() + HOUR, signal.SIGKILL))
    report("ready")
    if os.environ["RANK"] == "0":
        signal.sigwait({signal.SIGUSR2})
        # Let the timer expire at a random point of the launcher's polling interval.
        left = 0.5 + int.from_bytes(os.urandom(2), "big") / 65536
        write(record("near", time.time() + left, signal.SIGUSR1))
        due_ns = time.monotonic_ns() + int(left * 1e9)
        signal.sigwait({signal.SIGUSR1})
        expired_ns = time.monotonic_ns()
        report("due", due_ns)
        report("expired", expired_ns)
    else:
        signal.sigwait({signal.SIGUSR2})


def pour(records):
    pair = record("scope", time.time() + HOUR, signal.SIGKILL) + record("scope", -1)
    block = pair * 16
    fd = os.open(FIFO, os.O_WRONLY)
    report("began")
    for _ in range(records // 32):
        rest = block
        while rest:
            rest = rest[os.write(fd, rest) :]
    report("poured")
    os.close(fd)


def acquire(launcher, requests):
    if launcher == "torchrun":
        from torch.distributed.elastic.timer import FileTimerClient
    else:
        from elasticrs.timer import FileTimerClient
    client = FileTimerClient(FIFO)
    spans = []
    for _ in range(requests):
        expires = time.time() + HOUR
        began = time.perf_counter_ns()
        client.acquire("scope", expires)
        spans.append(time.perf_counter_ns() - began)
        client.release("scope")
    for span in spans:
        report("span", span)


def beat(count):
    from elasticrs.timer import heartbeat

    heartbeat(0)
    began = time.perf_counter_ns()
    for step in range(count):
        heartbeat(step)
    report("span", time.perf_counter_ns() - began)


def hang():
    from elasticrs.timer import heartbeat

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    heartbeat(1)
    if os.environ["RANK"] == "0":
        # Wait until all other workers have started.
        time.sleep(0.5)
        before_ns = time.monotonic_ns()
        heartbeat(2)
        report("last", before_ns)
        # Pause again after each signal that requests stacks. Send no heartbeat, because the worker would then
        # seem alive.
        while True:
            signal.pause()
    while signal.sigtimedwait({signal.SIGTERM}, 0.05) is None:
        heartbeat(3)
    report("told")


mode, *arguments = sys.argv[1:]
if mode == "expire":
    expire(int(arguments[0]))
elif mode == "pour":
    pour(int(arguments[0]))
elif mode == "beat":
    beat(int(arguments[0]))
elif mode == "hang":
    hang()
else:
    acquire(arguments[0], int(arguments[1]))
