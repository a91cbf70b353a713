"""Starting and watching the worker processes of one node."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.multiprocessing.api import (
        DefaultLogsSpecs,
        LogsDest,
        LogsSpecs,
        RunProcsResult,
        SignalException,
        Std,
        to_map,
    )
    from elasticrs.multiprocessing.errors import ProcessFailure

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "to_map",
]


def __getattr__(name: str) -> object:
    # Workers import the errors in this package and must not pay for the rest.
    if name == "ProcessFailure":
        from elasticrs.multiprocessing.errors import ProcessFailure

        return ProcessFailure
    if name in __all__:
        from elasticrs.multiprocessing import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
