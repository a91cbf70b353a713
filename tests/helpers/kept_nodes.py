"""Jobs on several nodes, in which workers keep their training state."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from helpers import ports
from helpers.coordination import store_command
from helpers.launcher import Launched
from helpers.procs import reap_adopted, wait_until


class Nodes:
    """Starts the agents of one job. The first agent hosts the store, unless that is separate.

    Args:
        launch: function that starts a launcher, of the fixture of that name.
        command: options of each agent, the script and its arguments.
        pid_file: file into which the pid of the first agent is written before the others start.
        are_forks: ``launch`` forks a process that has imported torch. The store is a process of its own, so
            each agent may be killed.
        env: variables of the agents.
    """

    def __init__(
        self,
        launch: Callable[..., Launched],
        *command: str | Path,
        pid_file: Path | None = None,
        are_forks: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._launch, self._pid_file, self._port, self._env = launch, pid_file, ports.free(), env
        where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._port}", "--rdzv-id=k")
        self._command = (*where, *(() if are_forks else ("--warm=torch",)), *command)
        self._host: Launched | None = None
        self.agents: list[Launched] = []
        if are_forks:
            self._host = launch(argv=store_command(port=self._port), start=subprocess.Popen)
            wait_until(lambda: not ports.is_free(self._port))

    def start(self, count: int = 1) -> list[Launched]:
        """Start this many agents, and return them."""
        started = []
        for _ in range(count):
            started.append(self._launch(*self._command, env=self._env))
            if self._host is None:
                self._host = started[0]
                if self._pid_file is not None:
                    self._pid_file.write_text(str(started[0].pid))
                wait_until(lambda: not ports.is_free(self._port))
        self.agents += started
        return started

    def kill(self, worker: int, *, is_whole: bool) -> None:
        """Kill the agent of a worker, and with ``is_whole`` all processes of its node."""
        for agent in self.agents:
            below = [each.pid for each in agent.descendants()]
            if worker in below:
                for pid in (agent.pid, *(below if is_whole else ())):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    # The rest is that of a single launcher.

    @property
    def stderr(self) -> str:
        return "".join(agent.stderr for agent in self.agents)

    @property
    def has_exited(self) -> bool:
        return all(agent.has_exited for agent in self.agents)

    def read_for(self, seconds: float) -> None:
        """Read output of all agents for this time, or until they have exited."""
        deadline = time.monotonic() + seconds
        while not self.has_exited and (left := deadline - time.monotonic()) > 0:
            for agent in self.agents:
                agent.read_for(min(left, 0.005))

    def exits(self, code: int, timeout: float) -> None:
        """Wait until all agents have exited with this code, but for spares and those that were killed. Then
        end the store.
        """
        self.read_for(timeout)
        for agent in self.agents:
            assert agent.wait() in (code, -signal.SIGKILL) or "without this node" in agent.stderr, self.stderr
        if self._host is not None and self._host not in self.agents:
            self._host.signal(signal.SIGTERM)
            self._host.wait()
        reap_adopted()


def said(job: Iterable[Launched], word: str) -> list[str]:
    """Return what the workers of these agents have written after a word, sorted."""
    return sorted(match.group(1) for agent in job for match in agent._matches(rf"{word} (.*)", "stdout"))


def published(first_rank: int, holdings: Iterable[object] = (), **facts: object) -> dict[str, object]:
    """Return what a node publishes about the state that its ranks have kept."""
    usual: dict[str, object] = {
        "barred_from": None,
        "refused": None,
        "reached": None,
        "was_replicated": False,
        "ranks_before": 0,
    }
    usual |= {"partners": [], "has_peers": False, "saved": None}
    return {**usual, "first_rank": first_rank, "holdings": [*holdings], **facts}
