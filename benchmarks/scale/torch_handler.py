"""torch's own handlers, many of them in one process, each with a thread and a connection.

After the first round they do what torchrun's agents do: the one with a failed worker goes to the next
rendezvous, the others ask ten times a second whether somebody waits there.
"""

import json
import os
import queue
import random
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from benchmarks.scale.children import Lines, write_line

MONITOR_INTERVAL = 0.1


def serve() -> None:
    """Run a TCPStore in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    write_line(1, {"port": store.port})
    lines = Lines()
    while lines.is_open:
        lines.read()


class Agent(threading.Thread):
    def __init__(self, arguments: dict[str, Any], events: "queue.SimpleQueue[Any]") -> None:
        super().__init__(daemon=True)
        self._arguments = arguments
        self._events = events
        self.begin = threading.Event()
        self.fail = threading.Event()

    def run(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

        agents = self._arguments["total"]
        timeout = timedelta(seconds=self._arguments["limit"])
        store = TCPStore("127.0.0.1", self._arguments["port"], is_master=False, timeout=timeout)
        handler = DynamicRendezvousHandler.from_backend(
            "scale",
            store,
            C10dRendezvousBackend(store, "scale"),
            min_nodes=agents,
            max_nodes=agents,
            local_addr="127.0.0.1",
        )
        self._events.put(("ready", time.monotonic_ns()))
        self.begin.wait()
        handler.next_rendezvous()
        self._events.put(("started 1", time.monotonic_ns()))
        # Start polling after a random delay, because agents do not poll in step.
        self.fail.wait(random.uniform(0, MONITOR_INTERVAL))
        while not self.fail.is_set():
            if handler.num_nodes_waiting() > 0:
                self._events.put(("stopped 1", time.monotonic_ns()))
                break
            self.fail.wait(MONITOR_INTERVAL)
        handler.next_rendezvous()
        self._events.put(("started 2", time.monotonic_ns()))


def main() -> None:
    arguments = json.loads(sys.argv[1])
    if arguments.get("serve"):
        serve()
        return
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    agents = [Agent(arguments, events) for _ in range(arguments["agents"])]
    stamps: dict[str, list[int]] = {}
    for agent in agents:
        agent.start()
    lines = Lines()
    while lines.is_open:
        for command in lines.read():
            if command["do"] == "begin":
                for agent in agents:
                    agent.begin.set()
                write_line(1, time.monotonic_ns())
            elif command["do"] == "fail":
                moment = time.monotonic_ns()
                agents[command["agent"]].fail.set()
                write_line(1, moment)
            else:
                name, count = command["name"], command["count"]
                while len(stamps.get(name, ())) < count:
                    event, moment = events.get()
                    stamps.setdefault(event, []).append(moment)
                write_line(1, stamps.get(name, []))
    # Skip the interpreter's shutdown, because the handlers' threads never exit.
    os._exit(0)


if __name__ == "__main__":
    main()
