"""Opens a page in a browser (chromium without a window), reads the page's text and takes pictures."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--hide-scrollbars",
)
LIMIT = 60.0
"""Seconds after which this program no longer waits for an answer of the browser."""


def find_browser() -> str | None:
    """Return the path of a browser; `None` if none is installed (Debian: `apt-get install chromium`)."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page. This program talks to it over two pipes, in Chrome's DevTools protocol.

    Args:
        program: path of the browser's program.
    """

    def __init__(self, program: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="browser_", ignore_cleanup_errors=True)
        (read, self._orders), (self._answers, write) = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to descriptor 4. First move both pipes to higher
        # numbers. Otherwise, giving the number 3 to one pipe could close the other.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (read, write)]
        nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        ends = [(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate(theirs, 3)]
        command = [program, *OPTIONS, f"--user-data-dir={self._home.name}"]
        self._pid = os.posix_spawn(program, command, os.environ, file_actions=[*nowhere, *ends])
        for fd in (read, write, *theirs):
            os.close(fd)
        self._rest, self._number = b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """Messages in the browser's console for the page, such as violations of the security policy."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self._ask(f"{domain}.enable")

    def close(self) -> None:
        """End the browser's process."""
        os.close(self._orders)
        pidfd = os.pidfd_open(self._pid)
        if not select.select([pidfd], [], [], 10)[0]:
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(pidfd)
        os.close(self._answers)
        self._home.cleanup()

    def open(self, url: str, *, width: int = 1120, height: int = 900, is_dark: bool = False) -> None:
        """Open a page in a window of this size, as for a user who prefers dark or light colours."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Evaluate a JavaScript expression on the page, and return its value."""
        return self._ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def text(self) -> str:
        """Return the text that a user sees on the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for(self, words: str, limit: float = LIMIT) -> str:
        """Wait until the page shows these words. Return its text. After ``limit`` s, raise `TimeoutError`."""
        ends = time.monotonic() + limit
        while words not in (text := self.text()):
            if time.monotonic() > ends:
                raise TimeoutError(f"the page does not show {words!r}, but: {text}")
            select.select([], [], [], 0.05)
        return text

    def picture(self) -> bytes:
        """Take a picture of the whole page. Return it in the format PNG."""
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def _ask(self, method: str, **params: Any) -> Mapping[str, Any]:
        self._number += 1
        order = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            answer = json.loads(self._next())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: Mapping[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Log.entryAdded":
                self.complaints.append(answer["params"]["entry"]["text"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(answer["params"]["exceptionDetails"]))

    def _next(self) -> bytes:
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], LIMIT)[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        return message
