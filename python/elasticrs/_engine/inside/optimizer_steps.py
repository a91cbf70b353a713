"""Send a heartbeat after each step of a torch optimizer, in workers whose program sends none itself.

``hook/sitecustomize.py`` calls :func:`beat_with_steps` after ``torch.optim.optimizer`` has been imported. The
heartbeats are sent through :mod:`.heartbeats`.
"""

from __future__ import annotations

import os

from elasticrs._engine.inside.heartbeats import automatic_heartbeat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def beat_with_steps(optimizers: object) -> None:
    """Register a hook that torch calls after each optimizer step. Skip this if torch has no step hooks or
    ``ELASTICRS_AUTO_HEARTBEAT`` is 0. In any case, start the thread that writes torch's flight record when
    the agent requests it.

    Args:
        optimizers: the module ``torch.optim.optimizer``. Other parts of torch may not be imported yet.
    """
    from elasticrs._engine.inside.flight import answer_with_record

    # Start the thread here instead of at the first step, because the first collective can hang before that
    # step.
    answer_with_record()
    register = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register is None or os.environ.get("ELASTICRS_AUTO_HEARTBEAT") == "0":
        return
    from weakref import ref

    import torch

    step = -1
    # Weak reference to the optimizer whose steps are counted: the first optimizer that makes a step. If it is
    # destroyed, the next optimizer that makes a step replaces it.
    counted: Callable[[], object] | None = None

    def on_step(optimizer: object, _args: object, _kwargs: object) -> None:
        nonlocal step, counted
        try:
            # Send no heartbeat in a compiled step, because torch would warn that it cannot trace the call.
            if torch.compiler.is_compiling():
                return
        except AttributeError:
            return  # Send no heartbeats with an old torch. The agent reports that the rank is not watched.
        first = counted() if counted is not None else None
        if first is None:
            counted = ref(optimizer)
        elif first is not optimizer:
            automatic_heartbeat(None)
            return
        step += 1
        automatic_heartbeat(step)

    register(on_step)
