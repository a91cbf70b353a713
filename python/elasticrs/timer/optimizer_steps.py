"""Heartbeats of a worker whose program gives none: each step of a torch optimizer is one.

``hook/sitecustomize.py`` calls this when ``torch.optim.optimizer`` has been imported. The page is that of
:mod:`elasticrs.timer.heartbeats`.
"""

from __future__ import annotations

from elasticrs.timer.heartbeats import automatic_heartbeat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def beat_with_steps(optimizers: object) -> None:
    """Register with torch's hook for the steps of all optimizers; do nothing where torch has none.

    Args:
        optimizers: the module ``torch.optim.optimizer``; the rest of torch may still be being imported.
    """
    register = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register is None:
        return
    from weakref import ref

    import torch

    step = -1
    # The optimizer whose steps are counted: the first one; when it is gone, the next one that makes a step.
    counted: Callable[[], object] | None = None

    def on_step(optimizer: object, _args: object, _kwargs: object) -> None:
        nonlocal step, counted
        try:
            # Compiled steps do without: torch would warn that it cannot trace a heartbeat.
            if torch.compiler.is_compiling():
                return
        except AttributeError:
            return  # A torch that cannot tell. The agent says that the rank is not watched.
        first = counted() if counted is not None else None
        if first is None:
            counted = ref(optimizer)
        elif first is not optimizer:
            automatic_heartbeat(None)
            return
        step += 1
        automatic_heartbeat(step)

    register(on_step)
