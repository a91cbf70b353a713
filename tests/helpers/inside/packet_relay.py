"""A cable that loses, repeats, reorders and delays packets: it forwards frames between two TAP devices that
it creates.

Arguments: the names of the devices, and the seed of the random numbers. Each direction has numbers of its
own, so that the fate of its n-th frame depends on the seed alone. Commands, one JSON object per line:
`{"do": "set", ...}` with fields of :class:`Impairment`, and `{"do": "counts"}`.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from typing import Any, NamedTuple

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000

MAX_FRAME = 1 << 16
BACKLOG = 4096
"""Frames under way in one direction; more are lost, as in a router."""


class Impairment(NamedTuple):
    """The treatment of frames. Shares are probabilities from 0 to 1, and times are in seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """This share is held back by `reorder_by`, so that later ones overtake it."""
    reorder_by: float = 0.02
    delay: float = 0.0
    """Each way: twice this for an answer."""
    jitter: float = 0.0
    """Up to this much more delay, at random; reorders, too."""

    def deliveries(self, chance: random.Random) -> list[float]:
        """Return the delays after which the next frame arrives: none if it is lost, two if it is repeated.

        Always takes the same number of random numbers, so that a change of one share moves no other fate.
        """
        lost, twice, late, first, second = (chance.random() for _ in range(5))
        if lost < self.loss:
            return []
        delay = self.delay + self.jitter * first + (self.reorder_by if late < self.reorder else 0.0)
        return [delay, self.delay + self.jitter * second] if twice < self.duplicate else [delay]


class Direction:
    def __init__(self, source: int, target: int, seed: str) -> None:
        self.source, self._target = source, target
        self._chance = random.Random(seed)
        self._waiting: list[tuple[float, int, bytes]] = []
        self._newest = 0
        self.counts = {"taken": 0, "lost": 0, "repeated": 0, "overtaken": 0, "delivered": 0}

    def take(self, how: Impairment, now: float) -> None:
        """Read all available frames, and decide what happens to each of them."""
        while True:
            try:
                frame = os.read(self.source, MAX_FRAME)
            except BlockingIOError:
                return
            delays = how.deliveries(self._chance)
            self.counts["taken"] += 1
            self.counts["repeated"] += len(delays) > 1
            if not delays or len(self._waiting) >= BACKLOG:
                self.counts["lost"] += 1
                continue
            for delay in delays:
                heapq.heappush(self._waiting, (now + delay, self.counts["taken"], frame))

    def deliver(self, now: float) -> float | None:
        """Write all frames that are due. Return the time when the next frame is due, or ``None``."""
        while self._waiting and self._waiting[0][0] <= now:
            _, number, frame = heapq.heappop(self._waiting)
            self.counts["overtaken"] += number < self._newest
            self._newest = max(self._newest, number)
            try:
                os.write(self._target, frame)
            except OSError:  # the device is down, or its queue is full: the frame is lost
                self.counts["lost"] += 1
            else:
                self.counts["delivered"] += 1
        return self._waiting[0][0] if self._waiting else None


def make_tap(name: str) -> int:
    """Create a TAP device that exists as long as the returned descriptor is open."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


class Relay:
    """Forwards frames in both directions, and executes the commands."""

    def __init__(self, near: int, far: int, seed: str) -> None:
        self._how = Impairment()
        self._ways = {"up": Direction(near, far, f"{seed}-up"), "down": Direction(far, near, f"{seed}-down")}
        self._commands = b""

    def run(self) -> None:
        """Forward frames until standard input closes."""
        poll = select.epoll()
        for fd in (0, *(way.source for way in self._ways.values())):
            poll.register(fd, select.EPOLLIN)
        wait: float | None = None
        while True:
            ready = {fd for fd, _ in poll.poll(wait)}
            if 0 in ready and not self._obey():
                return
            for way in self._ways.values():
                if way.source in ready:
                    way.take(self._how, time.monotonic())
            due = [at for way in self._ways.values() if (at := way.deliver(time.monotonic())) is not None]
            wait = max(0.0, min(due) - time.monotonic()) if due else None

    def _obey(self) -> bool:
        chunk = os.read(0, 1 << 16)
        *lines, self._commands = (self._commands + chunk).split(b"\n")
        for line in lines:
            os.write(1, json.dumps(self._answer(json.loads(line))).encode() + b"\n")
        return bool(chunk)

    def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        match command.pop("do", None):
            case "set":
                try:
                    self._how = Impairment(**command)
                except TypeError as error:
                    return {"error": str(error)}
                return {}
            case "counts":
                return {name: way.counts for name, way in self._ways.items()}
        return {"error": f"no such command: {command}"}


def main(near: str, far: str, seed: str) -> None:
    devices = make_tap(near), make_tap(far)
    os.write(1, b"ready\n")
    Relay(*devices, seed).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
