"""A process that has imported torch and forks trainers; see `helpers/trainers.py`.

Takes one JSON object per line: {"name", "url", "loop", ...}; trainers tell theirs on stdout.
"""

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback

import acceptance
import torch
import torch.distributed as dist

from elasticrs.train import NonRetryableException, SimpleWorkerStats, StopException, on_change, p2p

torch.set_num_threads(1)

SIZE = 1 << 16


def say(name, what, **more):
    text = json.dumps({"name": name, "what": what, "pid": os.getpid(), "at": time.monotonic(), **more})
    os.write(1, (text + "\n").encode())


def ranks_in_environment():
    return [os.environ["RANK"], os.environ["WORLD_SIZE"]]


class Trainer:
    """Counts steps. Each step adds 1 to the sum, so that lost and repeated steps are visible."""

    def __init__(self, order):
        self.name = order["name"]
        self.order = order
        self.step = -1
        self.sum = torch.zeros(SIZE)
        self.group = None

    def say(self, what, **more):
        say(self.name, what, step=self.step, **more)

    def tell_end(self, what):
        self.say(what, sum=float(self.sum[0]), equal=bool((self.sum == self.sum[0]).all()))

    def sync(self):
        votes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(votes, torch.tensor([self.step]))
        steps = [int(vote) for vote in votes]
        best = max(range(len(steps)), key=lambda each: (steps[each], -each))
        self.say("votes", steps=steps)
        # Receive into a spare tensor, because this rank's state must keep its vote until all ranks have the
        # new state.
        spare = self.sum.clone()
        dist.broadcast(spare, best)
        dist.barrier()
        self.step, self.sum = max(steps[best], 0), spare

    def train_step(self, world):
        order = self.order
        if self.step == order.get("at", -1) and order.get("do") == "fork":
            order["do"] = None
            self.fork()
        gradient = torch.full((SIZE,), 1.0 / world)
        dist.all_reduce(gradient, group=self.group)
        if order.get("pause"):
            select.select([], [], [], order["pause"])
        # Change the state only after the last collective, so that an error leaves it unchanged.
        self.sum += gradient.round()
        self.step += 1

    def fork(self):
        pid = os.fork()
        while not pid:
            select.select([], [], [])
        self.say("forked", child=pid)


def with_a_thread_in_creation(trainer, order):
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
        while order.get("do") == "wait in creation":
            select.select([], [], [])
        connection = socket.create_connection(("127.0.0.1", order.pop("holds")))
        threading.Thread(target=echo, args=(connection,), daemon=True).start()
        return create(*arguments, **options)

    dist.init_process_group = creates


def with_coordinator(order):
    trainer = Trainer(order)
    coordinator = p2p.CoordinatorP2P("gloo", order["url"], 64, order.get("timeout", 10000))
    p2p.CoordinatorP2P.MONITOR_PROGRESS_FREQ = 5
    has_ended = 0
    while True:
        began = time.monotonic()
        try:
            _, rank, world = coordinator.rendezvous_barrier()
            met = time.monotonic()
            if "holds" in order or order.get("do") == "wait in creation":
                with_a_thread_in_creation(trainer, order)
            coordinator.init_process_group()
            made = time.monotonic()
            coordinator.barrier()
            is_over = max(coordinator.exchange([has_ended]))[0]
            trainer.sync()
            if order.get("subgroup"):
                trainer.group = dist.new_group()
            coordinator.barrier()
            if is_over:
                coordinator.signal_training_done()
                trainer.tell_end("done")
                return
        except StopException:
            trainer.tell_end("stopped")
            return
        except NonRetryableException as error:
            trainer.say("stuck", error=str(error))
            return
        except RuntimeError as error:
            trainer.say("failed", error=str(error)[:200])
            continue
        trainer.say(
            "met",
            rank=rank,
            world=world,
            round=coordinator.rounds_before + 1,
            began=began,
            met=met,
            made=made,
            env=ranks_in_environment(),
        )
        is_first = True
        while True:
            if trainer.step >= order["steps"] or os.path.exists(order.get("end_when", "")):
                coordinator.announce_end()
                has_ended = 1
                break
            try:
                trainer.train_step(world)
                if "rate" in order:
                    was = coordinator.is_worker_straggler
                    coordinator.monitor_progress(None, SimpleWorkerStats(order["rate"]))
                    if coordinator.is_worker_straggler and not was:
                        trainer.say("straggles")
                if coordinator.should_rendezvous(None):
                    trainer.say("left")
                    break
            except RuntimeError as error:
                trainer.say("raised", error=str(error)[:200])
                break
            if is_first:
                trainer.say("stepped")
                is_first = False


def by_hand(order):
    trainer = Trainer(order)
    changes = []
    with on_change(changes.append, order["url"]) as job:
        while trainer.step < order["steps"]:
            place = job.meet()
            try:
                job.init_process_group("gloo")
                trainer.sync()
                trainer.say("met", rank=place.rank, world=place.world_size, env=ranks_in_environment())
                trainer.train_step(place.world_size)
                trainer.say("stepped")
                while not job.passed() and trainer.step < order["steps"]:
                    trainer.train_step(place.world_size)
            except RuntimeError:
                trainer.say("raised", planned=[each.planned for each in changes])
        job.close()
    trainer.tell_end("done")


LOOPS = {
    "coordinator": with_coordinator,
    "train": lambda order: acceptance.run(order, say),
    "by_hand": by_hand,
}


def run(order):
    os.dup2(os.open(order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    try:
        LOOPS[order["loop"]](order)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def main():
    children = set()

    def end():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        while children:
            os.waitpid(children.pop(), 0)

    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order:
            end()
            say("", "all ended")
        elif "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            children.discard(order["wait"])
            say(order["name"], "ended", code=os.waitstatus_to_exitcode(status))
        else:
            pid = os.fork()
            if not pid:
                run(order)
            children.add(pid)
    end()


main()
