"""Where the output of workers goes, with torch's public names.

Different from torch: a directory of an attempt is never deleted (torch removes the one of an earlier round
with the same restart count), and local ranks of two digits can be named.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from elasticrs import logs
from elasticrs.config import LogSettings

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

    from elasticrs.multiprocessing.errors import ProcessFailure

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "RunProcsResult",
    "SignalException",
    "Std",
    "to_map",
]


class SignalException(Exception):  # noqa: N818 -- torch's name
    """A signal asked the agent to stop, and the workers are stopped.

    Args:
        msg: for the user.
        sigval: which signal.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


class Std(IntFlag):
    """Streams of a process."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read ``"3"`` or ``"0:3,1:0"`` (by local rank).

        Raises:
            ValueError: it is something else.
        """
        try:
            found = logs.parse_streams(vm)
        except ValueError as error:
            raise ValueError(f"{vm} does not match: {error}") from None
        if isinstance(found, int):
            return cls(found)
        return {local_rank: cls(bits) for local_rank, bits in found.items()}


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """The choice for each local rank; ranks that a mapping leaves out get none.

    Args:
        val_or_map: one for all, or by local rank.
        local_world_size: number of workers.
    """
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {local_rank: val_or_map.get(local_rank, Std.NONE) for local_rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Files by local rank; ``""`` stands for the console."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Decides where the output of workers goes.

    Args:
        log_dir: base directory.
        redirects: streams that go to files, for all or by local rank.
        tee: streams that go to files and to the console.
        local_ranks_filter: the ranks that may show on the console; ``None`` for all.
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
        """The files of an attempt; called once for each, before its workers are started.

        Args:
            envs: what the agent adds to the environment, by local rank; ``TORCHELASTIC_ERROR_FILE`` is added
                here.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The base directory."""


class DefaultLogsSpecs(LogsSpecs):
    """``<log_dir>/<run_id>_XXXX/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}``.

    Raises:
        NotADirectoryError: ``log_dir`` is a file.
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
        """The base directory."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See :class:`LogsSpecs`."""
        some = envs.get(0, {})
        directory = ""
        if self._root_log_dir != os.devnull:
            directory = self._attempt_directory(some)
            for local_rank in range(len(envs)):
                os.mkdir(os.path.join(directory, str(local_rank)))
        paths = logs.layout(self._settings(), directory, len(envs))
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = paths.error_files[local_rank]
        return LogsDest(
            paths.stdouts,
            paths.stderrs,
            paths.tee_stdouts,
            paths.tee_stderrs,
            paths.error_files,
            os.path.join(directory, "filtered_stdout.log") if directory else "",
            os.path.join(directory, "filtered_stderr.log") if directory else "",
        )

    def _remove_if_empty(self) -> None:
        if self._is_temporary:
            logs.remove_if_empty(self.root_log_dir)

    def _settings(self) -> LogSettings:
        chosen = self._local_ranks_filter
        return LogSettings(
            self._root_log_dir, self._redirects, self._tee, frozenset(chosen) if chosen else None
        )

    def _attempt_directory(self, env: Mapping[str, str]) -> str:
        if self._run_log_dir is None:
            run_id = env.get("TORCHELASTIC_RUN_ID", "").replace(os.sep, "_")
            self._run_log_dir = logs.make_private_directory(self.root_log_dir, run_id + "_")
        # An earlier job with the same object may have removed it, empty.
        os.makedirs(self._run_log_dir, 0o700, exist_ok=True)
        attempt = os.path.join(self._run_log_dir, f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        if os.path.exists(attempt) and env.get("ELASTICRS_ROUND"):
            attempt = f"{attempt}_r{env['ELASTICRS_ROUND']}"
        path, again = attempt, 0
        while os.path.exists(path):
            again += 1
            path = f"{attempt}_{again}"
        os.mkdir(path)
        return path

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return False
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._root_log_dir)

    def _key(self) -> tuple[Any, ...]:
        return (self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter)


@dataclass
class RunProcsResult:
    """How a group of processes ended, by local rank."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether a process failed."""
        return len(self.failures) > 0
