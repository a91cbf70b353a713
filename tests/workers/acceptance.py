"""A trainer for the acceptance tests. It calls `train` to add up all samples.

The order says what goes wrong: ``faults`` is a list of ``{"at": step, "do": what, "times": how often}``.
"""

import json
import os
import select
import signal
import socket
import threading

import torch
import torch.distributed as dist

from elasticrs.train import (
    AgentCoordinator,
    NonRetryableException,
    SimpleWorkerStats,
    State,
    p2p,
    running,
    train,
)
from elasticrs.train.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager
from elasticrs.train.data import Shares
from elasticrs.train.distributed import all_gather_return_max_long, broadcast_binary


class Total(State):
    """The sum and the number of the samples processed so far, the number of steps, and weights that are
    incremented in each step.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.size, self.batch = trainer.order.get("size", 400), trainer.order.get("batch", 5)
        self.steps = self.taken = self.total = 0
        self.weights = torch.zeros(trainer.order.get("weights", 0), dtype=torch.long)
        self.shares = None

    def sync(self, world_size, rank):
        self.trainer.fault("sync", self.steps)
        best, _ = all_gather_return_max_long(self.steps)
        mine = torch.cat((torch.tensor([self.steps, self.taken, self.total]), self.weights))
        packed = broadcast_binary(mine.view(torch.uint8), best).clone().view(torch.long)
        self.steps, self.taken, self.total = packed[:3].tolist()
        self.weights = packed[3:]
        self.trainer.met(world_size, rank, self.steps)
        if self.trainer.order.get("subgroup"):
            self.trainer.group = dist.new_group()
        shuffle = self.trainer.order.get("shuffle", True)
        self.shares = Shares(self.size, self.batch, world_size, rank, self.taken, shuffle=shuffle)

    def capture_snapshot(self):
        if self.trainer.order.get("rollback", True):
            return self.steps, self.taken, self.total, self.weights
        return None

    def apply_snapshot(self, snapshot):
        self.steps, self.taken, self.total, self.weights = snapshot

    def state_dict(self):
        return self.steps, self.taken, self.total, self.weights

    def load_state_dict(self, state_dict):
        self.steps, self.taken, self.total, self.weights = state_dict

    def save(self, stream):
        self.trainer.fault("save", self.steps)
        super().save(stream)

    def should_save_checkpoint(self, rank):
        if rank > 0:
            self.trainer.fault("due", self.steps)
        return bool(self.trainer.order.get("checkpoints")) and rank in self.trainer.order.get(
            "savers", range(9)
        )


class PlainTotal(Total):
    """A state whose checkpoints can be read without torch."""

    def save(self, stream):
        self.trainer.fault("save", self.steps)
        stream.write(json.dumps([self.steps, self.taken, self.total]).encode())

    def load(self, stream):
        self.load_state_dict((*json.load(stream), self.weights))


class Trainer:
    """A training process that the test controls through ``order``."""

    def __init__(self, order, say):
        self.order = order
        self._say = say
        self.done = []
        self.straggles = self.is_slow = False
        self.child = self.group = None
        kind = p2p.CoordinatorP2P if "url" in order else AgentCoordinator
        if order.get("always"):
            kind = type("MeetsAlways", (MeetsAlways, kind), {})
        elif order.get("reads_late"):
            kind = type("ReadsLate", (ReadsLate, kind), {})
        where = (order["url"], 64) if "url" in order else ()
        timeouts = order.get("timeout", 10000), order.get("control_timeout", 60000)
        self.coordinator = kind(order.get("backend", "gloo"), *where, *timeouts)

    def say(self, what, **more):
        self._say(self.order["name"], what, **more)

    def met(self, world, rank, step):
        self.has_stepped = False
        env = [os.environ["RANK"], os.environ["WORLD_SIZE"]]
        self.say("met", world=world, rank=rank, step=step, round=self.coordinator.rounds_before + 1, env=env)

    def fault(self, where, step):
        for each in self.order.get("faults", ()):
            if each.get("in", "step") == where and each["at"] <= step and each.get("times", 1) > 0:
                if "once" in each and not is_first(each["once"]):
                    continue
                each["times"] = each.get("times", 1) - 1
                self.say("does", do=each["do"], step=step)
                getattr(self, each["do"])()

    def retryable(self):
        raise RuntimeError("on purpose")

    def words_of_gloo(self):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] on purpose")

    def fatal(self):
        raise NameError("on purpose")

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def spin(self):
        while True:
            pass

    def fork(self):
        self.child = os.fork()
        if self.child == 0:
            self.order["name"] += " forked"

    def fork_sleeper(self):
        pid = os.fork()
        while pid == 0:
            signal.pause()
        self.say("forked", child=pid)

    def hold(self):
        signal.pause()

    def keep(self):
        while not os.path.exists(self.order["kept_until"]):
            select.select([], [], [], 0.01)

    def step(self, state):
        order = self.order
        if state.steps >= order.get("own_end", 1 << 30) or os.path.exists(order.get("end_when", "")):
            raise StopIteration
        is_slow = self.coordinator.is_worker_straggler
        if is_slow and not self.is_slow:
            self.say("straggles")
        self.is_slow = is_slow
        self.straggles = self.straggles or is_slow
        mine = next(state.shares)
        self.fault("step", state.steps)
        if not os.path.exists(order.get("slow_until", "/")):
            select.select([], [], [], order.get("pause", 0.05))
        total = torch.tensor(sum(mine))
        dist.all_reduce(total, group=self.group)
        ones = torch.ones_like(state.weights)
        dist.all_reduce(ones, group=self.group)
        # Change the state only after the last collective of the step, so that a failed step leaves it
        # unchanged.
        state.weights = state.weights + ones // dist.get_world_size()
        state.total += int(total)
        state.taken = state.shares.after(state.taken)
        state.steps += 1
        self.done.append(state.steps)
        if not self.has_stepped:
            self.has_stepped = True
            self.say("stepped", step=state.steps)
        return state, SimpleWorkerStats(order["rate"]) if "rate" in order else None


def disturb_creation(trainer):
    """Make the creation of the next group wait forever, or open a connection first that another thread
    serves.
    """
    create = dist.init_process_group

    def echo(connection):
        while data := connection.recv(100):
            connection.sendall(data)

    def creates(*arguments, **options):
        dist.init_process_group = create
        trainer.say("creates")
        port = trainer.order["holds"]
        while port is None:
            signal.pause()
        connection = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=echo, args=(connection,), daemon=True).start()
        return create(*arguments, **options)

    dist.init_process_group = creates


def is_first(path):
    """Return true for the first of all trainers that calls this function with ``path``."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class MeetsAlways:
    """Mixin for a coordinator that starts a new rendezvous after every step."""

    def should_rendezvous(self, state):
        super().should_rendezvous(state)
        return True


class ReadsLate:
    """Mixin for a coordinator that reads the other ranks' values late. Rank 0 does not, because it serves the
    store.
    """

    def _gather(self, own):
        store = self._store
        self._store = store if self.rank == 0 or store is None else LateReader(store)
        try:
            return super()._gather(own)
        finally:
            self._store = store


class LateReader:
    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def multi_get(self, keys):
        select.select([], [], [], 0.3)
        return self._store.multi_get(keys)


def run(order, say):
    trainer = Trainer(order, say)
    if order.get("checkpoints"):
        set_checkpoint_manager(FileSystemCheckpointManager(order["checkpoints"]))
    if "meeting_limit" in order:
        running.MEETING_LIMIT = order["meeting_limit"]
    if order.get("monitor"):
        p2p.CoordinatorP2P.MONITOR_PROGRESS_FREQ = order["monitor"]
    state = (PlainTotal if order.get("plain") else Total)(trainer)
    trainer.fault("begin", 0)
    if "holds" in order:
        disturb_creation(trainer)
    try:
        train(trainer.coordinator, trainer.step, state, max_failures=order.get("max_failures"))
        if order.get("twice"):
            train(Trainer(order, say).coordinator, trainer.step, Total(trainer))
    except NonRetryableException as error:
        trainer.say("stuck", error=str(error))
        raise
    except RuntimeError as error:
        trainer.say("gave up", error=str(error))
        raise
    if trainer.child:
        os.waitpid(trainer.child, 0)
    trainer.say(
        "finished",
        steps=state.steps,
        taken=state.taken,
        total=state.total,
        weights=sorted(set(state.weights.tolist())),
        done=trainer.done[-1000:],
        straggler=trainer.straggles,
        env=[os.environ["RANK"], os.environ["WORLD_SIZE"]],
        threads=[thread.name for thread in threading.enumerate()],
        relative_rate=getattr(trainer.coordinator, "last_relative_prog_rate", None),
    )
    while not os.path.exists(order.get("stays_until", "/")):
        select.select([], [], [], 0.01)
