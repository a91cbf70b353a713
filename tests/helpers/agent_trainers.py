"""Trainers that agents start: either all on one node, or each on a separate node."""

import json
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers import procs
from helpers.launcher import Launched
from helpers.nodes import meeting
from helpers.trainers import Trainers

_PROGRAM = Path(__file__).resolve().parent.parent / "workers" / "agent_trainer.py"

NEXT = "+"
"""Behind the name of a trainer: the one that is started in its place."""


class UnderAgents(Trainers):
    """Trainers under ``elasticrun --on-failure replace``. A replacement gets the same orders without the
    faults, and the same name with :data:`NEXT` appended.

    Args:
        launch: starts an agent.
        folder: for the orders, and what is told.
        workers: how many trainers take part, at least and at most.
        conf: settings of the rendezvous; those that concern the workers alone are given to them.
        port: of the store where several nodes meet.
        together: those that are started by one call are one node; else each has a node of its own.
    """

    def __init__(
        self,
        launch: Callable[..., Launched],
        folder: Path,
        workers: tuple[int, int],
        conf: Mapping[str, object],
        port: int,
        *,
        together: bool,
    ) -> None:
        self._folder = folder
        told, self._gate = folder / "told", folder / "gate"
        for fifo in (told, self._gate):
            os.mkfifo(fifo)
        # Also open the FIFO for writing, so that this process never sees the end of the file.
        super().__init__(os.open(told, os.O_RDWR))
        self._launch, self._workers, self._port = launch, workers, port
        self._query = {name: conf[name] for name in ("stuck_timeout", "join_timeout") if name in conf}
        self._conf = {name: value for name, value in conf.items() if name not in self._query}
        self._together = together
        self.agents: dict[str, Launched] = {}
        self._failed = set[Launched]()

    def start_all(
        self,
        orders: Mapping[str, Mapping[str, Any]],
        *,
        restarts: int = 4,
        meets: bool = False,
        nodes: Sequence[str] = (),
    ) -> None:
        """Start these trainers, and let them continue when all of them are up.

        Args:
            orders: by name.
            restarts: that each agent may make.
            meets: others may come to a job that is one node, too.
            nodes: the names of those that share one, where that is neither all nor none.
        """
        for name, order in orders.items():
            (self._folder / f"{name}.json").write_text(json.dumps({**order, "query": self._query}))
        gate, begin = os.open(self._gate, os.O_RDWR), len(self.told)
        for names in nodes or (["".join(orders)] if self._together else orders):
            least, most = (max(1, count // len(names)) for count in self._workers)
            options = self._options(len(names), (least, most), restarts, meets=meets)
            self.agents.update(dict.fromkeys(names, self._agent(options, names)))
        self.wait_until(
            lambda: {told["name"] for told in self.told[begin:] if told["what"] == "up"} >= set(orders)
        )
        # Closing the gate releases the trainers, which wait for its end of file.
        os.close(gate)

    def _agent(self, options: Sequence[str], names: Iterable[str]) -> Launched:
        return self._launch(*options, _PROGRAM, self._folder, *names, env={"OMP_NUM_THREADS": "1"})

    def comes_late(self, names: str) -> str:
        """Start one more node with these trainers after the job has finished. Return its agent's stderr."""
        count = len(names)
        least, most = (max(1, each // count) for each in self._workers)
        agent = self._agent(self._options(count, (least, most), 4, meets=True), names)
        agent.wait()
        return agent.stderr

    def _options(self, nproc: int, nodes: tuple[int, int], restarts: int, *, meets: bool) -> list[str]:
        options = [f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
        options += ["--on-failure=replace", "--warm=auto"]
        if nodes == (1, 1) and not meets:
            return [*options, "--standalone"]
        options += meeting(f"{nodes[0]}:{nodes[1]}", self._port)
        # Allow different commands, because each agent gets the names of its own trainers as arguments.
        settings = {"same_command": 0, **self._conf}
        conf = ",".join(f"{name}={value}" for name, value in settings.items())
        return [*options, f"--rdzv-conf={conf}"]

    def after(self, *names: str) -> Sequence[str]:
        """Return the names of the trainers that replace these if they fail."""
        return [name + NEXT for name in names]

    def lose(self, name: str) -> None:
        """Kill the agent of this trainer, as if its node were lost."""
        agent, others = self.agents[name], {child.pid for child in procs.children()}
        agent.signal(signal.SIGKILL)
        self._failed.add(agent)
        assert agent.wait() == -signal.SIGKILL
        procs.reap_adopted(keep=others)

    def replaced(self, name: str, code: int) -> None:
        """Wait until the agent reports that a trainer exited with this code and was replaced."""
        how = f"died by {signal.Signals(-code).name}" if code < 0 else rf"exited with code {code}|Error"
        line = rf"pid {self.pids[name]}\).*(?:{how}).*replaced by pid {self.pids[name + NEXT]}"
        self.agents[name].wait_for_line(line, "stderr")

    def fails(self, *names: str) -> None:
        for name in names:
            self._failed.add(self.agents[name].exits(1))

    def over(self) -> None:
        """Wait until all agents have exited. All of them must have succeeded, except those known to have
        failed.
        """
        for agent in {*self.agents.values()} - self._failed:
            agent.exits(0)

    def stderr_text(self) -> str:
        return "".join(agent.stderr for agent in {*self.agents.values()})

    def close(self) -> None:
        os.close(self._fd)

    def has_news(self, timeout: float) -> bool:
        agents = {*self.agents.values()}
        while True:
            for agent in agents:
                # Read all output, because an agent would otherwise block on a full pipe.
                agent.read_for(0)
            running = [agent for agent in agents if not agent.has_exited]
            sources = [self._fd, *(fd for agent in running for fd in agent.sources())]
            ready = select.select(sources, [], [], timeout)[0]
            if self._fd in ready or not ready:
                return bool(ready)

    def story(self, last: int | None = 200) -> str:
        agents = {*self.agents.values()}
        return "\n".join([super().story(last), *(f"---\n{agent.stdout}{agent.stderr}" for agent in agents)])
