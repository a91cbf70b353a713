"""Paths of a worker's files, derived from the path of its error file, and access to these files."""

from __future__ import annotations

import os

OWN_THREAD = "/elasticrs/_engine/inside/flight.py"
"""Source path in the stack of elasticrs's own thread in a worker. Reports omit the stack of this thread."""


def hang_file(error_file: str) -> str:
    """Return the path for a hung worker's stacks. Workers with different error files have different paths."""
    folder, name = os.path.split(error_file)
    return os.path.join(folder, "hang.txt" if name == "error.json" else f"{name}.hang.txt")


def fault_file(error_file: str) -> str:
    """Return the path to which :mod:`faulthandler` writes after a fault, such as SIGSEGV."""
    return f"{error_file}.fault"


def flight_record_file(error_file: str) -> str:
    """Return the path to which a worker writes torch's flight record when the agent requests it."""
    return f"{error_file}.flight"


def last_record_file(error_file: str) -> str:
    """Return the path to which a worker writes its flight record when it fails because of a lost peer."""
    return f"{error_file}.flight_at_exit"


def flight_requests_file(error_file: str) -> str:
    """Return the path of the FIFO for requests of flight records. It exists while the worker reads it."""
    return f"{error_file}.flight_requests"


def flight_dumps(error_file: str) -> str:
    """Return the path to which NCCL's watchdog writes flight records (``TORCH_FR_DUMP_TEMP_FILE``). The
    watchdog appends the rank to this path.
    """
    return f"{error_file}.flight_dump_"


def error_file_of(error_file: str, pid: int) -> str:
    """Return the path to which a replaced worker's error file is renamed."""
    folder, name = os.path.split(error_file)
    return os.path.join(folder, f"of_{pid}_{name}")


def last_bytes(path: str, limit: int) -> bytes:
    """Return the last bytes of a file, at most ``limit``; no bytes if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read()
    except OSError:
        return b""


def last_lines(path: str, count: int) -> list[str]:
    """Return the last lines of a log file. If it cannot be read, return a line that says why."""
    from elasticrs import _core

    try:
        lines = _core.last_lines(path, count)
    except OSError as error:
        return [f"(the file cannot be read: {error.strerror})"]
    return [line.decode(errors="replace") for line in lines]


def discard_unused_files(error_file: str) -> None:
    fault, requests = fault_file(error_file), flight_requests_file(error_file)
    for path in (fault, requests):
        try:
            if path == requests or os.path.getsize(path) == 0:
                os.unlink(path)
        except OSError:  # noqa: PERF203 -- only two iterations
            # The file does not exist, or the disk has failed. Continue, because this does not affect the job.
            continue
