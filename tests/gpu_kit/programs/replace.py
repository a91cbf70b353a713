"""Train with elasticrs.train. Each step adds 1, as the mean over all workers, so the result is known."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from kit import ATTEMPT, BACKEND, DEVICE, choose_device, report

from elasticrs.train import AgentCoordinator, State, train
from elasticrs.train.distributed import all_gather_return_max_long

STEPS, KILL_STEP = 40, 15
world_size = int(sys.argv[1])


class Count(State):
    """The state of the training: a counter on the device, and the step number."""

    def __init__(self):
        self.value = torch.zeros(1, device=DEVICE)
        self.step = 0

    def sync(self, _world_size, _rank):
        leader, self.step = all_gather_return_max_long(self.step)
        dist.broadcast(self.value, leader)
        report("met", step=self.step)

    def capture_snapshot(self):
        return self.value.clone(), self.step

    def apply_snapshot(self, snapshot):
        value, self.step = snapshot
        self.value.copy_(value)


def step(state):
    if state.step == STEPS:
        raise StopIteration
    # Read RANK in each step, because every rendezvous of the workers assigns new ranks.
    if state.step == KILL_STEP and int(os.environ["RANK"]) == world_size - 1 and ATTEMPT == 0:
        report("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    part = torch.ones(1, device=DEVICE)
    dist.all_reduce(part)
    state.value += part / dist.get_world_size()
    state.value.item()
    state.step += 1
    return state, None


choose_device()
state = Count()
train(AgentCoordinator(BACKEND), step, state)
report("trained", value=state.value.item(), step=state.step)
