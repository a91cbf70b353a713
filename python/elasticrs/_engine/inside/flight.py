"""Writes a worker's flight record (torch's log of the latest collectives) and stacks for the agent.

A thread blocks while it opens a FIFO beside the error file, until the agent opens the other end. The thread
can answer while the main thread waits in a collective, but not while another thread holds the GIL.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident, get_native_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_ENTRIES = 200
"""Maximum number of collectives in the record of one backend. The latest ones are kept."""

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch that return a record as JSON: of backends for the CPU, and of NCCL."""

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables with the size of torch's recorder, of which the first that is set counts. 0 turns it off."""

MAX_ARRIVALS = 1000
"""Maximum number of collectives of one backend of which the document has the time of the call."""

_ARRIVAL = ("profiling_name", "collective_seq_id", "op_id", "is_p2p", "time_created_ns")

MAX_FRAMES = 48
"""Maximum number of frames of the main thread's stack. The innermost frames are kept."""

_owner = 0
"""Pid of the process that has started the thread. Differs from the own pid in a forked child."""

_main: int | None = None
"""Identity of the main thread, if it has started the thread that answers."""


def answer_with_record() -> None:
    """Start the thread that writes torch's logs of collectives, and the main thread's stack, when the agent
    asks for them.
    """
    global _owner, _main  # noqa: PLW0603 -- one thread for each process
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_off = os.environ.get("ELASTICRS_TRACEBACKS") == "0"
    if not path or is_off or _owner == os.getpid():
        return
    _owner = os.getpid()
    _main = get_ident() if get_native_id() == _owner else None
    from elasticrs._engine.inside.error_file import may_be_replaced

    if not may_be_replaced(path):
        return  # The error file is a device such as /dev/null, so create no file next to it.
    requests = f"{path}.flight_requests"
    try:
        for left in (requests, f"{path}.flight_at_exit"):
            if os.path.lexists(left):
                # An earlier process of this worker created it. Only the newest process answers requests.
                os.unlink(left)
        os.mkfifo(requests, 0o600)
        _start_thread(requests, f"{path}.flight")
    except (OSError, RuntimeError):
        return  # Ignore the error, because a report without a flight record is still useful.


def _start_thread(requests: str, record: str) -> None:
    import signal
    from _thread import start_new_thread

    # Block all signals except faults, because the program may wait for a signal with `sigwait`.
    faults = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
    try:
        start_new_thread(_answer, (requests, record))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(requests: str, record: str) -> None:
    from elasticrs._engine.inside.error_file import write_whole

    while _wait_for_request(requests):
        try:
            write_whole(record, flight_document())
        except OSError:  # noqa: PERF203 -- one iteration for each request
            return  # Ignore the error. The report will only lack this record.


def keep_record() -> None:
    """Write torch's log of collectives now, because this program has lost a peer and may exit at once."""
    if _owner != os.getpid():
        return  # The thread for flight records does not run, because the agent does not monitor this process.
    from elasticrs._engine.inside.error_file import write_whole

    try:
        write_whole(os.environ["TORCHELASTIC_ERROR_FILE"] + ".flight_at_exit", flight_document())
    except (OSError, KeyError):
        return  # Ignore the error, because a report without a flight record is still useful.


def _wait_for_request(requests: str) -> bool:
    """Block until the agent has opened and closed the FIFO. Return false if the FIFO no longer exists."""
    from stat import S_ISFIFO

    try:
        # Block, with the GIL released, until the agent opens the FIFO for writing.
        descriptor = os.open(requests, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not S_ISFIFO(os.fstat(descriptor).st_mode):
            return False
        # Read until the agent has closed the FIFO, because the next `open` would otherwise return at once.
        # Close the FIFO before writing the record, because the agent takes an open FIFO as a sign that this
        # thread is idle.
        while os.read(descriptor, 512):
            pass
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def flight_document() -> str:
    """Return this process's flight records (torch's logs of collectives) as lines of JSON: a header, and then
    a line for each log.

    In the header, ``is_waiting`` is true if a collective is not complete, ``groups`` has the global ranks of
    each process group by its name, ``arrivals`` has the group and :data:`_ARRIVAL` of each call to a
    collective, and ``stack`` is the main thread's. If there is no log, the header has only ``stack`` and
    ``no_record``, the reason (a :class:`.NoRecord`).
    """
    import json

    def without(reason: str) -> str:
        return json.dumps({"no_record": reason, "stack": _stack()})

    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return without("no_torch")
    dumps = [getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)]
    size = next((os.environ[name] for name in _SIZES if name in os.environ), None)
    if not dumps or size == "0":
        return without("off")
    try:
        records = [json.loads(dump(includeCollectives=True, onlyActive=False)) for dump in dumps]
        arrivals = [
            [*entry.get("process_group", ())[:1], *map(entry.get, _ARRIVAL)]
            for record in records
            for entry in record.get("entries", [])[-MAX_ARRIVALS:]
        ]
        for record in records:
            record["entries"] = record.get("entries", [])[-MAX_ENTRIES:]
        used = [record for record in records if record["entries"]] or records[:1]
        is_waiting = any(
            entry.get("retired") is not True and entry.get("state") != "completed"
            for each in used
            for entry in each["entries"]
        )
        header = {"is_waiting": is_waiting, "groups": _groups(), "arrivals": arrivals, "stack": _stack()}
        return "\n".join(json.dumps(line) for line in (header, *used))
    # Catch every exception, because these private functions of torch may change.
    except Exception:
        return without("damaged")


def _stack() -> list[tuple[str, int, str]]:
    """Return file, line and function of the main thread's frames, innermost first; empty if it is unknown."""
    main = _main
    # Do not import `threading`: it takes the thread that first imports it for the main thread.
    threading: Any = sys.modules.get("threading")
    if main is None and threading is not None:
        main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    stack: list[tuple[str, int, str]] = []
    while frame is not None and len(stack) < MAX_FRAMES:
        code = frame.f_code
        stack.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return stack


def _groups() -> dict[str, list[int]]:
    """Return the global ranks of each process group, by the group's name. Gloo's records do not list them."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return {}
    world = distributed._world
    return {name: sorted(world.pg_group_ranks[group]) for group, name in list(world.pg_names.items())}


def answer_with_stacks() -> int | None:
    """Let the agent request this worker's stacks, by :func:`.keep_stacks`, unless the hook (our
    ``sitecustomize``) has done so. Return the descriptor of the file for the stacks; ``None`` without it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_off = os.environ.get("ELASTICRS_TRACEBACKS") == "0"
    if not path or is_off or "ELASTICRS_ROUND" not in os.environ:
        return None
    from _signal import SIGRTMIN  # type: ignore[import-not-found]

    if _is_caught(SIGRTMIN + 12):
        return None
    from elasticrs._engine.inside.hook.sitecustomize import keep_stacks

    return keep_stacks(path)


def _is_caught(signum: int) -> bool:
    try:
        with open("/proc/self/status", "rb") as file:
            masks = [line for line in file if line.startswith((b"SigCgt:", b"SigIgn:"))]
    except OSError:
        # The agent looks into `/proc` for the handler. Without `/proc`, it would never request stacks.
        return True
    return any(int(mask.split()[1], 16) >> (signum - 1) & 1 for mask in masks)
