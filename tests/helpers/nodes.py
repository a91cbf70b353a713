"""One job with agents on several hosts: starting the agents, waiting for their workers, and stopping the
agents.
"""

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from helpers import ports, procs
from helpers.hosts import Host, network_of
from helpers.launcher import Launched, clean_environment
from helpers.procs import HANG

WORKERS = Path(__file__).resolve().parent.parent / "workers"
RANKS = WORKERS / "ranks.py"
STEPS = WORKERS / "steps.py"

PORT = 29400


def meeting(nnodes: str = "2", port: int | None = None) -> tuple[str, ...]:
    """Return the options of agents on this machine that form one job, with a free port by default."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{ports.free() if port is None else port}"
    return (f"--nnodes={nnodes}", "--rdzv-backend=c10d", endpoint, "--rdzv-id=job")


def meetings(backend: str, nodes: int) -> list[tuple[str, ...]]:
    """Return the options of each agent on this machine of a job with this number of nodes, for the rendezvous
    back end ``c10d`` or ``static``.
    """
    port = ports.free()
    if backend == "c10d":
        return [meeting(str(nodes), port)] * nodes
    address = (f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={port}")
    return [(*address, f"--node-rank={rank}") for rank in range(nodes)]


READY = re.compile(r"^READY (.*)$", re.MULTILINE)

T = TypeVar("T")


class Worker(NamedTuple):
    """The facts that a worker of `tests/workers/ranks.py` reports about itself."""

    pid: int
    host: str
    rank: int
    local: int
    world: int
    group: int
    groups: int
    role_rank: int
    role_world: int
    restart: int
    round: str
    """``"-"`` under a launcher that does not tell."""
    master: str
    port: str
    run: str

    @classmethod
    def parse(cls, told: str) -> "Worker":
        """Parse the fields in a worker's line."""
        fields = dict(field.split("=", 1) for field in told.split())
        types = cls.__annotations__
        typed: dict[str, Any] = {
            name: int(text) if types[name] is int else text for name, text in fields.items()
        }
        return cls(**typed)


SUCCEED, FAIL = signal.SIGUSR1, signal.SIGUSR2
"""What ends a worker of `tests/workers/ranks.py`."""


def round_of(launched: Sequence[Launched], numbers: Sequence[int]) -> list[Worker]:
    """Wait for each agent's n-th worker, with n from ``numbers``. These workers form one round, with one
    worker on each node.
    """
    found = []
    for agent, number in zip(launched, numbers, strict=True):
        line = agent.wait_for_lines(READY.pattern, number, "stdout")[number - 1]
        found.append(Worker.parse(line[1]))
    assert sorted(each.rank for each in found) == list(range(len(launched)))
    return found


def finish(launched: Iterable[Launched], workers: Iterable[Worker]) -> None:
    """Let these workers succeed, and wait until their agents succeed."""
    for worker in workers:
        os.kill(worker.pid, SUCCEED)
    for agent in launched:
        agent.exits(0)


def rdzv(backend: str, endpoint: str, run_id: str = "job", **conf: object) -> tuple[str, ...]:
    settings = ",".join(f"{name}={value}" for name, value in conf.items())
    place = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}")
    return (*place, f"--rdzv-conf={settings}")


class LoopbackJob:
    """The agents of one job, all on loopback, by node rank. The agent ``host`` hosts the store.

    Args:
        launch: the fixture.
        folder: for the logs of each node.
        nodes: how many there will be.
        options: of all agents.
    """

    def __init__(
        self,
        launch: Callable[..., Launched],
        folder: Path,
        nodes: int,
        nproc: int,
        *options: str,
        host: int = 0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.nproc, self.nodes = folder, nproc, list[Launched]()
        self._launch, self._host, self._port, self._env = launch, host, ports.free(), env
        self._options = (f"--nnodes={nodes}", f"--nproc-per-node={nproc}", *options)

    def start(self, script: Path, *options: str) -> None:
        """Start another node. ``options`` are its own."""
        number = len(self.nodes)
        where = rdzv("c10d", f"127.0.0.1:{self._port}", is_host=int(number == self._host))
        own = (f"--node-rank={number}", f"--log-dir={self.folder / f'logs{number}'}", *options)
        self.nodes.append(self._launch(*self._options, *where, *own, script, env=self._env))

    def ended(self) -> list[int]:
        """Wait for all agents, and return their exit codes. Keep their output in ``story``, for messages of
        failed tests.
        """
        codes = [node.wait() for node in self.nodes]
        self.story = "\n=== ".join(["", *(node.stderr for node in self.nodes)])
        return codes


QUICK = {"keep_alive_interval": 0.4, "keep_alive_max_attempt": 5, "store_lost_timeout": 60}
"""A rendezvous that gives up a silent node after 2 s, and never its store."""


def pids(workers: Iterable[Worker], *hosts: Host) -> list[int]:
    """Return the pids of all these workers, or only of those on the given hosts."""
    return [worker.pid for worker in workers if not hosts or worker.host in {host.name for host in hosts}]


def restarts(workers: Iterable[Worker]) -> set[int]:
    return {worker.restart for worker in workers}


@contextmanager
def running_on(host: Host, *command: str | Path) -> Iterator[Launched]:
    """Run a server on a host inside the ``with`` block. The server must print a line once it listens."""
    argv = [*host.prefix("/"), *command]
    server = Launched(argv, env=clean_environment(), cwd=Path("/"))
    procs.bystanders.add(server.pid)
    try:
        server.wait_for_line("")
        yield server
    finally:
        procs.bystanders.discard(server.pid)
        server.close()


class Agent:
    def __init__(self, host: Host, launched: Launched) -> None:
        self.host, self.launched = host, launched
        self.pid = launched.pid

    def __repr__(self) -> str:
        return f"agent {self.pid} on {self.host}"

    def workers(self) -> list[Worker]:
        """Return all workers that have reported so far, in order."""
        return [Worker.parse(match[1]) for match in READY.finditer(self.launched.stdout)]

    def signal(self, signum: int) -> None:
        """Send a signal to the agent only."""
        self.launched.signal(signum)


class Job:
    """The agents of one job.

    Args:
        launch: the fixture.
        folder: for what workers share; the agents' working directory.
        store: the host in the endpoint.
        nnodes: as on the command line.
        nproc: workers per node.
        options: of all agents.
        conf: of the rendezvous.
        env: of all agents, beside the cleaned environment of the tests.
    """

    def __init__(
        self,
        launch: Callable[..., Launched],
        folder: Path,
        store: Host,
        nnodes: str,
        *options: str,
        nproc: int = 1,
        max_restarts: int = 3,
        script: Path = RANKS,
        conf: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.nproc, self.agents = nproc, list[Agent]()
        self.endpoint, self.script = store.endpoint(PORT), script
        self.checkpoint = folder / "steps"
        self.conf: dict[str, object] = {"last_call_timeout": 1, **(conf or {})}
        self._launch, self._folder = launch, folder
        self._env = {"CHECKPOINT": str(self.checkpoint), "OMP_NUM_THREADS": "1", **(env or {})}
        self._options = ("--nnodes", nnodes, "--max-restarts", str(max_restarts), *options)
        self._seen: set[int] = set()

    def start(
        self,
        *hosts: Host,
        options: Iterable[str] = (),
        endpoint: str | None = None,
        nproc: int | None = None,
        conf: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Agent]:
        """Start one agent on each of these hosts.

        Args:
            options: behind those of the job, so that they win.
            endpoint: instead of the job's: through a relay, say.
        """
        all_conf = ",".join(f"{name}={value}" for name, value in {**self.conf, **(conf or {})}.items())
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint or self.endpoint)
        arguments = (
            *rendezvous,
            *("--rdzv-id", "job", "--rdzv-conf", all_conf, "--nproc-per-node", str(nproc or self.nproc)),
            *self._options,
            *options,
            self.script,
        )
        started = []
        for host in hosts:
            prefix = host.prefix(self._folder)
            launched = self._launch(
                *arguments, env={**self._env, **(env or {})}, cwd=self._folder, prefix=prefix
            )
            started.append(Agent(host, launched))
        self.agents += started
        return started

    def finish(self, agents: Iterable[Agent], workers: Iterable[Worker], timeout: float = HANG) -> None:
        """Let these workers succeed. Assert that these agents then succeed, and that nothing is left on their
        hosts.
        """
        chosen = tuple(agents)
        self.tell(workers, signal.SIGUSR1)
        codes = self.ended(*chosen, timeout=timeout)
        assert not any(codes), self.story(f"exit codes {codes}")
        self.assert_empty(*(agent.host for agent in chosen))

    # --- waiting ---------------------------------------------------------------------------------------

    def until(self, seen: Callable[[], T | None], what: str, timeout: float = HANG) -> T:
        """Read the output of all agents until ``seen`` returns something other than ``None``.

        Raises:
            AssertionError: it does not within ``timeout`` seconds, or all have ended; shows all output.
        """
        deadline = time.monotonic() + timeout
        while True:
            for agent in self.agents:
                agent.launched.read_for(0)
            if (found := seen()) is not None:
                return found
            running = [agent for agent in self.agents if not agent.launched.has_exited]
            left = deadline - time.monotonic()
            if not running or left <= 0:
                raise AssertionError(self.story(f"not seen within {timeout} s: {what}"))
            poll = select.poll()
            for agent in running:
                for fd in agent.launched.sources():
                    poll.register(fd, select.POLLIN)
            poll.poll(left * 1000)

    def formed(
        self,
        *agents: Agent,
        world: int | None = None,
        restarts: int | None = None,
        timeout: float = HANG,
    ) -> list[Worker]:
        """Wait until these agents run new workers, all of one round. Workers that an earlier call returned do
        not count. With ``restarts``, check how many restarts the job has used.

        Returns:
            All of them by rank. Ranks, sizes and the address of the store are checked.
        """
        size = self.nproc * len(agents) if world is None else world

        def newest() -> list[Worker] | None:
            found = []
            for agent in agents:
                fresh = [each for each in agent.workers() if each.pid not in self._seen]
                found += [each for each in fresh if each.world == size and each.round == fresh[-1].round]
            is_one_round = len({(each.round, each.restart, each.master, each.port) for each in found}) == 1
            return found if is_one_round and len(found) == size else None

        workers = sorted(
            self.until(newest, f"{size} new workers on {agents}", timeout), key=lambda each: each.rank
        )
        assert [each.rank for each in workers] == list(range(size)), workers
        assert {each.groups for each in workers} == {len(agents)}, workers
        assert [each.group for each in workers] == sorted(each.group for each in workers), workers
        for agent in agents:
            mine = [each for each in workers if each.host == agent.host.name and agent.host.holds(each.pid)]
            assert mine, f"no worker of this round runs on {agent.host}: {workers}"
        assert restarts is None or {each.restart for each in workers} == {restarts}, workers
        self._seen |= {worker.pid for agent in agents for worker in agent.workers()}
        return workers

    def forget(self) -> None:
        """Make the next :meth:`formed` ignore all workers that have reported so far."""
        for agent in self.agents:
            agent.launched.read_for(0)
            self._seen |= {worker.pid for worker in agent.workers()}

    def line(self, agent: Agent, pattern: str, timeout: float = HANG) -> re.Match[str]:
        """Wait for a line of one agent, in stdout or stderr."""

        def seen() -> re.Match[str] | None:
            whole = f"{agent.launched.stdout}\n{agent.launched.stderr}"
            return re.search(pattern, whole, re.MULTILINE)

        return self.until(seen, f"{pattern!r} from {agent}", timeout)

    def ended(self, *agents: Agent, timeout: float = HANG) -> list[int]:
        """Wait until these agents (by default, all) have exited, and return their exit codes."""
        chosen = agents or tuple(self.agents)
        # `until` raises an error when no agent is running, although all of them may have exited as expected.
        with suppress(AssertionError):
            self.until(
                lambda: True if all(each.launched.has_exited for each in chosen) else None, "ends", timeout
            )
        late = [agent for agent in chosen if not agent.launched.has_exited]
        assert not late, self.story(f"still running after {timeout} s: {late}")
        return [agent.launched.wait() for agent in chosen]

    def tell(self, workers: Iterable[Worker], signum: int) -> None:
        """Send a signal to workers. Ignore workers that have exited."""
        for worker in workers:
            host = next(agent.host for agent in self.agents if agent.host.name == worker.host)
            with suppress(ProcessLookupError):
                host.kill(worker.pid, signum)

    def assert_empty(self, *hosts: Host) -> None:
        """Assert that all processes of the job on these hosts exit by themselves, and reap the orphans."""
        for host in hosts or {agent.host for agent in self.agents}:
            host.wait_empty()
        self.reap()

    def reap(self) -> list[procs.Process]:
        """Reap the processes that a killed agent left behind, which become children of this process."""
        keep = {agent.pid for agent in self.agents}
        # Other programs that the test has started still have namespaces. A process that is exiting no longer
        # has any.
        running = {each.pid for each in procs.children() if network_of(each.pid) is not None}
        return procs.reap_adopted(keep=keep | running)

    def story(self, what: str) -> str:
        """Return a message that contains the output of all agents."""
        parts = [what]
        for agent in self.agents:
            state = f"ended with {agent.launched.wait()}" if agent.launched.has_exited else "running"
            below = [str(each) for each in agent.host.processes()] if state == "running" else []
            parts += [f"=== {agent}: {state}", *below, "--- stdout", agent.launched.stdout]
            parts += ["--- stderr", agent.launched.stderr]
        return "\n".join(parts)
