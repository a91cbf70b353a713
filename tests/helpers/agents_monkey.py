"""A chaos monkey for the agents of a job on this machine: it sends signals, cuts connections, starts agents,
and checks the results.

Everything that it does follows from a seed, but for the moments at which the job has come so far.
"""

import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from helpers import ports, procs
from helpers.coordination import store_command
from helpers.etcd import Etcd
from helpers.etcd_fixtures import Site
from helpers.launcher import LAUNCHERS, clean_environment
from helpers.relay import TcpRelay

WORKER = Path(__file__).resolve().parent.parent / "workers" / "monkey.py"

BOUND = 25.0
"""Seconds after the last act within which all have ended: a bit more than all timeouts of `CONF` in a row."""

CONF = {
    "keep_alive_interval": 0.2,
    "keep_alive_max_attempt": 3,
    "settle": 2,
    "join_timeout": 4,
    "last_call_timeout": 0.3,
    "scale_up_delay": 0.2,
    "store_lost_timeout": 2,
    "close_timeout": 3,
    "max_short_losses": 1000,
}
ETCD_CONF = {
    **{key: value for key, value in CONF.items() if not key.startswith("keep_alive")},
    "lease_ttl": 2,
    "settle": 3,
    "store_lost_timeout": 6,
}
"""Where nodes meet in etcd; agents wait longer for a cluster without a leader than for a store of ours."""

GRACE, BARRIER = 0.5, 3

NONSENSE = re.compile(
    rf'Traceback .*\n  File "(?!{re.escape(str(WORKER))})|panicked|^\w*Error:|\bassert\b', re.MULTILINE
)
"""What no agent ever says; a worker may be interrupted while it starts."""


class Record(dict[str, str]):
    """The fields that a worker or its daemon reported about itself."""

    @property
    def pid(self) -> int:
        return int(self["pid"])

    @property
    def is_alive(self) -> bool:
        found = procs.process(self.pid)
        return found is not None and str(found.started) == self["started"] and found.state not in "ZX"


class Agent:
    """A launcher process and the file with its output."""

    def __init__(self, name: str, argv: list[str], folder: Path, env: dict[str, str]) -> None:
        self.name, self.out = name, folder / f"{name}.out"
        self.is_through_relay = self.is_odd = self.is_killed = self.is_asked = False
        with self.out.open("wb") as out:
            self.popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                cwd=folder,
                start_new_session=True,
            )
        self.pid = self.popen.pid

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def nursery(self) -> int | None:
        # `procs.nurseries` recognizes a nursery by its command line.
        return next((each.pid for each in procs.nurseries(self.pid)), None)

    def text(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace")


class Game:
    """One job with random faults, from its start to the check of its outcome."""

    def __init__(self, folder: Path, seed: int, etcd: Site | None = None) -> None:
        self.folder, self.seed, self.chance = folder, seed, random.Random(seed)
        self.etcd = etcd
        self.ledger, self.done = folder / "ledger", folder / "done"
        self.ledger.touch()
        self.story: list[str] = []
        self.complaints: list[str] = []
        self.agents: list[Agent] = []
        self.relays: list[TcpRelay] = []
        self.records: list[Record] = []
        self.exits: dict[int, int] = {}
        self._read = 0
        chance = self.chance
        self.nproc, self.max_restarts = chance.choice((1, 1, 2)), chance.randint(0, 3)
        self.most = chance.randint(2, 4)
        self.least = chance.randint(1, self.most)
        self.is_host_hit = self.is_settle_beaten = False
        self.port = ports.free()
        self.store: subprocess.Popen[bytes] | None = None
        self.began = time.monotonic()
        self.tell(f"min {self.least} max {self.most} nproc {self.nproc} max_restarts {self.max_restarts}")

    def tell(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self.began:6.2f} {what}")

    def complain(self, what: str) -> None:
        if what not in self.complaints:
            self.complaints.append(what)
            self.tell(f"!!! {what}")

    # --- starting ---

    def start(self, relayed: bool = False, odd: bool = False) -> Agent:
        name = f"a{len(self.agents)}"
        has_store = self.etcd or self.store or self.host()
        if any(each.popen.poll() is not None for each in self.agents) and not has_store:
            # The previous job may be over, so this agent may start a new one.
            self.is_host_hit = True
        backend, endpoint, conf = self.meeting_place(relayed)
        restarts = self.max_restarts + 1 if odd else self.max_restarts
        nproc = self.nproc if self.chance.random() < 0.9 else 3 - self.nproc
        argv = [
            *LAUNCHERS["elasticrs"],
            *("--nnodes", f"{self.least}:{self.most}", "--nproc-per-node", str(nproc)),
            *("--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "monkey"),
            *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())),
            *("--max-restarts", str(restarts), "--shutdown-timeout", str(GRACE)),
            *("--exit-barrier-timeout", str(BARRIER), "--linger", "0.2", "--no-python"),
            *(sys.executable, "-I", "-S", str(WORKER)),
        ]
        env = clean_environment(
            {
                "AGENT": name,
                "SEED": str(self.seed),
                "LEDGER": str(self.ledger),
                "DONE": str(self.done),
                "TMPDIR": str(self.folder),
                "PYTHONUNBUFFERED": "1",
            }
        )
        agent = Agent(name, argv, self.folder, env)
        agent.is_through_relay, agent.is_odd = relayed, odd
        self.agents.append(agent)
        self.tell(f"start {name} pid {agent.pid}{' relayed' * relayed}{' odd' * odd} nproc {nproc}")
        return agent

    def meeting_place(self, relayed: bool) -> tuple[str, str, dict[str, object]]:
        """Return the rendezvous backend, its endpoint and its settings."""
        port = self.relay() if relayed else self.port
        if self.etcd is not None:
            endpoint = f"127.0.0.1:{port}" if relayed else self.etcd.endpoint
            return "etcd", endpoint, {**ETCD_CONF, "etcd_prefix": self.etcd.prefix}
        no_host = {"is_host": 0} if relayed or self.store is not None else {}
        return "c10d", f"127.0.0.1:{port}", {**CONF, **no_host}

    def start_store(self) -> None:
        """Start a separate store, to which all agents connect as clients."""
        with (self.folder / "store.out").open("ab") as out:
            command = store_command(port=self.port)
            self.store = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.tell(f"store {self.store.pid}")
        while not ports.listens(self.store.pid, self.port) and self.store.poll() is None:
            select.select([], [], [], 0.005)  # only /proc shows when the store listens

    def act_store(self) -> None:
        if self.etcd is not None:
            self.act_members(self.etcd.server)
        if self.store is None:
            return
        self.is_host_hit = True
        if self.chance.random() < 0.5:
            self.hit(self.store.pid, signal.SIGSTOP, "store")
            self.wait(self.chance.choice((0.1, 0.5, 0.7, 1.5)))
            self.hit(self.store.pid, signal.SIGCONT, "store")
            return
        self.hit(self.store.pid, self.chance.choice((signal.SIGKILL, signal.SIGTERM)), "store")
        self.store.wait()
        self.wait(self.chance.choice((0, 0.5, 1.5, 3)))
        self.start_store()

    def act_members(self, cluster: Etcd) -> None:
        """Kill or pause one or two of the three members. With two of them down, the job has no store for a
        while.
        """
        hit = self.chance.sample(range(cluster.size), self.chance.choice((1, 1, 2)))
        self.is_host_hit |= len(hit) > 1
        for index in hit:
            is_kill = self.chance.random() < 0.5
            self.tell(f"{'SIGKILL' if is_kill else 'SIGSTOP'} to member {index}")
            (cluster.kill if is_kill else cluster.stop)(index)
        self.wait(self.chance.choice((0, 0.5, 1.5, 3)))
        for index in hit:
            cluster.bring_back(index)
        self.tell(f"members {hit} are back")

    def relay(self) -> int:
        port = self.port if self.etcd is None else self.etcd.server.members[0].port
        self.relays.append(TcpRelay(("127.0.0.1", port)))
        return self.relays[-1].port

    # --- looking ---

    def look(self) -> None:
        """Read and check the new lines of the ledger, while the processes that they name may still be
        running.
        """
        data = self.ledger.read_bytes()
        new, self._read = data[self._read :], len(data)
        if new and not new.endswith(b"\n"):
            cut = new.rfind(b"\n") + 1
            self._read -= len(new) - cut
            new = new[:cut]
        for line in new.decode().splitlines():
            word, *fields = line.split()
            record = Record(field.split("=", 1) for field in fields)
            if word == "EXIT":
                self.exits[record.pid] = int(record["code"])
                continue
            record["word"] = word
            if word == "BEGIN":
                self._judge(record)
            self.records.append(record)

    def _judge(self, new: Record) -> None:
        # Each worker reports its maximum: an agent with a different --max-restarts is refused, unless it is
        # the job's first agent.
        if int(new["restart"]) > int(new["max"]):
            self.complain(f"restart {new['restart']} of {new['max']}: {new}")
        for old in self.records:
            if old["word"] != "BEGIN":
                if old["agent"] == new["agent"] and old["round"] != new["round"] and old.is_alive:
                    self.complain(f"daemon of an old round lives: {dict(old)}; new {dict(new)}")
                continue
            same_round = old["round"] == new["round"]
            if same_round and not self.is_host_hit and old["restart"] != new["restart"]:
                self.complain(f"restart counts differ in one round: {dict(old)} {dict(new)}")
            if not old.is_alive:
                continue
            if old["agent"] == new["agent"] and not same_round:
                self.complain(f"two rounds at once on one node: {dict(old)} {dict(new)}")
            elif same_round and old["rank"] == new["rank"]:
                self.complain(f"one rank twice in a round: {dict(old)} {dict(new)}")
            elif not same_round and not self.is_settle_beaten:
                self.complain(f"two rounds at once on the job: {dict(old)} {dict(new)}")

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            select.select([], [], [], min(left, 0.01))  # wake up often, to act at random times

    # --- acts ---

    def living(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.is_running]

    def workers(self, agent: Agent | None = None) -> list[Record]:
        return [
            each
            for each in self.records
            if each["word"] == "BEGIN" and (agent is None or each["agent"] == agent.name) and each.is_alive
        ]

    def hit(self, pid: int, signum: int, what: str) -> None:
        self.tell(f"{signal.Signals(signum).name} to {what} {pid}")
        with suppress(ProcessLookupError):
            os.kill(pid, signum)

    def act_worker(self) -> None:
        if workers := self.workers():
            victim = self.chance.choice(workers)
            signum = self.chance.choice(
                (
                    signal.SIGKILL,
                    signal.SIGSEGV,
                    signal.SIGUSR1,
                    signal.SIGUSR2,
                    signal.SIGSTOP,
                    signal.SIGTERM,
                )
            )
            self.hit(victim.pid, signum, f"worker of {victim['agent']}")

    def act_all_workers(self) -> None:
        for worker in self.workers():
            self.hit(worker.pid, signal.SIGKILL, f"worker of {worker['agent']}")

    def host(self) -> Agent | None:
        return next((agent for agent in self.living() if self.is_host(agent)), None)

    def is_host(self, agent: Agent) -> bool:
        return ports.listens(agent.pid, self.port)

    def act_agent(self) -> None:
        agent = self.pick(0.25)
        if agent is None:
            return
        is_host = self.is_host(agent)
        self.is_host_hit |= is_host
        signum = self.chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        agent.is_killed |= signum == signal.SIGKILL
        agent.is_asked |= signum != signal.SIGKILL
        for _ in range(self.chance.choice((1, 1, 2))):
            self.hit(agent.pid, signum, f"agent {agent.name}{' (host)' * is_host}")
            self.wait(self.chance.choice((0, 0.02, 0.2)))

    def pick(self, host: float) -> Agent | None:
        living = self.living()
        agent = self.chance.choice(living) if living else None
        if agent is not None and self.is_host(agent) and self.chance.random() > host:
            return None
        return agent

    def act_nursery(self) -> None:
        agent = self.pick(0.3)
        if agent is None or (nursery := agent.nursery()) is None:
            return
        self.is_host_hit |= self.is_host(agent)
        agent.is_killed = True
        if self.chance.random() < 0.3:
            self.hit(nursery, signal.SIGSTOP, f"nursery of {agent.name}")
            self.hit(agent.pid, signal.SIGKILL, f"agent {agent.name}")
            self.hit(nursery, signal.SIGKILL, f"nursery of {agent.name}")
        else:
            self.hit(nursery, signal.SIGKILL, f"nursery of {agent.name}")

    def act_stop(self) -> None:
        agent = self.pick(0.3)
        if agent is None:
            return
        targets = [("agent", agent.pid)]
        nursery = agent.nursery()
        if nursery is not None and self.chance.random() < 0.4:
            targets = self.chance.choice(([("nursery", nursery)], [("nursery", nursery), *targets]))
            self.is_settle_beaten = True
        if self.is_host(agent):
            self.is_host_hit = True
        for name, pid in targets:
            self.hit(pid, signal.SIGSTOP, f"{name} of {agent.name}")
        self.wait(self.chance.choice((0.05, 0.3, 0.5, 0.7, 1.0, 3.0)))
        self.chance.shuffle(targets)
        for name, pid in targets:
            self.hit(pid, signal.SIGCONT, f"{name} of {agent.name}")

    def act_start(self) -> None:
        if len(self.living()) < 6:
            self.start(relayed=self.chance.random() < 0.3, odd=self.chance.random() < 0.1)

    def act_relay(self) -> None:
        if not self.relays:
            return
        relay = self.chance.choice(self.relays)
        if self.chance.random() < 0.6:
            self.tell(f"reset of {relay.reset()} connections")
            return
        way = self.chance.choice((("up",), ("down",), ("up", "down")))
        self.tell(f"stall {way}")
        relay.set(**{f"is_stalled_{each}": True for each in way})
        self.wait(self.chance.choice((0.1, 0.5, 0.7, 2.0)))
        self.tell("stall over")
        relay.resume()

    def play(self) -> None:
        chance = self.chance
        if self.etcd is None and chance.random() < 0.3:
            self.start_store()
        for _ in range(chance.randint(self.least, self.most + 1)):
            self.start(relayed=bool(self.agents) and chance.random() < 0.25)
            self.wait(chance.choice((0, 0, 0.02, 0.2)))
        self.wait(chance.choice((0.1, 0.5, 1.0)))
        acts = [self.act_worker, self.act_all_workers, self.act_agent, self.act_nursery]
        acts += [self.act_stop, self.act_start, self.act_relay, self.act_store]
        for _ in range(chance.randint(1, 10)):
            chance.choices(acts, (6, 1, 3, 2, 3, 3, 2, 2))[0]()
            self.wait(chance.choice((0, 0.01, 0.05, 0.3, 1.0)))

    # --- the end ---

    def finish(self) -> None:
        for agent in self.living():
            for each in [*procs.descendants(agent.pid), procs.process(agent.pid)]:
                if each is not None and each.state == "T":
                    self.hit(each.pid, signal.SIGCONT, f"{each.command[-30:]} of {agent.name}")
        self.done.touch()
        self.tell("done")
        deadline = time.monotonic() + BOUND
        while self.living() and time.monotonic() < deadline:
            for worker in self.workers():
                found = procs.process(worker.pid)
                if found is not None and found.state == "T":
                    self.hit(worker.pid, signal.SIGCONT, "late stopped worker")
            self.wait(0.05)
        self.tell("all ended" if not self.living() else "not all ended")
        for agent in self.living():
            self.complain(f"{agent.name} (pid {agent.pid}) has not ended {BOUND} s after the last act")
            for each in procs.descendants(agent.pid):
                self.tell(f"   below: {each}")
        self._wait_empty()
        self._judge_ends()

    def _wait_empty(self) -> None:
        deadline = time.monotonic() + 2
        while (
            left := [dict(each) for each in self.records if each.is_alive]
        ) and time.monotonic() < deadline:
            self.wait(0.02)
        unswept = {agent.name for agent in self.agents if agent.is_killed}
        for each in left:
            # Daemons survive if both the agent and the nursery are killed. Only a cgroup could prevent that.
            if not (each["word"] == "DAEMON" and each["agent"] in unswept):
                self.complain(f"left behind: {each}")

    def _judge_ends(self) -> None:
        rounds = [int(each["round"]) for each in self.records]
        last = max(rounds, default=0)
        causes: dict[str, list[str]] = {}
        for agent in self.agents:
            code, text = agent.popen.poll(), agent.text()
            self.tell(f"{agent.name} ended with {code}")
            # Skip agents that got a stop signal, because the interpreter prints a traceback if a signal
            # interrupts its start.
            if not agent.is_asked and (found := NONSENSE.search(text)):
                self.complain(f"{agent.name} prints {found[0]!r}")
            if code == 0:
                mine = [
                    each for each in self.records if each["agent"] == agent.name and each["word"] == "BEGIN"
                ]
                newest = max((int(each["round"]) for each in mine), default=0)
                ran = [each for each in mine if int(each["round"]) == newest == last]
                bad_ends = [dict(each) for each in ran if self.exits.get(each.pid) != 0]
                if bad_ends:
                    self.complain(f"{agent.name} ended with 0, but not so its workers {bad_ends}")
            elif code == 1:
                # The signal may arrive before the agent has printed anything.
                if not agent.is_asked and not re.search(r"^elasticrs\[|FAILED", text, re.MULTILINE):
                    self.complain(f"{agent.name} failed without a word")
                found = re.search(
                    r"rank +: (\d+) .*?pid: (\d+)\)", text.rpartition("Root Cause")[2], re.DOTALL
                )
                if found and "no restart is left" in text:
                    causes.setdefault(" ".join(found.groups()), []).append(agent.name)
                elif "no restart is left" in text:
                    self.complain(f"{agent.name} names no cause")
            elif code is not None and not (agent.is_asked and code < 0) and not agent.is_killed:
                self.complain(f"{agent.name} ended with {code}")
        # If an agent starts just after the job and its store are gone, it starts a new job.
        begun = re.findall(r"^BEGIN .* agent=(\w+) round=1 rank=0 ", self.ledger.read_text(), re.MULTILINE)
        if len(causes) > 1 and not self.is_host_hit and len(begun) < 2:
            self.complain(f"different first causes: {causes}")

    def clear(self) -> None:
        for agent in self.living():
            agent.popen.kill()
            agent.popen.wait()
        for each in self.records:
            if each.is_alive:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
        for relay in self.relays:
            relay.close()
        if self.store is not None:
            self.store.kill()
            self.store.wait()
        left = procs.reap_adopted(keep={agent.pid for agent in self.agents}, timeout=5)
        self.tell(f"adopted: {[str(each) for each in left]}")

    def report(self) -> str:
        parts = [f"seed {self.seed}", *self.story, "--- ledger", self.ledger.read_text()]
        for agent in self.agents:
            parts += [f"=== {agent.name}: {agent.popen.poll()}", agent.text()]
        return "\n".join([*parts, *self.complaints])


def play(folder: Path, seed: int, etcd: Site | None = None) -> Game:
    """Run one job with random faults. The returned game lists what went wrong in ``complaints``."""
    procs.become_subreaper()
    game = Game(folder, seed, etcd)
    try:
        game.play()
        game.finish()
    finally:
        game.clear()
    return game
