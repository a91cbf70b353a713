"""Modules to import once, before the workers are forked (``--warm``)."""

from __future__ import annotations

from elasticrs.job.value import Value


class Preload(Value):
    """Steps to perform before the workers are forked, such as imports. :mod:`elasticrs.workers.warm`
    describes the format of the steps.

    Args:
        steps: preload steps in order. If they contain no modules, workers start cold.
        is_explicit: true if the user has named the modules.
        remarks: messages to the user, one line each.
        folders: folders of the user's own modules, which are not preloaded; see
            :mod:`elasticrs.workers.warm`.
    """

    steps: tuple[str, ...] = ()
    is_explicit: bool = False
    remarks: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Steps that import a module, in order."""
        return tuple(step for step in self.steps if "=" not in step)
