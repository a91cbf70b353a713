"""Starts the agents (one for each node) of a demo's job, all on this machine, and reads what they print."""

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress


class Job:
    """A job with an agent for each of its nodes. The agents of several nodes connect to the first one.

    Args:
        command: command that starts an agent, with the options and arguments that all agents have.
        variables: environment variables for the agents, in addition to those of this program.
        take: function that is called with each line that an agent prints, and the number of the agent. It
            returns true if the line is not to be printed.
        limit: seconds after which :meth:`read` gives up, and :meth:`close` kills the agents.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        take: Callable[[int, str], bool] = lambda number, line: False,  # noqa: ARG005 -- prints all lines
        limit: float = 200.0,
    ) -> None:
        self.command = command
        self.output = ""
        self.agents: list[subprocess.Popen[bytes]] = []
        self._variables, self._take = variables, take
        self._rest: dict[int, bytes] = {}
        """The incomplete last line of each agent whose output is still open. The line may be empty."""
        self._ends = time.monotonic() + limit

    def start(self, *options: str, node: int | None = None) -> None:
        """Start one more agent of the job, with additional ``options``, on the node number ``node``."""
        variables = {"OMP_NUM_THREADS": "1"} | ({} if node is None else {"DEMO_NODE": str(node)})
        split = next(at for at, word in enumerate(self.command) if word.startswith("--"))
        agent = subprocess.Popen(
            [*self.command[:split], *options, *self.command[split:]],
            env={**os.environ, **variables, **self._variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert agent.stdout is not None
        os.set_blocking(agent.stdout.fileno(), False)
        self._rest[len(self.agents)] = b""
        self.agents.append(agent)

    def wait_for_port(self, port: int) -> None:
        """Wait until the first agent listens on a port, or has ended. The others connect to this port."""
        while self.agents[0].poll() is None and time.monotonic() < self._ends:
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    return
            self.read_some(0.05)

    def read(self, until: str | None = None, count: int = 1) -> list[re.Match[str]]:
        """Read what the agents print, until all of them have ended, or the pattern ``until`` has been found
        ``count`` times in all that they have printed so far. Return what was found. That may be less than
        ``count`` matches, if the time limit of the job has passed.
        """
        while True:
            found = [] if until is None else list(re.finditer(until, self.output))
            if (until is not None and len(found) >= count) or not self._rest or time.monotonic() > self._ends:
                return found
            self.read_some(1.0)

    def read_some(self, wait: float) -> None:
        """Read what the agents have printed. If there is nothing to read, wait at most ``wait`` seconds."""
        number_of = {agent.stdout: number for number, agent in enumerate(self.agents)}
        for pipe in select.select([self.agents[each].stdout for each in self._rest], [], [], wait)[0]:
            self._read(number_of[pipe])

    def _read(self, number: int) -> None:
        pipe = self.agents[number].stdout
        assert pipe is not None
        chunk = os.read(pipe.fileno(), 1 << 16)
        *lines, rest = (self._rest.pop(number) + chunk).split(b"\n")
        if chunk:
            self._rest[number] = rest
        for line in (each.decode(errors="replace") + "\n" for each in lines):
            self.output += line
            if not self._take(number, line):
                sys.stdout.write(line)
                sys.stdout.flush()

    def close(self) -> bool:
        """Wait for all agents, and kill those that run too long. Return true if the first one succeeded."""
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, self._ends - time.monotonic()))
            agent.kill()
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()
        return self.agents[0].returncode == 0
