"""Lets the training programs of the tests record what they do, and die at chosen moments.

The variable ``KEEP_TEST`` is a JSON object. Its ``folder`` is the one for the records, and ``die`` lists when
ranks die, as ``[attempt, rank, moment, step, how]``. At the moments ``copy``, ``restore`` and ``save``, the
rank is in the middle of copying its state for `Keep`, of restoring it, or of saving a checkpoint. For these
moments, the number of the copy, of the restore, or of the saved file stands in place of the step.
"""

import json
import os
import signal

import torch

from elasticrs._engine.inside.keep import copier

_fits = [0]
_counts = {}
_copy, _restore, _save = copier.copy_and_sum, torch._foreach_copy_, torch.save


def _count(name):
    number = _counts[name] = _counts.get(name, -1) + 1
    moment(name, number)


def _copy_in_two(*lists):
    middle = len(lists[0]) // 2
    begin = _copy(*(each[:middle] for each in lists))
    _count("copy")
    return (begin + _copy(*(each[middle:] for each in lists))) % (1 << 64)


def _restore_in_two(targets, sources, **how):
    middle = len(targets) // 2
    _restore(targets[:middle], sources[:middle], **how)
    _count("restore")
    _restore(targets[middle:], sources[middle:], **how)


def _save_and_die(what, where, *arguments, **named):
    if isinstance(where, str | os.PathLike):
        with open(where, "wb") as file:
            file.write(b"the beginning of a checkpoint")
    _count("save")
    _save(what, where, *arguments, **named)


copier.copy_and_sum, torch._foreach_copy_, torch.save = _copy_in_two, _restore_in_two, _save_and_die


def setting(name, default=None):
    return json.loads(os.environ["KEEP_TEST"]).get(name, default)


def begin_fit(number):
    _fits.append(number)


def _attempt():
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def note(event, step, *values):
    name = f"{event} in fit {_fits[-1]}" if setting("fits") else event
    with open(os.path.join(setting("folder"), f"rank{os.environ['RANK']}.jsonl"), "a") as file:
        file.write(json.dumps([_attempt(), name, step, *values]) + "\n")


def moment(name, step):
    """Die here, if the plan says so."""
    name = f"{name} in fit {_fits[-1]}" if setting("fits") else name
    for attempt, rank, where, when, how in setting("die", []):
        if (attempt, rank, where, when) == (_attempt(), int(os.environ["RANK"]), name, step):
            note("dies", step)
            if how == "raise":
                raise RuntimeError(f"accident {name} at step {step}")
            os.kill(os.getpid(), getattr(signal, how))


def digest(parameters):
    """Return numbers that are equal only if the parameters are, for all that a test can see."""
    every = torch.cat([each.detach().flatten() for each in parameters]).double()
    return [every.sum().item().hex(), every.norm().item().hex(), every.dot(every.roll(1)).item().hex()]
