"""Forwards TCP connections, and delays, stalls or resets them on command.

Arguments: the address and port to listen on, the address and port to forward to. The first line of output is
``listening PORT``. "up" is from whoever connected to the target, "down" is back.

Commands, one JSON object per line:

- `set`: `delay_up`, `delay_down` (seconds, each byte), `rate` (bytes per second and direction, 0 = no
  limit), `is_stalled_up`, `is_stalled_down` (nothing is forwarded, connections stay), `new` (what becomes
  of new connections: "serve", "hang": accepted and never answered, "refuse"). Only what is given changes.
- `reset`: both sides of every connection get a RST. Returns the number of `connections`.
- `counts`: `up` and `down` (bytes forwarded), `connections` (ever accepted), `open`.
"""

import asyncio
import json
import os
import socket
import struct
import sys
from collections import deque
from typing import Any

CHUNK = 1 << 16
UNDER_WAY = 1 << 22
"""Bytes of one direction that are delayed here; beyond, the sender's own buffers fill."""

SETTINGS: dict[str, Any] = {
    "delay_up": 0.0,
    "delay_down": 0.0,
    "rate": 0,
    "is_stalled_up": False,
    "is_stalled_down": False,
    "new": "serve",
}


class Direction:
    def __init__(self, relay: "Relay", name: str, source: socket.socket, target: socket.socket) -> None:
        self._relay, self._name = relay, name
        self._source, self._target = source, target
        self._queue: deque[tuple[float, bytes]] = deque()
        self._size = 0

    async def run(self) -> None:
        """Run until the source has closed and all of its data is delivered."""
        reader = asyncio.ensure_future(self._read())
        try:
            await self._write()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        chunk = b"-"
        while chunk:
            while self._relay.settings[f"is_stalled_{self._name}"] or self._size >= UNDER_WAY:
                await self._relay.changed()
            try:
                chunk = await loop.sock_recv(self._source, CHUNK)
            except OSError:
                chunk = b""
            self._queue.append((loop.time() + self._relay.settings[f"delay_{self._name}"], chunk))
            self._size += len(chunk)
            self._relay.notify()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue or self._relay.settings[f"is_stalled_{self._name}"]:
                await self._relay.changed()
            due, chunk = self._queue[0]
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
                continue  # check again for a stall
            self._queue.popleft()
            if not chunk:
                self._target.shutdown(socket.SHUT_WR)
                return
            if rate := self._relay.settings["rate"]:
                await asyncio.sleep(len(chunk) / rate)
            await loop.sock_sendall(self._target, chunk)
            self._size -= len(chunk)
            self._relay.counts[self._name] += len(chunk)
            self._relay.notify()


class Relay:
    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.settings = dict(SETTINGS)
        self.counts = {"up": 0, "down": 0, "connections": 0}
        self._listen, self._target = listen, target
        self._listener: socket.socket | None = None
        self._open: dict[asyncio.Task[None], list[socket.socket]] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    async def changed(self) -> None:
        """Wait until a queue or a setting has changed."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def notify(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def run(self) -> None:
        """Forward frames until standard input closes."""
        loop = asyncio.get_running_loop()
        self._start_listening()
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        os.write(1, f"listening {self._listen[1]}\n".encode())
        while line := await commands.readline():
            command = json.loads(line)
            try:
                answer = self._answer(command.pop("do"), command)
            except (KeyError, OSError) as error:
                answer = {"error": repr(error)}
            os.write(1, json.dumps(answer).encode() + b"\n")
        self._stop_listening()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _answer(self, do: str, command: dict[str, Any]) -> dict[str, Any]:
        if do == "counts":
            return {**self.counts, "open": len(self._open)}
        if do == "reset":
            return {"connections": self._reset()}
        if do != "set" or command.keys() - SETTINGS.keys():
            return {"error": f"no such command: {do} {command}"}
        self.settings.update(command)
        if self.settings["new"] == "refuse":
            self._stop_listening()
        else:
            self._start_listening()
        self.notify()
        return {}

    def _start_listening(self) -> None:
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._listen[0] else socket.AF_INET
            self._listener = socket.create_server(self._listen, family=family, backlog=1024)
            self._listener.setblocking(False)
            self._listen = self._listener.getsockname()[:2]
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        accepted.setblocking(False)
        self.counts["connections"] += 1
        sockets = [accepted]
        is_served = self.settings["new"] == "serve"
        task = asyncio.ensure_future(self._serve(sockets) if is_served else self._hang())
        self._open[task] = sockets
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        for each in self._open.pop(task):
            each.close()
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, OSError):
            raise error

    async def _hang(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def _serve(self, sockets: list[socket.socket]) -> None:
        family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
        onward = socket.socket(family)
        onward.setblocking(False)
        sockets.append(onward)
        await asyncio.get_running_loop().sock_connect(onward, self._target)
        accepted = sockets[0]
        for each in sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [
            asyncio.ensure_future(Direction(self, "up", accepted, onward).run()),
            asyncio.ensure_future(Direction(self, "down", onward, accepted).run()),
        ]
        try:
            await asyncio.gather(*ways)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    def _reset(self) -> int:
        tasks = list(self._open.items())
        for task, sockets in tasks:
            for each in sockets:
                # Discard unsent data when the socket is closed, so that the kernel sends a RST.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            task.cancel()
        return len(tasks)


def main(listen: str, port: str, target: str, target_port: str) -> None:
    asyncio.run(Relay((listen, int(port)), (target, int(target_port))).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
