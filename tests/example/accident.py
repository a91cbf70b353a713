"""Fault injection for examples: kills a process of the first attempt in the middle of its training.

A copy of an example imports this module first. ``ACCIDENT`` says what is killed and when: ``RANK:STEP`` or
``RANK:STEP:loader`` for a process of that rank's data loader. Steps of optimizers are counted from 1.
"""

import itertools
import multiprocessing
import os
import signal

from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = itertools.count(1)


def _kill_if_due(*_: object) -> None:
    rank, step, *loader = os.environ["ACCIDENT"].split(":")
    is_due = next(_steps) == int(step) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_due and os.environ["RANK"] == rank:
        loaders = [child.pid for child in multiprocessing.active_children()]
        # Use a single write, because the ranks share this descriptor.
        os.write(1, f"accident of {os.getpid()}, loaders {loaders}\n".encode())
        os.kill(loaders[0] if loader else os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(_kill_if_due)
