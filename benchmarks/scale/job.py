"""A job of n agents, from joining to success, and the cost of each phase."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, TypeAlias

from benchmarks.harness import median, percentile
from benchmarks.scale.children import Child

TORCH_LIMIT = 90
IDLE = 3.0

Figures: TypeAlias = dict[str, float]
"""What was measured, by name. Times are milliseconds, memory is megabytes, counts are per agent."""


class Costs(NamedTuple):
    up: float
    down: float
    sent: float
    received: float
    store_cpu: float
    leader_cpu: float
    swarm_cpu: float


class Job:
    """Processes of one job.

    The first agent to join leads; it has a process of its own.

    Args:
        agents: how many.
        processes: how many the others share.
        store: ``own``, ``kept`` (a program that keeps its state on disk) or ``etcd``.
        stack: ends them.
    """

    def __init__(self, agents: int, processes: int, store: str, stack: ExitStack) -> None:
        self.agents = agents
        self.server = stack.enter_context(closing(Child("server", agents=agents, store=store)))
        served = self.server.answer()
        self.server.stands_for(served["pid"])
        self.resident_before = self.server.resident()
        shares = spread(agents - 1, min(processes, agents - 1))
        firsts = [1 + sum(shares[:index]) for index in range(len(shares))]
        common = {"port": served["port"], "agents": agents, "store": store}
        self.swarms = [
            stack.enter_context(closing(Child("swarm", first=first, count=count, **common)))
            for first, count in zip([0, *firsts], [1, *shares], strict=True)
        ]
        self.alive = [1, *shares]
        # Wait until all processes have started and imported their modules.
        self.costs()

    def costs(self) -> Costs:
        counts = together(self.swarms, "counts")
        traffic = self.server.ask("traffic")
        cpu = [sum(child.cpu().values()) for child in (self.server, *self.swarms)]
        up, down = (sum(each[way] for each in counts) for way in ("up", "down"))
        return Costs(up, down, traffic["sent"], traffic["received"], cpu[0], cpu[1], sum(cpu[2:]))

    def stops(self) -> int:
        """Return how often workers have been stopped so far."""
        return sum(each["stops"] for each in together(self.swarms, "counts"))

    def begin_leader(self) -> None:
        """Let the first agent join, and wait until it has joined."""
        self.swarms[0].ask("begin")
        self.swarms[0].ask("await", event="registered", number=0, count=1)

    def stamps(self, event: str, number: int, fewer: int = 0) -> list[int]:
        """Wait until the event has happened to all connected agents, except ``fewer`` agents of the last
        process. Return the sorted times.
        """
        for child, count in zip(self.swarms, self.alive, strict=True):
            missing = fewer if child is self.swarms[-1] else 0
            child.tell("await", event=event, number=number, count=count - missing)
        return sorted(stamp for child in self.swarms for stamp in child.answer())

    def lose(self, place: int, agent: int) -> int:
        """Cut the connection of an agent, and return the time just before."""
        self.alive[place] -= 1
        moment: int = self.swarms[place].ask("cut", agent=agent)
        return moment


def spread(count: int, parts: int) -> list[int]:
    """Divide a number into ``parts`` nearly equal parts."""
    return [count // parts + (index < count % parts) for index in range(parts)]


def together(children: Sequence[Child], do: str, **details: Any) -> list[Any]:
    """Send a command to all children, then read all answers."""
    for child in children:
        child.tell(do, **details)
    return [child.answer() for child in children]


def ms(begin: int, stamps: Iterable[int]) -> float:
    """Return the milliseconds until the last time stamp."""
    return (max(stamps) - begin) / 1e6


def typical(samples: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    names = [name for name in samples[0] if all(name in sample for sample in samples)]
    return {name: median([sample[name] for sample in samples]) for name in names}


def measure(agents: int, processes: int, store: str = "own", idle: float = IDLE) -> Figures:
    """Run two jobs and measure them.

    In the first, all agents but the leader join at once. In the second, all but one have joined, then the
    last one does; then a worker fails, an agent dies, the leader dies, and the rest succeeds.

    Args:
        agents: how many, at least 2.
        processes: that they share.
        store: as for :class:`Job`. With ``etcd`` an agent that "dies" ends its session in order: in one
            process with others it cannot be killed.
        idle: seconds of doing nothing, to measure what that costs.
    """
    values: Figures = {}
    with ExitStack() as stack:
        job = Job(agents, processes, store, stack)
        job.begin_leader()
        before = job.costs()
        began = min(together(job.swarms[1:], "begin"))
        values["form"] = ms(began, job.stamps("started", 1))
        _count(values, "form", job, before)
        values["store memory"] = (job.server.resident() - job.resident_before) / 1e6
    with ExitStack() as stack:
        job = Job(agents, processes, store, stack)
        _join_last(job, values)
        _fail(job, values)
        _idle(job, values, idle)
        if store == "kept":
            _restart_store(job, values)
        number = 2
        if agents > 2:
            number = _lose(job, values, number)
        began = max(together(job.swarms, "done"))
        values["success"] = ms(began, job.stamps("exited", 0))
    return values


def _join_last(job: Job, values: Figures) -> None:
    """Let all agents but one join at once, and then the last one."""
    job.begin_leader()
    for child, count in zip(job.swarms[1:], job.alive[1:], strict=True):
        child.tell("begin_some", number=count - (child is job.swarms[-1]))
    for child in job.swarms[1:]:
        child.answer()
    job.stamps("registered", 0, fewer=1)
    moment = job.swarms[-1].ask("begin", agent=job.alive[-1] - 1)
    values["last join"] = ms(moment, job.stamps("started", 1))


def _fail(job: Job, values: Figures) -> None:
    """Let a worker fail. Its agent notifies the other agents."""
    before = job.costs()
    moment = job.swarms[-1].ask("fail", agent=0)
    stopped = [stamp - moment for stamp in job.stamps("stopped", 1)]
    values["failure: half stopped"] = percentile(stopped, 50) / 1e6
    values["failure: all stopped"] = max(stopped) / 1e6
    values["failure: started"] = ms(moment, job.stamps("started", 2))
    _count(values, "restart", job, before)


def _idle(job: Job, values: Figures, seconds: float) -> None:
    """Measure the costs while only keep-alives are sent."""
    before = job.costs()
    began = time.monotonic()
    time.sleep(seconds)
    after = job.costs()
    values["idle: store cpu"] = (after.store_cpu - before.store_cpu) / (time.monotonic() - began) * 100


def _restart_store(job: Job, values: Figures) -> None:
    """Kill and restart the store. The agents reconnect to it, and no workers are stopped."""
    job.stamps("confirmed", 0)
    stops = job.stops()
    times = job.server.ask("restart")
    found = job.stamps("confirmed", 1)
    values["store restarted: back"] = (times["back"] - times["killed"]) / 1e6
    values["store restarted: all confirmed"] = ms(times["back"], found)
    values["store restarted: workers stopped"] = job.stops() - stops
    job.server.stands_for(times["pid"])


def _lose(job: Job, values: Figures, number: int) -> int:
    """Cut off an agent, and then the leader."""
    moment = job.lose(len(job.swarms) - 1, 0)
    values["loss: all stopped"] = ms(moment, job.stamps("stopped", number))
    values["loss: started"] = ms(moment, job.stamps("started", number + 1))
    moment = job.lose(0, 0)
    values["leader lost: started"] = ms(moment, job.stamps("started", number + 2))
    values["store memory at the end"] = (job.server.resident() - job.resident_before) / 1e6
    return number + 2


def _count(values: Figures, name: str, job: Job, before: Costs) -> None:
    """Add the costs since ``before``: messages and bytes per agent, and total CPU time."""
    spent = Costs(*(now - then for now, then in zip(job.costs(), before, strict=True)))
    for way in ("up", "down", "sent", "received"):
        values[f"{name}: {way}"] = getattr(spent, way) / job.agents
    for part in ("store_cpu", "leader_cpu", "swarm_cpu"):
        values[f"{name}: {part}"] = getattr(spent, part) * 1e3


def measure_torch(agents: int, processes: int, limit: int = TORCH_LIMIT) -> Figures:
    """Measure the same job with torch's handler, as far as torch supports its phases.

    Args:
        agents, processes: as for ours.
        limit: seconds; what takes longer is given as that.
    """
    values: Figures = {}
    with ExitStack() as stack:
        server = stack.enter_context(closing(Child("torch_handler", serve=True)))
        port = server.answer()["port"]
        shares = spread(agents, min(processes, agents))
        children = [
            stack.enter_context(
                closing(Child("torch_handler", agents=count, total=agents, port=port, limit=limit * 2))
            )
            for count in shares
        ]

        def stamps(name: str, timeout: float, fewer: int = 0) -> list[int]:
            for child, count in zip(children, shares, strict=True):
                child.tell("await", name=name, count=count - (fewer if child is children[-1] else 0))
            return [stamp for child in children for stamp in child.answer(timeout)]

        stamps("ready", limit)
        try:
            began = min(together(children, "begin"))
            values["form"] = ms(began, stamps("started 1", limit))
            began = children[-1].ask("fail", agent=0)
            values["failure: all stopped"] = ms(began, stamps("stopped 1", limit, fewer=1))
            values["failure: started"] = ms(began, stamps("started 2", limit))
        except TimeoutError:
            values["gave up after"] = limit * 1e3
            for child in (*children, server):
                child.kill()
    return values
