"""Names of the files in which a worker tells of its failure, beside its error file, and access to their
ends.
"""

from __future__ import annotations

import os

OWN_THREAD = "/elasticrs/_engine/inside/flight.py"
"""End of the path of the code in which elasticrs's own thread in a worker waits. Reports omit the stack of
this thread, because the stack does not help users.
"""


def hang_file(error_file: str) -> str:
    """Return the path of the file to which the agent writes a hung worker's stacks. Its name includes that of
    the error file, because error files of several workers can be in one folder.
    """
    folder, name = os.path.split(error_file)
    return os.path.join(folder, "hang.txt" if name == "error.json" else f"{name}.hang.txt")


def fault_file(error_file: str) -> str:
    """Return the path of the file to which a worker's :mod:`faulthandler` writes. The file stays empty unless
    a fault such as SIGSEGV occurs.
    """
    return f"{error_file}.fault"


def flight_record_file(error_file: str) -> str:
    """Return the path of the file to which a worker writes torch's flight record on request by the agent."""
    return f"{error_file}.flight"


def flight_requests_file(error_file: str) -> str:
    """Return the path of the FIFO through which the agent requests a flight record. It exists only while a
    thread of the worker waits for requests.
    """
    return f"{error_file}.flight_requests"


def flight_dumps(error_file: str) -> str:
    """Return the path prefix of torch's flight record (``TORCH_FR_DUMP_TEMP_FILE``). When a collective times
    out, NCCL's watchdog appends the rank to the prefix and writes the record.
    """
    return f"{error_file}.flight_dump_"


def error_file_of(error_file: str, pid: int) -> str:
    """Return the path to which a replaced worker's error file is renamed."""
    folder, name = os.path.split(error_file)
    return os.path.join(folder, f"of_{pid}_{name}")


def last_bytes(path: str, limit: int) -> bytes:
    """Return at most ``limit`` bytes from the end of a file, or no bytes if it cannot be read."""
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
    """Remove files that are no longer needed after an attempt: the :func:`fault_file` if it is empty, and the
    :func:`flight_requests_file` FIFO.
    """
    fault, requests = fault_file(error_file), flight_requests_file(error_file)
    for path in (fault, requests):
        try:
            if path == requests or os.path.getsize(path) == 0:
                os.unlink(path)
        except OSError:  # noqa: PERF203 -- only two iterations
            # The file does not exist, or the disk has failed. Ignore that, because it does not affect the
            # result of the job.
            continue
