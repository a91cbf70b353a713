"""Plays the agent of :class:`elasticrs.Keep`: owns the files, gives orders, runs programs line by line."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.file import KeepFile
from elasticrs._engine.inside.keep.layout import Head
from elasticrs._engine.workers.keep_files import KeepFiles
from elasticrs._engine.workers.plan import MemoryFiles
from helpers import procs

LIMIT = 60
"""Seconds after which a test gives up."""

FORKING = """
import atexit, ctypes, gc, json, os, signal, socket, sys, threading, torch
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
torch.set_num_threads(1)
from elasticrs import Keep
import elasticrs._engine.inside.keep.keeper, numpy
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.zeros(1)
torch.optim.AdamW([weight]).step()  # Imports more.
requests = socket.socket(fileno=int(sys.argv[1]))
gc.collect()
gc.freeze()
requests.send(b"ready")
workers = set()
while True:
    message, files, _, _ = socket.recv_fds(requests, 65536, 3)
    if not message:
        os._exit(0)
    names = json.loads(message)
    if isinstance(names, int):
        code = os.waitstatus_to_exitcode(os.waitpid(names, 0)[1])
        workers.discard(names)
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            orphans = {*map(int, file.read().split())} - workers
        for each in orphans:  # A worker that was killed during a copy had a helper, which dies with it.
            os.waitpid(each, 0)
        requests.send(json.dumps(code).encode())
        continue
    pid = os.fork()
    if not pid:
        break
    workers.add(pid)
    for each in files:
        os.close(each)
    requests.send(json.dumps(pid).encode())
requests.close()
os.environ.update(names)
commands, answers, errors = files
os.dup2(errors, 2)
os.close(errors)
answers = os.fdopen(answers, "w", buffering=1)
exit_code, has_whole_end = 0, False
try:
    for line in os.fdopen(commands):
        code = json.loads(line)
        try:
            result = eval(compile(code, "<test>", "eval"), globals())
        except SyntaxError:
            result = exec(compile(code, "<test>", "exec"), globals())
        answers.write(json.dumps(result, default=repr) + "\\n")
except BaseException:
    sys.excepthook(*sys.exc_info())
    exit_code = 1
if has_whole_end:
    gc.unfreeze()
    sys.exit(exit_code)
# Do what the interpreter does first at its end. The rest, for all objects of torch, takes a second.
threading._shutdown()
atexit._run_exitfuncs()
os._exit(exit_code)
"""
"""Program that imports torch once, and forks workers, which run the lines that they are given."""


MODEL = """
import random, numpy as np
torch.manual_seed(3); random.seed(4); np.random.seed(5)
net = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
keep = Keep(net=net, optimizer=optimizer, scheduler=scheduler, every=EVERY, replicated=REPLICATED)
def forward():
    noise = random.random() + np.random.rand()
    return (net(torch.randn(8, 200)) + noise).square().mean()
def train(step, until="end"):
    optimizer.zero_grad(); forward().backward()
    if until == "backward": return
    optimizer.step(); scheduler.step(); keep.values["seen"] = 8 * step
    if until == "end": keep.step(step)
def picture():
    import hashlib
    found = hashlib.sha256()
    for each in (*net.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())):
        found.update(each.resolve_neg().numpy().tobytes())
    more = [scheduler.last_epoch, optimizer.param_groups[0]["lr"], torch.rand(1).item(), random.random()]
    return [found.hexdigest(), *more, np.random.rand(), keep.values.get("seen")]
"""


def model(every: int = 0, replicated: str | bool = "auto") -> str:
    return MODEL.replace("EVERY", str(every)).replace("REPLICATED", repr(replicated))


class Programs:
    """Starts workers. They are forks of one process, because the import of torch takes seconds."""

    def __init__(self) -> None:
        self._socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(2 * LIMIT)
        command = [sys.executable, "-c", FORKING, str(end.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL)
        procs.bystanders.add(self._process.pid)
        end.close()
        assert self._socket.recv(64) == b"ready"
        self._socket.settimeout(LIMIT)

    def start(self, names: dict[str, str], files: list[int]) -> int:
        """Start a worker with variables, and files for commands, answers and errors. Return its pid."""
        socket.send_fds(self._socket, [json.dumps(names).encode()], files)
        pid: int = json.loads(self._socket.recv(64))
        return pid

    def wait(self, pid: int) -> int:
        """Wait for the end of a worker. Return its exit code."""
        self._socket.send(json.dumps(pid).encode())
        code: int = json.loads(self._socket.recv(64))
        return code

    def close(self) -> None:
        self._socket.close()
        self._process.wait(LIMIT)
        procs.bystanders.discard(self._process.pid)


@contextmanager
def keep_files(workers: int) -> Iterator[KeepFiles]:
    """Make the files for copies of the training state, as an agent prepares them for the first attempt."""
    with closing(MemoryFiles(workers)) as memory:
        files = KeepFiles(memory)
        files.begin({}, {}, None)
        yield files


class KeepAgent:
    """Owns the files of ``world`` ranks, and the socket to which workers send notices."""

    def __init__(self, programs: Programs, world: int = 1) -> None:
        self.programs, self.world = programs, world
        self.files = KeepFiles(MemoryFiles(world))
        self.files.begin({}, {}, None)
        self.notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notices.bind("")
        self.notices.settimeout(LIMIT)
        self._attempt = 0

    def close(self) -> None:
        self.files.memory.close()
        self.notices.close()

    def file(self, rank: int = 0) -> KeepFile:
        return KeepFile(self.files.places[rank])

    def begin(self, **plan: Any) -> None:
        """Begin an attempt in which all ranks go on from ``step``, copied by rank ``holder``. With
        ``readable`` (step and number of ranks), they find only the reader of their copies.
        """
        step, holder = plan.pop("step", None), plan.pop("holder", 0)
        large: dict[str, Any] | None = None
        if step is not None:
            number, sequence = self._slot(self.files.places[holder], step)
            large = {"slot": number, "sequence": sequence}
            large |= {"file": self.files.places[holder], "rank": holder}
        newest = step
        if readable := plan.pop("readable", None):
            newest, ranks = readable
            copies = [[place, *self._slot(place, newest)] for place in self.files.places[:ranks]]
            plan["reader"] = {"step": newest, "copies": copies}
        own: dict[int, dict[str, Any]] = {}
        for rank in range(self.world):
            slots = [at for at, slot in enumerate(self.file(rank).slots) if slot.complete_step == step]
            made = {
                "attempt": self._attempt,
                "rank": str(rank),
                "world": str(self.world),
                "local_world": str(self.world),
                "run_id": "a",
                "off": None,
                "has_time": False,
                "step": step,
                "exact": True,
                "behind": [],
                "why": "",
                "large": large,
                "own": slots[0] if slots and step is not None else None,
                "files": self.files.places,
                "kept_by": [holder],
                "ranks": self.world,
                "at_death": 1,
                "lost": 0,
                "fallback": self._fallback(step),
                "readable": None,
                "memory": 1 << 30,
                "grace": 10,
            }
            own[rank] = {**made, **plan}
        self.files.begin({}, own, newest)
        self._attempt += 1

    def _fallback(self, step: int | None) -> int | None:
        """Return the newest step before ``step`` of which each rank has a copy."""
        steps = set.intersection(*(self.file(rank).copied_steps() for rank in range(self.world)))
        return max((each for each in steps if step is not None and each < step), default=None)

    def _slot(self, place: str, step: int) -> tuple[int, int]:
        """Return number and sequence of the slot with a step."""
        file = KeepFile(place)
        slots, steps = file.slots, [slot.complete_step for slot in file.slots]
        assert step in steps, f"the file has the steps {steps}, and the head {list(file.words[: Head.COUNT])}"
        number = steps.index(step)
        return number, slots[number].sequence

    @contextmanager
    def worker(self, rank: int = 0, preamble: str = "") -> Iterator["Worker"]:
        worker = Worker(self, rank)
        try:
            if preamble:
                worker.run(preamble)
            yield worker
        finally:
            worker.close()

    def notice(self) -> list[str]:
        """Return the words of the next notice."""
        return self.notices.recv(4096).decode().split()

    def joined(self) -> bytes:
        """Wait until a worker has joined. Return the name of its socket."""
        words = self.notice()
        assert words[:2] == ["keep", "joined"], words
        return b"\0" + bytes.fromhex(words[2])

    def send(self, name: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"keep", name)

    def order(self, name: bytes, rank: int = 0) -> int:
        """Order a worker to copy its state. Return its answer."""
        self.send(name)
        words = self.notice()
        while words[:2] == ["keep", "joined"]:  # The pace has changed.
            words = self.notice()
        assert words == ["keep", "answered"], words
        return self.file(rank).words[layout.Head.ANSWER]


def step_of(agent: KeepAgent, rank: int = 0) -> int | None:
    """Return the newest step of which there is a complete copy."""
    with closing(agent.file(rank)) as file:
        return max(
            (each.complete_step for each in file.slots if each.complete_step is not None), default=None
        )


class Worker:
    """A program that runs the lines that it is given."""

    def __init__(self, agent: KeepAgent, rank: int) -> None:
        names = {
            layout.VARIABLE: agent.files.places[rank],
            "ELASTICRS_NOTICES": agent.notices.getsockname()[1:].decode(),
            "RANK": str(rank),
            "WORLD_SIZE": str(agent.world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(agent.world),
            "TORCHELASTIC_RUN_ID": "a",
        }
        self._programs = agent.programs
        self._code: int | None = None
        pipes = [os.pipe() for _ in range(3)]
        (commands, self._to), (self._from, answers), (self._errors, errors) = pipes
        self.pid = self._programs.start(names, [commands, answers, errors])
        for each in (commands, answers, errors):
            os.close(each)
        self._answers = os.fdopen(self._from)
        self._commands = os.fdopen(self._to, "w", buffering=1)
        self._said = os.fdopen(self._errors)

    def send(self, code: str) -> None:
        self._commands.write(json.dumps(code) + "\n")

    def run(self, code: str) -> Any:
        """Run code. Return its result."""
        self.send(code)
        return self.answer()

    def answer(self) -> Any:
        """Return the result of the code that was sent."""
        assert select.select([self._answers], [], [], LIMIT)[0]
        line = self._answers.readline()
        assert line, self.end()[1]
        return json.loads(line)

    def end(self) -> tuple[int, str]:
        """Let the program end. Return its exit code and standard error."""
        self._commands.close()
        said = self._said.read()
        self._code = self._programs.wait(self.pid)
        return self._code, said

    def kill(self) -> tuple[int, str]:
        os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def close(self) -> None:
        if self._code is None:
            self.kill()
        self._answers.close()
        self._said.close()


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Yield the process that has imported torch, and forks the workers of all tests."""
    with closing(Programs()) as made:
        yield made


@pytest.fixture
def agent(programs: Programs) -> Iterator[KeepAgent]:
    """Yield an agent with one worker."""
    with closing(KeepAgent(programs)) as made:
        yield made
