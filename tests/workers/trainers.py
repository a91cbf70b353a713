"""A process that has imported torch and forks trainers; see `helpers/trainers.py`.

Takes one JSON object per line: {"name", "url", "loop", ...}; trainers tell theirs on stdout.
"""

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import traceback

import acceptance
import torch
import torch.distributed as dist

from elasticrs.train import on_change

torch.set_num_threads(1)


def say(name, what, **more):
    text = json.dumps({"name": name, "what": what, "pid": os.getpid(), "at": time.monotonic(), **more})
    os.write(1, (text + "\n").encode())


def with_on_change(order):
    """Count steps in a custom loop. Each step adds 1 to the sum, so lost and repeated steps are visible."""
    steps, total = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    changes = []

    def tell(what, **more):
        env = [os.environ["RANK"], os.environ["WORLD_SIZE"]]
        say(order["name"], what, steps=int(steps), total=float(total), env=env, **more)

    def step(world):
        share = torch.full((1,), 1.0 / world)
        dist.all_reduce(share)
        select.select([], [], [], order["pause"])
        # Change the state only after the last collective, so that an error leaves it unchanged.
        total.add_(share.round())
        steps.add_(1)

    def sync(world):
        everybodys = [torch.zeros(2, dtype=torch.double) for _ in range(world)]
        dist.all_gather(everybodys, torch.tensor([float(steps), float(total)], dtype=torch.double))
        furthest = max(everybodys, key=lambda each: float(each[0]))
        steps.fill_(int(furthest[0]))
        total.fill_(float(furthest[1]))

    with on_change(changes.append, order["url"]) as job:
        while steps < order["steps"]:
            current = job.meet()
            try:
                job.init_process_group("gloo")
                sync(current.world_size)
                tell("met", rank=current.rank, world=current.world_size)
                step(current.world_size)
                tell("stepped")
                while not job.passed() and steps < order["steps"]:
                    step(current.world_size)
            except RuntimeError:
                tell("raised", planned=[each.planned for each in changes])
        job.close()
    tell("finished")


LOOPS = {"train": lambda order: acceptance.run(order, say), "on_change": with_on_change}


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

    gc.freeze()
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
