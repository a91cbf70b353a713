"""Sends a heartbeat after each step of a torch optimizer, in workers whose program sends no heartbeats.

``hook/sitecustomize.py`` calls :func:`beat_with_steps` after ``torch.optim.optimizer`` has been imported. The
heartbeats are sent through :mod:`elasticrs.timer.heartbeats`.
"""

from __future__ import annotations

import os

from elasticrs.timer.heartbeats import automatic_heartbeat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def beat_with_steps(optimizers: object) -> None:
    """Register a hook that torch calls after each step of any optimizer. Do not register the hook if this
    version of torch does not support step hooks, or if ``ELASTICRS_AUTO_HEARTBEAT`` is 0. In any case, start
    the thread that writes torch's flight record when the agent requests it.

    Args:
        optimizers: the module ``torch.optim.optimizer``. Other parts of torch may not be imported yet.
    """
    from elasticrs._worker.flight import answer_with_record

    # Start the thread here and not with the first step, because the first collective may hang before it.
    answer_with_record()
    register = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register is None or os.environ.get("ELASTICRS_AUTO_HEARTBEAT") == "0":
        return
    from weakref import ref

    import torch

    step = -1
    # Weak reference to the optimizer whose steps are counted: the first optimizer that makes a step. After it
    # is destroyed, the next optimizer that makes a step takes its place.
    counted: Callable[[], object] | None = None

    def on_step(optimizer: object, _args: object, _kwargs: object) -> None:
        nonlocal step, counted
        try:
            # Send no heartbeat in a compiled step, because torch would warn that it cannot trace the
            # heartbeat.
            if torch.compiler.is_compiling():
                return
        except AttributeError:
            return  # This torch has no `is_compiling`. The agent reports that the rank is not watched.
        first = counted() if counted is not None else None
        if first is None:
            counted = ref(optimizer)
        elif first is not optimizer:
            automatic_heartbeat(None)
            return
        step += 1
        automatic_heartbeat(step)

    register(on_step)
