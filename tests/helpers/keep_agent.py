"""Plays the agent of :class:`elasticrs.Keep`: owns the files, gives orders, runs programs line by line."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.file import KeepFile
from elasticrs._engine.workers.keep_files import KeepFiles

LIMIT = 60
"""Seconds after which a test gives up."""

LOOP = """
import json, os, sys, torch
torch.set_num_threads(1)
from elasticrs import Keep
answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for line in sys.stdin:
    code = json.loads(line)
    try:
        result = eval(compile(code, "<test>", "eval"), globals())
    except SyntaxError:
        result = exec(compile(code, "<test>", "exec"), globals())
    answers.write(json.dumps(result) + "\\n")
"""


class KeepAgent:
    """Owns the files of ``world`` ranks, and the socket to which workers send notices."""

    def __init__(self, world: int = 1) -> None:
        self.world = world
        self.files = KeepFiles(world)
        self.notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notices.bind("")
        self.notices.settimeout(LIMIT)
        self._attempt = 0

    def close(self) -> None:
        self.files.close()
        self.notices.close()

    def file(self, rank: int = 0) -> KeepFile:
        return KeepFile(self.files.places[rank])

    def begin(self, **plan: Any) -> None:
        """Begin an attempt in which all ranks go on from ``step``, copied by rank ``holder``."""
        step, holder = plan.pop("step", None), plan.pop("holder", 0)
        large: dict[str, Any] | None = None
        if step is not None:
            slots = KeepFile(self.files.places[holder]).slots
            number = next(at for at, slot in enumerate(slots) if slot.complete_step == step)
            large = {"slot": number, "sequence": slots[number].sequence}
            large |= {"file": self.files.places[holder], "rank": holder}
        for rank in range(self.world):
            own = [at for at, slot in enumerate(self.file(rank).slots) if slot.complete_step == step]
            made = {
                "attempt": self._attempt,
                "off": None,
                "step": step,
                "exact": True,
                "behind": [],
                "why": "",
                "large": large,
                "own": own[0] if own and step is not None else None,
                "files": self.files.places,
                "kept_by": [holder],
                "ranks": self.world,
                "at_death": True,
                "lost": 0,
                "memory": 1 << 30,
                "grace": 10,
            }
            self.files.begin(rank, {**made, **plan}, step)
        self._attempt += 1

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

    def order(self, name: bytes, rank: int = 0) -> int:
        """Order a worker to copy its state. Return its answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"keep", name)
        words = self.notice()
        while words[:2] == ["keep", "joined"]:  # The pace has changed.
            words = self.notice()
        assert words == ["keep", "answered"]
        return self.file(rank).words[layout.Head.ANSWER]


class Worker:
    """A program that runs the lines that it is given."""

    def __init__(self, agent: KeepAgent, rank: int) -> None:
        names = {
            layout.VARIABLE: agent.files.places[rank],
            "ELASTICRS_NOTICES": agent.notices.getsockname()[1:].decode(),
            "RANK": str(rank),
            "WORLD_SIZE": str(agent.world),
            "OMP_NUM_THREADS": "1",
        }
        answers, end = os.pipe()
        command = [sys.executable, "-c", LOOP, str(end)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **names},
            pass_fds=[end],
            text=True,
            bufsize=1,
        )
        os.close(end)
        self._answers = os.fdopen(answers)

    def send(self, code: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(code) + "\n")

    def run(self, code: str) -> Any:
        """Run code. Return its result."""
        self.send(code)
        assert select.select([self._answers], [], [], LIMIT)[0]
        line = self._answers.readline()
        assert line, self.end()[1]
        return json.loads(line)

    def end(self) -> tuple[int, str]:
        """Let the program end. Return its exit code and standard error."""
        _, said = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, said

    def kill(self) -> tuple[int, str]:
        self.process.kill()
        return self.end()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stderr, self._answers):
            if stream:
                stream.close()
