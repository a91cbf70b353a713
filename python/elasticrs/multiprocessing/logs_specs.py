"""Support for ``--logs-specs NAME``: a class that an installed package provides as an entry point."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from elasticrs._engine.inside.error_file import may_be_replaced
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.workers.logs import STDERR, LogPaths
from elasticrs.multiprocessing.api import DefaultLogsSpecs, Std

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticrs._engine.job.config import LogSettings
    from elasticrs.multiprocessing.api import LogsSpecs

GROUPS = ("elasticrs.logs_specs", "torchrun.logs_specs")

_TORCHS = "torch.distributed.elastic.multiprocessing.api"


def make_logs_specs(settings: LogSettings, nproc: int) -> LogsSpecs:
    """Create an instance of the ``LogsSpecs`` class that the user has chosen, with torch's arguments.

    Raise ``UsageError`` if that fails.
    """
    chosen = specs_class(settings.logs_specs or "default")
    std = _std_of(chosen)
    ranks = settings.local_ranks_filter
    try:
        specs: LogsSpecs = chosen(
            log_dir=settings.log_dir,
            redirects=_streams(settings.redirects, std),
            tee=_streams(_tee(settings, nproc), std),
            local_ranks_filter=None if ranks is None else set(ranks),
        )
    except Exception as error:
        raise UsageError(f"--logs-specs: {settings.logs_specs} failed: {error!r}") from error
    return specs


def attempt_logs(specs: LogsSpecs) -> Callable[[str, dict[int, dict[str, str]]], LogPaths]:
    """Return a function that gets the log files of an attempt from ``specs``.

    The agent calls it before each attempt.
    """

    def paths_of_attempt(_name: str, variables: dict[int, dict[str, str]]) -> LogPaths:
        destination: Any = specs.reify(variables)
        # A user's class that was written for older releases may lack the fields for filtered output.
        return LogPaths.taken_from(
            destination,
            error_files={
                rank: _regular(own.get("TORCHELASTIC_ERROR_FILE", "")) for rank, own in variables.items()
            },
            # A user's class may reuse a directory for several attempts.
            are_new=getattr(specs.reify, "__func__", None) is DefaultLogsSpecs.reify,
        )

    return paths_of_attempt


def _regular(error_file: str) -> str:
    # The agent cannot read an error file from a device or create files beside it.
    return error_file if error_file and may_be_replaced(error_file) else ""


def specs_class(name: str) -> Any:
    """Return the ``LogsSpecs`` class with this name. Raise ``UsageError`` if it cannot be loaded."""
    from importlib import metadata

    known = metadata.entry_points()
    names: set[str] = {"default"}
    for group in GROUPS:
        entries = known.select(group=group)
        names |= entries.names
        # Torch registers its own class as `default`.
        if name in entries.names and name != "default":
            try:
                return entries[name].load()
            except Exception as error:
                raise UsageError(
                    f"--logs-specs: {entries[name].value} cannot be loaded: {error!r}"
                ) from error
    if name == "default":
        return DefaultLogsSpecs
    raise UsageError(f"--logs-specs: got {name!r}, installed are {', '.join(sorted(names))}")


def _std_of(chosen: Any) -> Any:
    """Return the ``Std`` enum that a ``LogsSpecs`` class expects: torch's for a subclass of torch's class."""
    torchs: Any = sys.modules.get(_TORCHS)
    if torchs is not None and isinstance(chosen, type) and issubclass(chosen, torchs.LogsSpecs):
        return torchs.Std
    return Std


def _tee(settings: LogSettings, nproc: int) -> int | Mapping[int, int]:
    tee = settings.tee
    if not settings.capture_stderr:
        return tee
    if isinstance(tee, int):
        return tee | STDERR
    return {local_rank: tee.get(local_rank, 0) | STDERR for local_rank in range(nproc)}


def _streams(choice: int | Mapping[int, int], std: Any) -> Any:
    if isinstance(choice, int):
        return std(choice)
    return {local_rank: std(bits) for local_rank, bits in choice.items()}
