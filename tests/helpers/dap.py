"""A client of debugpy that acts like the debugger of an editor. It uses the Debug Adapter Protocol."""

import itertools
import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.procs import HANG


class Debugger:
    """A debugger session. It attaches to the program at ``port`` and to the child processes that debugpy
    reports, and lets them continue after each stop.

    Args:
        port: port at which ``python -m debugpy --listen PORT --wait-for-client`` listens.
        script: file with the breakpoint.
        line: line of the breakpoint.

    Attributes:
        stops: reasons of the stops in child processes.
    """

    def __init__(self, port: int, script: Path, line: int) -> None:
        self.stops: list[str] = []
        self._script, self._line = script, line
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._attach(port, {})

    def close(self) -> None:
        """Wait until all sessions have ended. A session ends when its program exits."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HANG)
        for each in self._sockets:
            each.close()

    def _attach(self, port: int, config: dict[str, Any]) -> None:
        sock = socket.create_connection(("127.0.0.1", port), HANG)
        self._sockets.append(sock)
        thread = threading.Thread(target=self._serve, args=(sock, config), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, sock: socket.socket, config: dict[str, Any]) -> None:
        numbers = itertools.count(1)

        def send(command: str, **arguments: Any) -> None:
            body = {"seq": next(numbers), "type": "request", "command": command, "arguments": arguments}
            data = json.dumps(body).encode()
            with suppress(OSError):
                sock.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))

        send("initialize", adapterID="test", pathFormat="path")
        send("attach", subProcess=True, justMyCode=False, **config)
        with sock.makefile("rb") as file:
            while (message := _read(file)) is not None:
                body = message.get("body") or {}
                match message.get("event"):
                    case "initialized":
                        breakpoints = [{"line": self._line}]
                        send("setBreakpoints", source={"path": str(self._script)}, breakpoints=breakpoints)
                        send("configurationDone")
                    case "debugpyAttach":
                        self._attach(body["connect"]["port"], {"subProcessId": body["subProcessId"]})
                    case "stopped":
                        if config:
                            self.stops.append(body["reason"])
                        send("continue", threadId=body["threadId"])


def _read(file: Any) -> dict[str, Any] | None:
    length = 0
    try:
        while header := file.readline().strip():
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return json.loads(file.read(length)) if length else None
    except OSError:
        return None
