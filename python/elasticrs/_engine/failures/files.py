"""Paths of a worker's files, derived from the path of its error file, and access to these files."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_STACK_LIMIT = 16384
_ERROR_FILE_LIMIT = 1 << 20
"""Maximum number of bytes to read of an error file, because a restart waits for it. Of a larger file, only
the first line of the message and elasticrs's data at the end are used.
"""
_TEXT_LIMIT = 1 << 16
"""Maximum number of characters of a text in an error file. Longer texts are shortened in the middle."""
_LINE_LIMIT = 1000
_BEGINNING = rb'\s*\{\s*"message"\s*:\s*(?:\{\s*"message"\s*:\s*)?"'
_PART_OF_STRING = r'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*'
_OWN_DATA = b'"elasticrs": {'

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
    """Return the path of the flight record that a worker writes when it fails because another one is lost."""
    return f"{error_file}.flight_at_exit"


def flight_requests_file(error_file: str) -> str:
    """Return the path of the FIFO for requests of flight records. It exists while the worker reads it."""
    return f"{error_file}.flight_requests"


def flight_dumps(error_file: str) -> str:
    """Return the path of NCCL's flight records (``TORCH_FR_DUMP_TEMP_FILE``). Torch appends a rank to it."""
    return f"{error_file}.flight_dump_"


def flight_records(error_file: str, rank: int, since: float = 0.0) -> list[str]:
    """Return the existing files with a worker's flight records (torch's logs of collectives): the one that
    the agent requested, the one that the worker wrote when it failed, and the one of NCCL's watchdog. Leave
    out files that were last modified before ``since`` (seconds since 1970).
    """
    dump = f"{flight_dumps(error_file)}{rank}"
    paths = flight_record_file(error_file), last_record_file(error_file), dump
    return [path for path in paths if _is_file(path, since)]


def _is_file(path: str, since: float) -> bool:
    import stat

    try:
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_mtime >= since
    except OSError:
        return False  # The file does not exist or cannot be accessed.


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


class EmptyFileError(ValueError):
    """Raised if the worker created its error file, but could not write to it."""


def message_of(data: Mapping[str, Any]) -> tuple[str | dict[str, Any], int]:
    """Return the message and the timestamp (seconds since 1970) from an error file, in torch's nested form or
    the flat form. Raise ``ValueError`` for any other contents.
    """
    if "message" not in data:
        raise ValueError("no `message` in it")
    message = data["message"]
    try:
        if isinstance(message, str):
            return message, int(data.get("timestamp", 0))
        return message, int(message["extraInfo"]["timestamp"])
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise ValueError(f"no timestamp in it: {problem!r}") from None


def load_object(path: str) -> dict[str, Any]:
    """Read a JSON object that another program has written. Raise :class:`EmptyFileError` for an empty file,
    and ``ValueError`` if no JSON object is found.
    """
    import json

    with open(path, "rb") as file:
        content = file.read(_ERROR_FILE_LIMIT + 1)
        if len(content) > _ERROR_FILE_LIMIT:
            found = os.fstat(file.fileno())
            file.seek(max(_ERROR_FILE_LIMIT, found.st_size - _TEXT_LIMIT))
            return _parts(content, file.read(_TEXT_LIMIT), found.st_mtime, found.st_size)
    if not content:
        raise EmptyFileError("it is empty")
    try:
        data = json.loads(content.decode("utf-8", errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object, so there is no `message` in it")
    _shorten(data)
    return data


def _parts(beginning: bytes, end: bytes, written: float, size: int) -> dict[str, Any]:
    """Return the contents that are used of an error file above the limit; see :data:`_ERROR_FILE_LIMIT`."""
    import json
    import re

    found = re.match(_BEGINNING, beginning)
    if found is None:
        raise ValueError(f"it has {size:,} bytes, and no `message` at its beginning")
    text = beginning[found.end() : found.end() + _TEXT_LIMIT].decode("utf-8", "replace")
    message = json.loads(f'"{re.match(_PART_OF_STRING, text)[0]}"', strict=False)  # type: ignore[index]
    line = message.lstrip().split("\n", 1)[0][:_LINE_LIMIT]
    # As in a traceback, the line of the exception is the last one.
    told = f"[the error file has {size:,} bytes; only the first line of its message is shown]\n{line}"
    data = {"message": {"message": told, "extraInfo": {"timestamp": str(int(written))}}}
    own = end.rpartition(_OWN_DATA)[2].decode("utf-8", "replace")
    try:
        data["elasticrs"], _ = json.JSONDecoder().raw_decode("{" + own)
    except (ValueError, RecursionError):
        return data
    return data


def _shorten(data: dict[str, Any]) -> None:
    message = data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    for each, name in ((data, "message"), (message, "message"), (extra, "py_callstack")):
        if isinstance(each, dict) and isinstance(each.get(name), str):
            each[name] = shortened(each[name])


def shortened(text: str) -> str:
    """Return the text. Omit the middle of a text that is longer than :data:`_TEXT_LIMIT` characters."""
    left_out = len(text) - _TEXT_LIMIT
    if left_out <= 0:
        return text
    first, last = text[: _TEXT_LIMIT // 4], text[-(3 * _TEXT_LIMIT // 4) :]
    return f"{first}\n[{left_out:,} characters are left out; the error file has them]\n{last}"


def fault_stack(error_file: str) -> str | None:
    # The file is missing or empty if the program is not Python or runs without the hook.
    text = last_bytes(fault_file(error_file), _STACK_LIMIT).decode("utf-8", "replace")
    # Use the last entry, because forked children may have written earlier entries to the same file.
    last = text[max(0, text.rfind("Fatal Python error")) :]
    last = "\n\n".join(part for part in last.split("\n\n") if f'{OWN_THREAD}", line ' not in part)
    # Remove the list of extension modules, because it is long and does not help to explain the crash.
    return last.partition("\nExtension modules:")[0].rstrip() or None
