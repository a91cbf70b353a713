"""A worker with timers or heartbeats: one that expires or hangs, many at once, or the cost of a call."""

import json
import os
import signal
import sys
import time

from report import report

FIFO = os.environ.get("TORCHELASTIC_TIMER_FILE", "")
HOUR = 3600


def record(scope, expires, signum=0):
    """What either client writes."""
    fields = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": scope,
        "expiration_time": expires,
        "signal": signum,
    }
    return json.dumps(fields).encode() + b"\n"


def write(data):
    """Opened for each, as torch's client does: its server waits as long as somebody has the FIFO open."""
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
        # Somewhere within the intervals of whoever polls.
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
        # So that none of the others was late to begin.
        time.sleep(0.5)
        before_ns = time.monotonic_ns()
        heartbeat(2)
        report("last", before_ns)
        # The question for its stacks ends a pause, and a heartbeat after it would be a sign of life.
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
