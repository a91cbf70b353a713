"""Layout of the workers' log files: ``<log_dir>/<run_id>_<host>_XXXX/attempt_<name>/<local_rank>/``.

The directory of an attempt is never deleted or reused, because users need it to investigate the attempt.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial

from elasticrs._engine.job.config import DEFAULT_PREFIX_TEMPLATE, LogSettings, UsageError
from elasticrs._engine.job.value import Value, fresh
from elasticrs._engine.process.background_call import FileAccess
from elasticrs._engine.process.console import visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs._engine.workers.plan import WorkerRanks

STDOUT = 1
STDERR = 2

_COLOURS = (36, 33, 32, 35, 34, 31)


class LogPaths(Value):
    """Paths of an attempt's log files, by local rank. A path is empty if the stream is not redirected. If
    ``are_new``, none of the files existed before the attempt.
    """

    stdouts: dict[int, str] = fresh(factory=dict)
    stderrs: dict[int, str] = fresh(factory=dict)
    tee_stdouts: dict[int, str] = fresh(factory=dict)
    tee_stderrs: dict[int, str] = fresh(factory=dict)
    error_files: dict[int, str] = fresh(factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""
    _: KW_ONLY
    are_new: bool = False

    @property
    def run_folder(self) -> str:
        """Folder with the logs of all attempts; empty if a user-supplied class chose the log files."""
        error_file = next(iter(self.error_files.values()), "") if self.are_new else ""
        # <run>/attempt_N/<local rank>/error.json
        return os.path.dirname(os.path.dirname(os.path.dirname(error_file)))

    @property
    def have_output(self) -> bool:
        """True if the output of a worker goes to a file."""
        return any(path not in ("", os.devnull) for path in (*self.stdouts.values(), *self.stderrs.values()))

    def only_written(self) -> list[tuple[int, int, str]]:
        """Return local rank, descriptor and path of files with one stream that the agent does not read."""
        # In a file with several streams, nothing shows which bytes belong to which stream, so leave it out.
        owners: dict[str, list[tuple[int, int, str]]] = {}
        for stream, files in ((STDOUT, self.stdouts), (STDERR, self.stderrs)):
            for local_rank, path in files.items():
                owners.setdefault(path, []).append((local_rank, stream, path))
        read = {"", os.devnull, *self.tee_stdouts.values(), *self.tee_stderrs.values()}
        return [own[0] for path, own in owners.items() if path not in read and len(own) == 1]


class RunLogs:
    """The log directory of one run. Raises ``UsageError`` if it cannot be created or written to. The methods
    wait only a limited time for a file system that does not respond.
    """

    def __init__(self, settings: LogSettings, run_id: str, nproc: int) -> None:
        self._settings = settings
        self._nproc = nproc
        self._is_temporary = not settings.log_dir
        self._files = FileAccess()
        self.directory = (
            "" if settings.log_dir == os.devnull else _make_run_directory(settings.log_dir, run_id)
        )

    def attempt(self, name: str, variables: Mapping[int, dict[str, str]]) -> LogPaths:
        """Create the log directories of an attempt. Add the path of each worker's error file to the worker's
        environment variables. Raise ``OSError`` if that fails, or if the file system does not respond.
        """

        def make() -> LogPaths:
            directory = ""
            if self.directory:
                directory = os.path.join(self.directory, f"attempt_{name}")
                make_again(self.directory, is_temporary=self._is_temporary)
            return make_files(self._settings, directory, self._nproc, variables)

        paths = self._files.run(make, None)
        if paths is None:
            why = "the file system of the logs does not respond"
            raise TimeoutError(errno.ETIMEDOUT, why, self.directory)
        return paths

    def remove_if_empty(self) -> None:
        if self.directory and self._is_temporary:
            self._files.run(partial(remove_if_empty, os.path.dirname(self.directory)), None)


def make_files(
    settings: LogSettings, directory: str, nproc: int, variables: Mapping[int, dict[str, str]]
) -> LogPaths:
    """Create ``directory``, if given, for an attempt's logs. Add workers' error files to ``variables``."""
    if directory:
        os.mkdir(directory)
        for local_rank in range(nproc):
            os.mkdir(os.path.join(directory, str(local_rank)))
    paths = layout(settings, directory, nproc)
    for local_rank, own in variables.items():
        own["TORCHELASTIC_ERROR_FILE"] = paths.error_files[local_rank]
    return paths


def layout(settings: LogSettings, directory: str, nproc: int) -> LogPaths:
    """Compute an attempt's paths without accessing files. An empty ``directory`` means no files."""
    filtered = (
        os.path.join(directory, f"filtered_{name}.log") if directory else "" for name in ("stdout", "stderr")
    )
    paths = LogPaths({}, {}, {}, {}, {}, *filtered, are_new=bool(directory))
    for local_rank in range(nproc):
        tee = _bits(settings.tee, local_rank) | (STDERR if settings.capture_stderr else 0)
        redirected = _bits(settings.redirects, local_rank) | tee
        hidden = settings.local_ranks_filter is not None and local_rank not in settings.local_ranks_filter
        if not directory:
            tee = redirected = 0
        for stream, name, files, tees in (
            (STDOUT, "stdout.log", paths.stdouts, paths.tee_stdouts),
            (STDERR, "stderr.log", paths.stderrs, paths.tee_stderrs),
        ):
            if redirected & stream:
                files[local_rank] = os.path.join(directory, str(local_rank), name)
                if tee & stream and not hidden:
                    tees[local_rank] = files[local_rank]
            else:
                files[local_rank] = os.devnull if hidden else ""
        error_file = os.path.join(directory, str(local_rank), "error.json") if directory else ""
        paths.error_files[local_rank] = error_file
    return paths


def followed_files(settings: LogSettings, nproc: int) -> int:
    """Return how many log files the agent keeps open. Do not loop over ``nproc``, which may be huge."""
    if settings.log_dir == os.devnull:
        return 0
    # A filter adds two open files to a stream: the source and the copy of the filtered lines.
    out, err = 3 if settings.duplicate_stdout_filters else 1, 3 if settings.duplicate_stderr_filters else 1
    files = (0, out, err, out + err)
    more = STDERR if settings.capture_stderr else 0
    chosen = settings.local_ranks_filter
    shown = range(nproc) if chosen is None else {rank for rank in chosen if rank < nproc}
    named, rest = ({}, settings.tee) if isinstance(settings.tee, int) else (settings.tee, 0)
    of_named = [files[bits | more] for rank, bits in named.items() if rank in shown]
    return sum(of_named) + files[rest | more] * (len(shown) - len(of_named))


def line_prefixes(template: str | None, ranks: Sequence[WorkerRanks]) -> dict[int, str]:
    """Replace the template's macros. Return the prefixes of the workers' console lines, by local rank."""
    hostname = visible(os.uname().nodename.split(".")[0])
    prefixes = {}
    for own in ranks:
        text = template or DEFAULT_PREFIX_TEMPLATE
        names = {"role_name": visible(own.role), "hostname": hostname}
        values = {**names, "local_rank": str(own.local_rank), "rank": str(own.global_rank)}
        for name, value in values.items():
            text = text.replace("${" + name + "}", value)
        prefixes[own.local_rank] = text
    return prefixes


def coloured(prefix: str, local_rank: int) -> str:
    return f"\x1b[{_COLOURS[local_rank % len(_COLOURS)]}m{prefix}\x1b[0m"


def _bits(choice: int | Mapping[int, int], local_rank: int) -> int:
    return int(choice) if isinstance(choice, int) else int(choice.get(local_rank, 0))


def _make_run_directory(log_dir: str | None, run_id: str) -> str:
    try:
        if log_dir:
            os.makedirs(log_dir, exist_ok=True)
            base = os.path.abspath(log_dir)
        else:
            base = make_private_directory(temporary_directory(), "elasticrs_")
        return make_private_directory(base, run_prefix(run_id))
    except OSError as error:
        where = f"--log-dir: cannot write to {log_dir}" if log_dir else "cannot make a temporary directory"
        raise UsageError(f"{where}: {error.strerror}") from None


def run_prefix(run_id: str) -> str:
    """Return the start of a log directory's name. It has the host's name, because nodes may share a disk."""
    return f"{run_id}_{os.uname().nodename.split('.')[0]}_".replace(os.sep, "_")


def attempt_name(restarts: int, round_number: int) -> str:
    """Return an attempt's name, which is the same on all nodes. It needs ``round_number``, because an attempt
    that is not charged as a restart has the same number of ``restarts`` as the one before it.
    """
    return str(restarts) if round_number == restarts + 1 else f"{restarts}_r{round_number}"


def make_private_directory(parent: str, prefix: str) -> str:
    """Create a directory that only this user can access, with a random suffix. Return its path."""
    while True:
        path = os.path.join(parent, prefix + os.urandom(4).hex())
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        return path


def make_again(run_directory: str, *, is_temporary: bool) -> None:
    """Recreate a run's directory and its parent folder, if a clean-up tool has removed them. ``is_temporary``
    means that other users can create files where the parent folder was. In this case, raise
    ``PermissionError`` if the folder now belongs to another user.
    """
    if not is_temporary:
        os.makedirs(run_directory, 0o700, exist_ok=True)
        return
    for path in (os.path.dirname(run_directory), run_directory):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:  # noqa: PERF203 -- only two iterations
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "the log folder was replaced", path) from None
            if found.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "the log folder belongs to another user", path) from None


def temporary_directory() -> str:
    candidates: Iterable[str | None] = (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp")
    for path in candidates:
        if path and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
            return path
    return os.getcwd()


def remove_if_empty(directory: str, levels: int = 0) -> None:
    """Remove a directory, its subdirectories and its ``levels`` nearest parents if they contain no files."""
    for parent, _, _ in os.walk(directory, topdown=False):
        _rmdir_if_empty(parent)
    for _ in range(levels):
        directory = os.path.dirname(directory)
        _rmdir_if_empty(directory)


def _rmdir_if_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        return  # It usually contains files. A leftover directory does not affect the result of the job.
