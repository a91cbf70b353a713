"""Worker for ``tests/diagnosis``. Executes its rank's plan in a gloo group, and answers requests.

The command line is the plan as JSON: ``rank``, ``size``, ``store`` (a file), ``groups`` (a list of
descriptions and ranks), ``steps``. A step is one operation, with the index of a group in ``groups`` or
``null`` for the default group. A request is a line on stdin, and the answer is one line on stdout:
``record`` gives the flight record, the groups and whether the worker has raised.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

never, raised = threading.Event(), threading.Event()


def load_batch():
    never.wait()


def spin():
    while not never.is_set():
        continue


def carry_out(name, group, tensor):
    if name == "load":
        load_batch()
    elif name == "spin":
        spin()
    elif name == "exit":
        os._exit(1)
    elif name == "all_reduce":
        distributed.all_reduce(tensor, group=group)
    elif name == "all_gather":
        gathered = [tensor.clone() for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(gathered, tensor, group=group)
    elif name == "broadcast":
        distributed.broadcast(tensor, src=0, group=group)
    elif name == "barrier":
        distributed.barrier(group=group)
    elif name == "receive":
        distributed.recv(tensor, src=(distributed.get_rank() + 1) % distributed.get_world_size())
    else:
        raise ValueError(name)


def train(steps, groups):
    for name, group, elements in steps:
        carry_out(name, None if group is None else groups[group], torch.ones(elements))


def names_and_ranks():
    world = distributed_c10d._world
    # Select the groups by name, because groups without this rank have ranks but no name.
    return {name: sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


def answer():
    try:
        for _ in sys.stdin:
            record = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False).decode()
            print(
                json.dumps({"record": record, "groups": names_and_ranks(), "raised": raised.is_set()}),
                flush=True,
            )
    finally:
        os._exit(0)  # Either the tests have closed the pipe, or the exit closes it for them.


def join(plan):
    """Join the groups of a plan and return them. On a signal, write the stacks to the plan's file."""
    stacks = os.open(plan["stacks"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGRTMIN + 12, stacks, all_threads=True)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{plan['store']}",
        rank=plan["rank"],
        world_size=plan["size"],
        timeout=timedelta(minutes=10),
    )
    return [distributed.new_group(ranks, group_desc=name) for name, ranks in plan["groups"]]


def run(steps, groups, on_error):
    """Execute the steps, and then wait forever. Call ``on_error`` if a collective fails."""
    try:
        train(steps, groups)
    except RuntimeError:
        on_error()
    never.wait()


def main():
    plan = json.loads(sys.argv[1])
    groups = join(plan)
    threading.Thread(target=answer, daemon=True).start()
    run(plan["steps"], groups, raised.set)


if __name__ == "__main__":
    main()
