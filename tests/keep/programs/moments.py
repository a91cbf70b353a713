"""What a program of the tests writes down, and the moments at which it dies.

``KEEP_TEST`` is a JSON object: ``folder``, and ``die``: a list of ``[attempt, rank, moment, step, how]``.
"""

import json
import os
import signal

_fits = [0]


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
    import torch

    every = torch.cat([each.detach().flatten() for each in parameters]).double()
    return [every.sum().item().hex(), every.norm().item().hex(), every.dot(every.roll(1)).item().hex()]
