"""Layout of the workers' log files: ``<log_dir>/<run_id>_<host>_XXXX/attempt_<name>/<local_rank>/``.

This module only creates directories and chooses the names of files. The core copies output to the console.
The directory of an attempt is never deleted or reused, because users need its files to investigate the
attempt.
"""

from __future__ import annotations

import errno
import os
import stat

from elasticrs._engine.job.config import DEFAULT_PREFIX_TEMPLATE, LogSettings, UsageError
from elasticrs._engine.job.phrases import visible
from elasticrs._engine.job.value import Value, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from dataclasses import KW_ONLY

    from elasticrs._engine.job.ranks import WorkerRanks

STDOUT = 1
STDERR = 2

_COLOURS = (36, 33, 32, 35, 34, 31)


class LogPaths(Value):
    """Log file paths of one attempt, by local rank. An empty path means that the stream is not redirected.

    Attributes:
        are_new: true if none of the files existed before the attempt.
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

    def only_written(self) -> list[tuple[int, int, str]]:
        """Return the files that hold a single stream and are not read by the agent, as tuples of local rank,
        file descriptor and path.
        """
        # Leave out files that contain several streams, because nothing shows which bytes belong to which
        # stream.
        owners: dict[str, list[tuple[int, int, str]]] = {}
        for stream, files in ((STDOUT, self.stdouts), (STDERR, self.stderrs)):
            for local_rank, path in files.items():
                owners.setdefault(path, []).append((local_rank, stream, path))
        read = {"", os.devnull, *self.tee_stdouts.values(), *self.tee_stderrs.values()}
        return [own[0] for path, own in owners.items() if path not in read and len(own) == 1]


class RunLogs:
    """The log directory of one run.

    Args:
        settings: destinations of the output.
        run_id: name of the job. The name of the directory consists of this name and a random suffix.
        nproc: number of workers on this node.

    Raises:
        UsageError: the directory cannot be created or written to.
    """

    def __init__(self, settings: LogSettings, run_id: str, nproc: int) -> None:
        self._settings = settings
        self._nproc = nproc
        self._is_temporary = not settings.log_dir
        self.directory = (
            "" if settings.log_dir == os.devnull else _make_run_directory(settings.log_dir, run_id)
        )

    def attempt(self, name: str, variables: Mapping[int, dict[str, str]]) -> LogPaths:
        """Create the directories for an attempt, and return the paths of its files. Add the path of each
        worker's error file to ``variables``, the workers' environment variables by local rank.

        Raises:
            OSError: a directory cannot be created.
        """
        directory = ""
        if self.directory:
            directory = os.path.join(self.directory, f"attempt_{name}")
            make_again(self.directory, is_temporary=self._is_temporary)
            os.mkdir(directory)
            for local_rank in range(self._nproc):
                os.mkdir(os.path.join(directory, str(local_rank)))
        paths = layout(self._settings, directory, self._nproc)
        for local_rank, own in variables.items():
            own["TORCHELASTIC_ERROR_FILE"] = paths.error_files[local_rank]
        return paths

    def remove_if_empty(self) -> None:
        """Remove the log directory if it is temporary and contains no file."""
        if self.directory and self._is_temporary:
            remove_if_empty(os.path.dirname(self.directory))


def layout(settings: LogSettings, directory: str, nproc: int) -> LogPaths:
    """Compute the file paths of one attempt without accessing any file.

    Args:
        settings: destinations of the output.
        directory: directory of the attempt. If it is empty, there are no files and all output goes to the
            console.
        nproc: number of workers on this node.
    """
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
    """Return the number of log files that the agent keeps open while workers run. The function does not loop
    over the workers, because ``nproc`` can be absurdly large by mistake.
    """
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
    """Return the prefixes of the workers' console lines, by local rank.

    Args:
        template: template with the macros ``${role_name}``, ``${local_rank}``, ``${rank}``, ``${hostname}``;
            the default template if ``None`` or empty.
        ranks: ranks of the workers.
    """
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


def wants_colour(fd: int, environ: Mapping[str, str]) -> bool:
    """Return true if console lines should be coloured: on a terminal that is not dumb, unless ``NO_COLOR`` is
    set.
    """
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and os.isatty(fd)


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
    """Return the prefix of a run's log directory name.

    The prefix contains the host name, because the nodes of a job often share a file system.
    """
    return f"{run_id}_{os.uname().nodename.split('.')[0]}_".replace(os.sep, "_")


def attempt_name(restarts: int, round_number: int) -> str:
    """Return the name of an attempt in a multi-node job. It is the same on all nodes.

    Args:
        restarts: number of restarts charged before the attempt.
        round_number: number of the rendezvous round, from 1. The number is greater than ``restarts + 1`` if
            some rounds were not charged as restarts.
    """
    return str(restarts) if round_number == restarts + 1 else f"{restarts}_r{round_number}"


def make_private_directory(parent: str, prefix: str) -> str:
    """Create a directory that only this user can access, with a random suffix. Return its path.

    Raises:
        OSError: the directory cannot be created.
    """
    while True:
        path = os.path.join(parent, prefix + os.urandom(4).hex())
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        return path


def make_again(run_directory: str, *, is_temporary: bool) -> None:
    """Recreate a run's directory and its parent, if a clean-up tool has removed them during a long job.

    Args:
        run_directory: directory that :func:`make_private_directory` created.
        is_temporary: true if this process also created the parent, in a folder in which other users can
            create files. In this case, directories of other users are rejected.

    Raises:
        PermissionError: another user owns an existing directory.
        OSError: the directory cannot be created.
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
    """Remove a directory, its subdirectories and its ``levels`` nearest parents, unless they contain files.
    Ignore directories that cannot be removed.
    """
    for parent, _, _ in os.walk(directory, topdown=False):
        _rmdir_if_empty(parent)
    for _ in range(levels):
        directory = os.path.dirname(directory)
        _rmdir_if_empty(directory)


def _rmdir_if_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        # Ignore the error, because a leftover directory does not affect the result of the job. The removal
        # usually fails because the directory still contains files.
        return
