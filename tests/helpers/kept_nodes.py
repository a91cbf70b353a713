"""Jobs on several nodes, in which workers keep their training state."""

from collections.abc import Callable, Iterable
from pathlib import Path

from helpers import ports
from helpers.launcher import Launched
from helpers.procs import wait_until


class Nodes:
    """Starts the agents of one job. The first agent hosts the store.

    Args:
        launch: function that starts a launcher, of the fixture of that name.
        command: options of each agent, the script and its arguments.
        pid_file: file into which the pid of the first agent is written before the others start.
    """

    def __init__(self, launch: Callable[..., Launched], *command: str, pid_file: Path | None = None) -> None:
        self._launch, self._pid_file, self._port = launch, pid_file, ports.free()
        where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._port}", "--rdzv-id=k")
        self._command = (*where, "--warm=torch", *command)
        self._has_host = False

    def start(self, count: int = 1) -> list[Launched]:
        """Start this many agents, and return them."""
        started = []
        for _ in range(count):
            started.append(self._launch(*self._command))
            if not self._has_host:
                self._has_host = True
                if self._pid_file is not None:
                    self._pid_file.write_text(str(started[0].pid))
                wait_until(lambda: not ports.is_free(self._port))
        return started


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
