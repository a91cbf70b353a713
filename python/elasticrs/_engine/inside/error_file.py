"""Writes the error file in which a worker records its uncaught exception, in torch's format.

Workers that cannot import elasticrs execute it by path, so it uses only the standard library of Python 3.8.
"""

import errno
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

_NOTICE_PART = 2000
"""Maximum number of bytes in each of the two parts of a notice to the agent, which reads at most 4096."""

_CODEC = ("utf-8", "backslashreplace")
"""Text encoding, and the error handler for lone surrogates, which UTF-8 cannot encode."""

_MAX_CAUSES, _MAX_FRAMES = 4, 20
"""Maximum number of causes in a notice to the agent, and of innermost frames of each exception."""

_MAX_MEMBERS = 100
"""Maximum number of members of an exception group that are compared with each other."""

_MAX_DEPTH = 16
"""Maximum depth of the chain of causes that is searched. Prevents endless recursion."""

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")

PARSERS = frozenset(("argparse", "optparse", "click.core", "typer.core"))
"""Modules of command-line parsers, which exit with code 2 if they reject the program's arguments."""

_STARTERS = ("<frozen ", "/runpy.py", "/importlib/__init__.py")
"""Parts of paths of code that starts a program or imports a module."""

_ELASTICRS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/"

_NOT_RETRYABLE = {("elasticrs.errors", "NonRetryable"), ("bdb", "BdbQuit")}

_OF_CHILDREN = {
    *("CalledProcessError", "ChildFailedError", "ProcessRaisedException", "ProcessExitedException"),
}
"""Names of exceptions that report the failure of a child process."""

_TRANSIENT = frozenset(
    (
        *("builtins.ConnectionError", "builtins.TimeoutError", "asyncio.exceptions.TimeoutError"),
        *("concurrent.futures._base.TimeoutError", "socket.timeout", "socket.gaierror", "socket.herror"),
        *("ssl.SSLEOFError", "ssl.SSLZeroReturnError", "http.client.RemoteDisconnected"),
        *("torch.distributed.DistBackendError", "torch.distributed.DistNetworkError"),
        *("torch.distributed.DistStoreError", "torch.distributed.DistQueueEmptyError"),
    )
)
"""Types of exceptions that report a lost connection or a timeout. Subclasses of these types count as well."""

_OF_NETWORK = frozenset(
    (
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENOTCONN, errno.EADDRNOTAVAIL),
    )
)
"""Error numbers of network errors for which Python has no exception type."""

_LOST_PEER = frozenset(
    (
        *("builtins.BrokenPipeError", "builtins.ConnectionAbortedError", "builtins.ConnectionResetError"),
        *("torch.distributed.DistBackendError", "torch.distributed.DistNetworkError"),
        "torch.distributed.DistStoreError",
    )
)
"""Exceptions that report that a peer has closed a connection or does not answer. Subclasses count as well."""

_GLOO_LOST_PEER = (
    *("connection closed", "connection reset", "broken pipe", "socket closed"),
    *("timed out waiting", "application timeout"),
)
"""Phrases in gloo's error messages about a lost peer. Gloo has no exception type of its own for that."""

_LOCAL_CALLERS = ("torch.nn.modules.", "torch.nn.functional")
"""Modules whose native calls never wait for another rank. Layers that communicate use ``torch.distributed``.
"""


def error_document(error: BaseException, written_by: str, at_ns: "int | None" = None) -> str:
    """Return the text of an error file. ``at_ns`` is the exception's monotonic time (default: now)."""
    import json
    import traceback

    kind, text = type(error), _message(error)
    now_ns = time.monotonic_ns()
    at_ns = now_ns if at_ns is None else at_ns
    now = time.time_ns() - (now_ns - at_ns)
    return json.dumps(
        {
            "message": {
                "message": text,
                "extraInfo": {
                    "py_callstack": "".join(traceback.format_exception(kind, error, error.__traceback__)),
                    "timestamp": str(now // 1_000_000_000),
                },
            },
            "elasticrs": {
                "time_ns": now,
                "monotonic_ns": at_ns,
                "pid": os.getpid(),
                "written_by": written_by,
                "failure": failure_facts(error),
            },
        }
    )


def _message(error: BaseException) -> str:
    kind = type(error)
    try:  # A program's `__str__` may fail.
        return f"{kind.__name__}: {error!s}"
    except Exception:
        import traceback

        return traceback.format_exception_only(kind, error)[-1].strip()


def failure_facts(error: BaseException) -> "dict[str, object]":
    """Describe an uncaught exception for the decision whether to restart.

    - ``place``: where it was raised, such as ``train.py:88``; in the user's program if possible.
    - ``is_start_error``: a file could not be parsed, a top-level import failed, or the program rejected its
      arguments (HOOK-8 in the hook).
    - ``is_retryable``: false if the exception, one of its causes, or a member of its group is
      ``NonRetryable``, or ``bdb.BdbQuit`` (the user has quit the debugger).
    - ``member`` and ``more``: for an exception group, the text of its :func:`representative`, and the number
      of its other innermost members. Missing for other exceptions.
    """
    kind = type(error)
    frames, shown = _frames(error.__traceback__)
    # Accept only Python's own `SyntaxError`, because libraries' subclasses of it report errors in data.
    is_code = not isinstance(error, SyntaxError) or kind.__module__ == "builtins"
    if isinstance(error, SyntaxError) and is_code and error.filename:
        shown.append((error.filename, error.lineno or 0))
    # All frames must be module-level code, because a function may import modules long after the start.
    is_importing = all(
        code.co_name == "<module>" or any(part in code.co_filename for part in _STARTERS)
        for code, _ in frames
    )
    told, _, more = representative(error)
    number = getattr(told, "errno", None) if isinstance(told, OSError) else None
    of_system = {"errno": number} if isinstance(number, int) else {}
    of_group = {} if told is error else {"member": _notice_text(error), "more": more}
    return {
        "exception": _qualified(kind),
        "place": f"{os.path.basename(shown[-1][0])}:{shown[-1][1]}" if shown else None,
        "is_start_error": (isinstance(error, SystemExit) and error.code == 2)
        or (isinstance(error, (SyntaxError, ImportError)) and is_code and is_importing),
        "is_retryable": not _is_marked(error),
        "is_transient": _is_transient(error),
        "is_lost_peer": origin(error) == "peer",
        "python": sys.executable,
        **of_system,
        **of_group,
    }


def _innermost_entry(error: BaseException) -> "types.TracebackType | None":
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry


def is_rejection(error: SystemExit) -> bool:
    """Return true if a command-line parser raised this, because it rejected the program's arguments."""
    entry = _innermost_entry(error)
    return error.code == 2 and entry is not None and entry.tb_frame.f_globals.get("__name__") in PARSERS


def _frames(
    entry: "types.TracebackType | None",
) -> "tuple[list[tuple[types.CodeType, int]], list[tuple[str, int]]]":
    """Return the code object and line of each frame, and the file and line of the frames in the user's
    program. If there are none, return the file and line of all frames.
    """
    frames = []
    while entry is not None:
        frames.append((entry.tb_frame.f_code, entry.tb_lineno))
        entry = entry.tb_next
    frames = [(code, line) for code, line in frames if not code.co_filename.startswith(_ELASTICRS)] or frames
    own = [(code, line) for code, line in frames if not any(part in code.co_filename for part in _LIBRARIES)]
    return frames, [(code.co_filename, line) for code, line in own or frames]


def representative(error: BaseException) -> "tuple[BaseException, types.TracebackType | None, int]":
    """Return the exception to report for ``error``, its traceback, and the number of other innermost members.

    In an exception group, members that make another attempt useless come first, then members that are not
    side effects of a lost connection. Among equals, types and places decide, because the order of the members
    may differ from one attempt to the next.
    """
    found = _innermost(error)

    def rank(pair: "tuple[BaseException, types.TracebackType | None]") -> "tuple[bool, bool, str, str, int]":
        each, entry = pair
        is_side_effect = _is_transient(each) or origin(each) == "peer"
        path, line = (_frames(entry)[1] or [("", 0)])[-1]
        return not _is_marked(each), is_side_effect, _qualified(type(each)), os.path.basename(path), line

    # Do not rank a single exception, because the ranking would delay the notice to the agent.
    told, entry = found[0] if len(found) == 1 else min(found[:_MAX_MEMBERS], key=rank)
    return told, entry, len(found) - 1


def _innermost(error: BaseException) -> "list[tuple[BaseException, types.TracebackType | None]]":
    """Return exceptions with tracebacks: a group's innermost members, or ``error`` itself if not a group."""
    found: list[tuple[BaseException, types.TracebackType | None]] = []
    pending: list[tuple[BaseException, types.TracebackType | None]] = [(error, error.__traceback__)]
    seen: set[int] = set()
    while pending:
        each, entry = pending.pop()
        members = [] if id(each) in seen else _members(each)
        seen.add(id(each))
        found += [] if members else [(each, entry)]
        pending += [(member, member.__traceback__ or entry) for member in members]
    return found


def _members(error: BaseException) -> "list[BaseException]":
    members = getattr(error, "exceptions", ())
    return [each for each in members if isinstance(each, BaseException)] if isinstance(members, tuple) else []


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_one_of(error: BaseException, names: "frozenset[str]") -> bool:
    return any(_qualified(base) in names for base in type(error).__mro__)


def _is_transient(error: BaseException, depth: int = 0) -> bool:
    """Return true if an exception, its cause, or all members of its group report a lost peer or a timeout."""
    if depth > _MAX_DEPTH:
        return False
    members = _members(error)
    if members:
        return all(_is_transient(each, depth + 1) for each in members)
    if _is_one_of(error, _TRANSIENT):
        return True
    causes: list[object] = [error.__cause__]
    if isinstance(error, OSError):
        if isinstance(error.errno, int) and error.errno in _OF_NETWORK:
            return True
        # Follow the reason or context of `URLError` and of the `OSError` of HTTP libraries, which is the
        # original error. Other contexts are often mistakes in an exception handler.
        causes += [error.__context__, vars(error).get("reason")]
    return any(isinstance(cause, BaseException) and _is_transient(cause, depth + 1) for cause in causes)


def _is_marked(error: BaseException) -> bool:
    """Return true if an exception, a cause, or a member of its group is one of :data:`_NOT_RETRYABLE`."""
    return any(
        (base.__module__, base.__name__) in _NOT_RETRYABLE
        for each in _related(error, with_context=False)
        if not getattr(each, "may_succeed_later", False)
        for base in type(each).__mro__
    )


def _related(
    error: BaseException, *, with_context: bool = True, with_suppressed: bool = False
) -> "Iterator[BaseException]":
    """Yield an exception, its causes, its group's members, and contexts (exceptions that were being handled).
    ``with_suppressed`` includes contexts that ``raise … from`` has suppressed.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        pending.append(each.__cause__)
        if with_suppressed or (with_context and not each.__suppress_context__):
            pending.append(each.__context__)
        pending += _members(each)


def write_whole(path: str, text: str) -> None:
    """Replace a file's content atomically. Write in place if it is a device or cannot be replaced."""
    if not may_be_replaced(path):
        _write(path, text)
        return
    partial = f"{path}.{os.getpid()}.partial"
    try:
        _write(partial, text)
        os.replace(partial, path)
    except OSError:
        # Delete the partial file first to free space, because the disk may be full.
        if os.path.exists(partial):
            os.unlink(partial)
        _write(path, text)


def may_be_replaced(path: str) -> bool:
    """Return true if ``path`` is missing or a regular file, not a device, a pipe or a symbolic link."""
    return not os.path.lexists(path) or (os.path.isfile(path) and not os.path.islink(path))


def write_uncaught(path: str, error: BaseException, at_ns: int) -> None:
    """Write an uncaught exception, raised at the monotonic time ``at_ns``, to the error file. Keep an
    existing file if it describes the failure better.
    """
    if not _is_kept(path, error):
        write_whole(path, error_document(error, "hook", at_ns))


def keep_flight_record(error: BaseException) -> None:
    """Write torch's flight record (its list of recent collectives) if the exception reports a lost peer. Call
    this last. A signal may end the process meanwhile, because a prompt exit matters more than the record.
    """
    flight = sys.modules.get("elasticrs._engine.inside.flight")
    if flight is not None and origin(error) == "peer":
        flight.keep_record()


def origin(error: BaseException) -> str:
    """Decide whether the exit of another rank may have caused an uncaught exception.

    - ``"own"``: no other rank can have caused it. The agent stops the other ranks immediately.
    - ``"peer"``: the exception, or each member of its group, only reports a lost peer.
    - ``"unknown"``: the agent waits until this process exits, because the rank that failed first may be about
      to record its own exception.
    """
    if all(any(map(_is_lost_peer, _related(each))) for each, _ in _innermost(error)):
        return "peer"
    may_follow = any(_may_follow_from_peer(each) for each in _related(error, with_suppressed=True))
    return "unknown" if may_follow else "own"


def _is_lost_peer(error: BaseException) -> bool:
    if _is_one_of(error, _LOST_PEER):
        return True
    text = _message(error).lower() if _may_be_of_collective(error) else ""
    return any(words in text for words in _GLOO_LOST_PEER)


def _may_follow_from_peer(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, EOFError)):
        return True
    if any(base.__module__.startswith("torch.distributed") for base in type(error).__mro__):
        return True
    return type(error).__name__ in _OF_CHILDREN or _may_be_of_collective(error)


def _may_be_of_collective(error: BaseException) -> bool:
    """Return true for a ``RuntimeError`` of native code that may have waited for another rank."""
    kind = type(error)
    if not isinstance(error, RuntimeError) or (kind.__module__ == "builtins" and kind is not RuntimeError):
        return False
    entry = _innermost_entry(error)
    if entry is None:
        return True
    caller = entry.tb_frame.f_globals.get("__name__")
    is_local = isinstance(caller, str) and caller.startswith(_LOCAL_CALLERS)
    return not (is_local or kind.__name__ == "OutOfMemoryError" or _is_raise_statement(entry))


def _is_raise_statement(entry: "types.TracebackType") -> bool:
    """Return true if a ``raise`` statement in Python raised the exception; false if native code did."""
    from opcode import opmap

    code = entry.tb_frame.f_code.co_code
    return entry.tb_lasti < len(code) and code[entry.tb_lasti] == opmap["RAISE_VARARGS"]


def give_notice(name: str, error: BaseException, at_ns: "int | None" = None) -> None:
    """Tell the agent, which listens on the socket ``name``, that an uncaught exception ends this process."""
    at_ns = time.monotonic_ns() if at_ns is None else at_ns
    _send(name, at_ns, _notice_text(error), origin(error))


def give_notice_of_exit(name: str, code: str, of: str, at_ns: int) -> None:
    """Tell the agent that ``sys.exit`` ends the program. ``of`` is the :func:`origin` of the exception that
    the program handled when it called ``sys.exit``; ``"own"`` if there was none.
    """
    text = f"Traceback (most recent call last):\nSystemExit: {code[: _NOTICE_PART // 2]}\n"
    _send(name, at_ns, text, of)


def _send(name: str, at_ns: int, text: str, of: str) -> None:
    if not name:
        return
    from _socket import AF_UNIX, SOCK_DGRAM, socket

    notices = socket(AF_UNIX, SOCK_DGRAM)
    try:
        # If the agent's socket is full, wait for at most a second, because the agent may be stopped.
        notices.settimeout(1)
        notices.sendto(f"{at_ns} {of}\n{text}".encode(*_CODEC), "\0" + name)
    except OSError:
        return  # A lost notice is harmless, because the agent reads the error file after the worker's exit.
    finally:
        notices.close()


def _notice_text(error: BaseException) -> str:
    """Return a notice's text: the innermost frames, and the exception's message. Shorten a long message in
    its middle, because a traceback of another process may be at its end.
    """
    told, frames, _ = representative(error)
    said = _said(told).encode(*_CODEC)
    stacks = "".join(_stacks(told, frames)).encode(*_CODEC)
    if len(stacks) > _NOTICE_PART:
        stacks = stacks[-_NOTICE_PART:].partition(b"\n")[2]  # Keep only whole lines.
    parts = [stacks, said]
    if len(said) > _NOTICE_PART:
        parts[1:] = [said[: _NOTICE_PART // 2], b"\n", said[-_NOTICE_PART // 2 :]]
    return "".join([part.decode("utf-8", "ignore") for part in parts])


def _stacks(error: BaseException, frames: "types.TracebackType | None") -> "list[str]":
    """Return the tracebacks of an exception and its causes, without source lines and the exception's text. Do
    not use :mod:`traceback`. Its import is slow, and it reads source files, which may be on a hung disk.
    """
    stacks = [_stack(error, frames)]
    for _ in range(_MAX_CAUSES):
        cause = error.__cause__
        link = "The above exception was the direct cause of the following exception:"
        if cause is None and not error.__suppress_context__:
            cause = error.__context__
            link = "During handling of the above exception, another exception occurred:"
        if cause is None:
            break
        stacks.append(f"{_stack(cause, cause.__traceback__)}{_said(cause)}\n{link}\n\n")
        error = cause
    return stacks[::-1]


def _stack(error: BaseException, entry: "types.TracebackType | None") -> str:
    lines: list[str] = []
    while entry is not None:
        code = entry.tb_frame.f_code
        lines.append(f'  File "{code.co_filename}", line {entry.tb_lineno}, in {code.co_name}\n')
        if len(lines) > 2 * _MAX_FRAMES:
            del lines[:-_MAX_FRAMES]
        entry = entry.tb_next
    if lines:
        lines.insert(0, "Traceback (most recent call last):\n")
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f'  File "{error.filename}", line {error.lineno}\n')
    return "".join(lines)


def _said(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("__main__", "builtins"):
        name = f"{kind.__module__}.{name}"
    try:  # A program's `__str__` may fail.
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:
        text = "<exception str() failed>"
    notes = getattr(error, "__notes__", ())
    said = [name + ": " + text if text else name]
    said += [note for note in notes if isinstance(note, str)] if isinstance(notes, (list, tuple)) else []
    return "\n".join(said) + "\n"


def _is_kept(path: str, error: BaseException) -> bool:
    """Return true if the existing error file describes the failure better than this exception.

    A file that this process wrote is kept, unless the hook (our ``sitecustomize``) wrote it. A file of
    another process is kept only if this exception reports the failure of a child process. Otherwise, this
    process has handled that failure.
    """
    if not os.path.isfile(path):
        # Do not read a terminal or a pipe, which could block.
        return False
    import json

    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            data = json.load(file)
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    own = data.get("elasticrs") if isinstance(data, dict) else None
    writer = own.get("pid") if isinstance(own, dict) else None
    if writer not in (None, os.getpid()):
        return any(type(each).__name__ in _OF_CHILDREN for each in _related(error))
    return not isinstance(own, dict) or own.get("written_by") != "hook"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", opener=_open_at_once) as file:
        file.write(text)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file. Fail with ``ENXIO`` for a named pipe that has no reader, instead of waiting for one."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor
