"""Forks the ranks of gloo groups that get stuck, for ``tests/verdicts`` and ``tests/diagnosis``. All ranks
share one import of torch.

Each line on stdin is a list of plans as JSON, one for each rank. The answer is a line with the pids. The next
line, or the end of stdin, kills the ranks. A plan has ``rank``, ``size``, ``groups`` (a list of descriptions
and ranks), ``steps``, the files ``store`` and ``stacks``, and ``error_file``, beside which the rank leaves
its evidence as a worker of a job does. A step is one operation, with the index of a group in ``groups`` or
``null`` for the default group, and the number of elements.
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

from elasticrs._engine.inside.flight import answer_with_record

never = threading.Event()


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


def run(plan):
    """Execute the steps, and then wait forever. Create the error file if a collective fails."""
    groups = join(plan)
    answer_with_record()
    try:
        for name, group, elements in plan["steps"]:
            carry_out(name, None if group is None else groups[group], torch.ones(elements))
    except RuntimeError:
        open(plan["error_file"], "w").close()
    never.wait()


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


def fork(plan):
    """Start a rank and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ["TORCHELASTIC_ERROR_FILE"], os.environ["ELASTICRS_HEARTBEAT"] = plan["error_file"], ""
        run(plan)
    finally:
        os._exit(1)


def main():
    for line in sys.stdin:
        pids = [fork(plan) for plan in json.loads(line)]
        print(json.dumps(pids), flush=True)
        sys.stdin.readline()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        print("null", flush=True)


main()
