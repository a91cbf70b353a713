"""Decides to which files workers write their output: torch's class ``LogsSpecs``.

The option ``--logs-specs NAME`` selects another class, which an installed package provides as the entry point
of that name.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from elasticrs._engine.inside.error_file import may_be_replaced
from elasticrs._engine.job.config import LogSettings, UsageError, parse_streams
from elasticrs._engine.workers import logs
from elasticrs._engine.workers.logs import STDERR, LogPaths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GROUPS = ("elasticrs.logs_specs", "torchrun.logs_specs")

_TORCHS = "torch.distributed.elastic.multiprocessing.api"


class Std(IntFlag):
    """Output streams of a process, as flags."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse ``"3"`` (for all ranks) or ``"0:3,1:0"`` (by local rank). Raise ``ValueError`` otherwise."""
        try:
            found = parse_streams(vm)
        except ValueError as error:
            raise ValueError(f"{vm} does not match: {error}") from None
        if isinstance(found, int):
            return cls(found)
        return {local_rank: cls(bits) for local_rank, bits in found.items()}


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return the streams for each local rank. Ranks that are missing from a mapping get ``NONE``."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {local_rank: val_or_map.get(local_rank, Std.NONE) for local_rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Paths of log files, keyed by local rank. An empty path means the console."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Base class of objects that choose the log files of workers.

    Args:
        log_dir: base directory of the log files.
        redirects: streams that are written to files, for all ranks or by local rank.
        tee: streams that are written to files and to the console.
        local_ranks_filter: local ranks whose output is printed on the console; ``None`` for all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the log files of an attempt, and add ``TORCHELASTIC_ERROR_FILE`` to the variables."""

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """Base directory of the log files."""


class DefaultLogsSpecs(LogsSpecs):
    """Files ``<log_dir>/<run_id>_<host>_XXXX/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}``.
    Raise ``NotADirectoryError`` if ``log_dir`` is a file.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._is_temporary = not log_dir
        if not log_dir:
            log_dir = logs.make_private_directory(logs.temporary_directory(), "elasticrs_")
        elif os.path.isfile(log_dir):
            raise NotADirectoryError(f"log_dir: {log_dir} is a file")
        elif log_dir != os.devnull:
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        directory = self._attempt_directory(envs.get(0, {})) if self._root_log_dir != os.devnull else ""
        found = logs.make_files(self._settings(), directory, len(envs), envs).fields()
        del found["are_new"]
        return LogsDest(**found)

    def _remove_if_empty(self, attempt: str | None = None) -> None:
        """Remove the base directory, or ``attempt``, if it is temporary and contains no files."""
        if self._is_temporary:
            logs.remove_if_empty(attempt or self.root_log_dir, levels=2 if attempt else 0)

    def _settings(self) -> LogSettings:
        chosen = self._local_ranks_filter
        return LogSettings(
            self._root_log_dir, self._redirects, self._tee, frozenset(chosen) if chosen else None
        )

    def _attempt_directory(self, env: Mapping[str, str]) -> str:
        if self._run_log_dir is None:
            run_id = env.get("TORCHELASTIC_RUN_ID", "").replace(os.sep, "_")
            self._run_log_dir = logs.make_private_directory(self.root_log_dir, logs.run_prefix(run_id))
        # An earlier job may have removed the empty directory.
        logs.make_again(self._run_log_dir, is_temporary=self._is_temporary)
        attempt = os.path.join(self._run_log_dir, f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        if os.path.exists(attempt) and env.get("ELASTICRS_ROUND"):
            attempt = f"{attempt}_r{env['ELASTICRS_ROUND']}"
        path, again = attempt, 0
        while os.path.exists(path):
            again += 1
            path = f"{attempt}_{again}"
        return path

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLogsSpecs) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._root_log_dir)

    def _key(self) -> tuple[Any, ...]:
        return (self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter)


def make_logs_specs(settings: LogSettings, nproc: int) -> LogsSpecs:
    """Create an object of the ``LogsSpecs`` class that the user chose. Raise ``UsageError`` if that fails."""
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
    """Return a function with which the agent gets the log files of each attempt from ``specs``."""

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
