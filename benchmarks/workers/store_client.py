"""Clients of the TCPStore under measurement, each in a separate process.

For each line ``<port> <clients> <operation> <repeats>`` on standard input: forks that many clients, lets them
begin together, and prints ``<wall nanoseconds> <nanoseconds of each operation ...>``.
"""

import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist


def operations(store, number):
    """Return the operations by name. Each is called with the number of the repetition, which is different
    every time.
    """
    value = b"v" * 180  # size of gloo's entry for a rank
    own, counter, large = f"own/{number}", f"count/{number}", f"large/{number}"
    store.set(own, value)
    store.set(large, b"v" * (1 << 20))
    pair, is_first = number // 2, number % 2 == 0

    def set_add(_turn):
        # `set` has no reply. The reply to `add` arrives after both operations.
        store.set(own, value)
        store.add(counter, 1)

    def ping_pong(turn):
        ping, pong = f"ping/{pair}/{turn}", f"pong/{pair}/{turn}"
        if is_first:
            store.set(ping, b"1")
            store.wait([pong])
        else:
            store.wait([ping])
            store.set(pong, b"1")

    return {
        "get": lambda _turn: store.get(own),
        "add": lambda _turn: store.add(counter, 1),
        "set+add": set_add,
        "ping-pong": ping_pong,
        "get-1MiB": lambda _turn: store.get(large),
    }


def client(port, number, name, repeats, ready, start, spans):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    operation = operations(store, number)[name]
    for turn in range(5):
        operation(f"warm/{turn}")
    os.write(ready, b".")
    os.read(start, 1)
    measured = []
    for turn in range(repeats):
        began = time.perf_counter_ns()
        operation(turn)
        measured.append(time.perf_counter_ns() - began)
    with os.fdopen(spans, "w") as file:
        print(*measured, file=file)


def measure(port, clients, name, repeats):
    ready, start = os.pipe(), os.pipe()
    outputs = []
    for number in range(clients):
        reading, writing = os.pipe()
        if os.fork() == 0:
            # Only the parent may hold the write end. When the parent closes it, all clients start.
            os.close(start[1])
            client(port, number, name, repeats, ready[1], start[0], writing)
            os._exit(0)
        os.close(writing)
        outputs.append(reading)
    arrived = 0
    while arrived < clients:
        arrived += len(os.read(ready[0], clients))
    began = time.perf_counter_ns()
    os.close(start[1])
    spans = [span for reading in outputs for span in _read(reading).split()]
    wall = time.perf_counter_ns() - began
    for fd in (*ready, start[0]):
        os.close(fd)
    for _ in range(clients):
        os.wait()
    print(wall, *spans, flush=True)


def _read(fd):
    with os.fdopen(fd) as file:
        return file.read()


if __name__ == "__main__":
    for line in sys.stdin:
        port, clients, name, repeats = line.split()
        measure(int(port), int(clients), name, int(repeats))
