"""Program that monitors a node's NVIDIA GPUs for the agent; :mod:`.gpu_watcher` starts it. It reports Xids
(error codes of NVIDIA's driver) and the device memory that dead workers still hold.

Requests on standard input and messages on standard output are JSON objects, one per line:

- ``{"begin": N}``: attempt N begins. Memory that is in use before does not belong to its workers.
  Answer: ``{"begun": N}``.
- ``{"workers": [PID, …]}``: pids of the attempt's workers.
- ``{"settle": N}``: attempt N is ending. Answer: all Xids, and ``{"settled": N, "held": {GPU: BYTES}}`` with
  the memory that dead workers hold. If they hold any, the answer is sent again when the memory is free.
- ``{"xid": {…}, "attempt": N}``: message about a new or changed Xid, with the fields of :class:`.Xid`.
- ``{"problem": TEXT}``: message about something that cannot be monitored. With ``"is_blind": true``, no more
  messages about memory follow.

The program exits at EOF. It calls NVML on separate threads, because the functions may hang in the driver.
"""

from __future__ import annotations

import _thread
import json
import os
import select
import sys
import time
from functools import partial
from queue import SimpleQueue

from elasticrs._engine.gpus import devices, nvml, xids
from elasticrs._engine.process.other_processes import stat_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elasticrs._engine.gpus.nvml import Device, Nvml

TOLERANCE = 64 << 20
"""Growth of a GPU's used memory, in bytes, up to which it is not attributed to an attempt's workers."""
CALL_LIMIT = 5.0
"""Seconds after which an NVML call counts as hung."""
INIT_LIMIT = 60.0
"""Time limit in seconds for NVML's initialization, which is slow if no other process uses the driver."""
MAX_XIDS = 64
MAX_PIDS = 8

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25
_EVENT_WAIT = 3600.0
_MAX_ANCESTORS = 16
_RECORD_SIZE = 8192
"""Size in bytes of the buffer for the kernel log. Each read returns a single record of the log."""


def send(**message: Any) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


class WorkerProcesses:
    def __init__(self) -> None:
        self.pids: frozenset[int] = frozenset()

    def worker_of(self, pid: int) -> int | None:
        """Return the worker that is the process ``pid`` or one of its ancestors, if any."""
        for _ in range(_MAX_ANCESTORS):
            if pid in self.pids:
                return pid
            if not (fields := stat_fields(str(pid))):
                return None  # The process has exited.
            pid = int(fields[1])
        return None


class Memory:
    """Device memory that an attempt's workers hold. Used only on the thread that calls NVML."""

    def __init__(self, library: Nvml, gpus: list[Device], workers: WorkerProcesses) -> None:
        self._library = library
        self._workers = workers
        # Other jobs may use slices of a GPU (MIG), and their processes are not visible here.
        self._gpus = [gpu for gpu in gpus if not library.is_divided(gpu)]
        self._before: dict[int, int] = {}

    def remember(self) -> None:
        self._before = self._unclaimed()

    def held(self) -> dict[int, int]:
        """Return the bytes that workers, dead or alive, hold on each GPU, if any."""
        held = {gpu: used - self._before.get(gpu, 0) for gpu, used in self._unclaimed().items()}
        return {gpu: size for gpu, size in held.items() if size > TOLERANCE}

    def _unclaimed(self) -> dict[int, int]:
        return {gpu.index: self._library.used_memory(gpu) - self._claimed(gpu) for gpu in self._gpus}

    def _claimed(self, gpu: Device) -> int:
        processes = self._library.processes(gpu)
        others = (
            pid
            for pid in processes
            if os.path.exists(f"/proc/{pid}") and self._workers.worker_of(pid) is None
        )
        return sum(processes[pid] for pid in others)


class NvmlThreads:
    """Two threads that call NVML, because a call may hang. One handles ``requests``, a queue of pairs (a name
    and a number). The other waits for NVML's events. The threads must not call the methods of ``watch``
    themselves, so they put such calls, as functions, into the queue ``results`` for the main thread. ``fd``
    is readable if the queue has one. ``since`` is the time at which the current call to NVML started
    (monotonic seconds; ``None`` if there is no call), and ``limit`` is the call's time limit in seconds.
    """

    def __init__(self, watch: GpuWatch, workers: WorkerProcesses) -> None:
        self._watch, self._workers = watch, workers
        self.requests: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.since: float | None = time.monotonic()
        self.limit = INIT_LIMIT
        self._library: Nvml | None = None
        _thread.start_new_thread(self._run, ())

    @property
    def function(self) -> str:
        return "nvmlInit_v2" if self._library is None else self._library.calling

    def _tell(self, function: Callable[..., None], *arguments: object, **known: object) -> None:
        self.results.put(partial(function, *arguments, **known))
        os.eventfd_write(self.fd, 1)

    def _run(self) -> None:
        try:
            self._library = library = nvml.Nvml()
            found = [library.device(index) for index in range(library.count())]
            memory = Memory(library, gpus := _visible(found), self._workers)
            self._tell(self._watch.know, {xids.address_of(gpu.address): gpu.index for gpu in gpus})
            self._watch_events(library, gpus)
            self.limit = CALL_LIMIT
            while True:
                self.since = None
                name, number = self.requests.get()
                self.since = time.monotonic()
                if name == "begin":
                    memory.remember()
                    self._tell(send, begun=number)
                else:
                    self._settle(memory, number)
        except nvml.NvmlError as error:
            self.since = None
            self._tell(self._watch.fail, str(error))

    def _settle(self, memory: Memory, number: int) -> None:
        pause = _FIRST_PAUSE
        held = memory.held()
        self._tell(self._watch.settled, number, held)
        while held and self.requests.empty():
            self.since = None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            self.since = time.monotonic()
            held = memory.held()
            if not held:
                self._tell(self._watch.settled, number, held)

    def _watch_events(self, library: Nvml, gpus: list[Device]) -> None:
        def run() -> None:
            try:
                while True:
                    if (event := library.next_xid(_EVENT_WAIT)) is not None:
                        self._tell(self._watch.xids.add, event[0].index, event[1])
            except nvml.NvmlError as error:
                self._tell(send, problem=f"NVML reports no Xids ({error})")

        try:
            library.watch_xids(gpus)
        except nvml.NvmlError as error:
            self._tell(send, problem=f"NVML reports no Xids ({error})")
        else:
            _thread.start_new_thread(run, ())


def _visible(gpus: list[Device]) -> list[Device]:
    return [gpus[index] for index in devices.visible_indices(os.environ, [gpu.uuid for gpu in gpus])]


class Xids:
    def __init__(self, workers: WorkerProcesses, *, has_kernel_pids: bool) -> None:
        self._workers = workers
        self._has_kernel_pids = has_kernel_pids
        self._attempt = -1
        self._seen: dict[tuple[int, int], dict[str, Any]] = {}
        self._changed: set[tuple[int, int]] = set()

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._seen.clear()
        self._changed.clear()

    def add(self, gpu: int, code: int, record: xids.LogRecord | None = None) -> None:
        """Count an Xid (an error of NVIDIA's driver). Report it if the Xid, or the process behind it, is new.
        ``record`` is its entry in the kernel log; ``None`` if NVML reported the Xid.
        """
        key = gpu, code
        is_new = key not in self._seen
        if is_new and len(self._seen) >= MAX_XIDS:
            return
        new = {"code": code, "gpu": gpu, "events": 0, "records": 0, "pids": [], "workers": [], "detail": ""}
        entry = self._seen.setdefault(key, new)
        self._changed.add(key)
        entry["events" if record is None else "records"] += 1
        if record is not None:
            entry["detail"] = entry["detail"] or record.detail
            is_new |= self._add_process(entry, record.pid)
        if is_new:
            self.report()

    def _add_process(self, entry: dict[str, Any], pid: int | None) -> bool:
        """Add a process to those of an Xid. Return false if it is unknown, already there, or one too many."""
        if pid is None or pid in entry["pids"] or len(entry["pids"]) >= MAX_PIDS:
            return False
        entry["pids"].append(pid)
        worker = self._workers.worker_of(pid) if self._has_kernel_pids else None
        if worker is not None and worker not in entry["workers"]:
            entry["workers"].append(worker)
        return True

    def report(self) -> None:
        for key in sorted(self._changed):
            entry = dict(self._seen[key])
            # NVML reports each error once, but the kernel log may contain several records for one error.
            events, records = entry.pop("events"), entry.pop("records")
            send(xid={**entry, "count": events or records}, attempt=self._attempt)
        self._changed.clear()


class GpuWatch:
    """Event loop of the main thread, which watches the kernel log, the results of NVML, and requests.
    ``has_kernel_pids`` is true if the pids in the kernel log are valid in this process's pid namespace.
    """

    def __init__(self, kernel_log: str, *, has_kernel_pids: bool) -> None:
        self._workers = WorkerProcesses()
        self.xids = Xids(self._workers, has_kernel_pids=has_kernel_pids)
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._unread = b""
        self._has_failed = False
        self._log = _open_log(kernel_log)
        self._calls = NvmlThreads(self, self._workers)
        self._poll.register(self._calls.fd, select.POLLIN)

    def run(self) -> None:
        while True:
            ready = dict(self._poll.poll(1000 * CALL_LIMIT))
            if self._log is not None and self._log in ready:
                self._read_log(self._log)
            if self._calls.fd in ready:
                os.eventfd_read(self._calls.fd)
                self._take_results()
            if 0 in ready and not self._read_requests():
                return
            since = self._calls.since
            if since is not None and time.monotonic() - since > self._calls.limit and not self._has_failed:
                self.fail(f"NVML hangs in {self._calls.function}")

    def _read_requests(self) -> bool:
        part = os.read(0, 65536)
        *lines, self._unread = (self._unread + part).split(b"\n")
        for request in map(json.loads, lines):
            ((name, value),) = request.items()
            if name == "workers":
                self._workers.pids = frozenset(value)
                continue
            if name == "begin":
                self._workers.pids = frozenset()
                self.xids.begin(value)
            else:
                self.xids.report()
            if not self._has_failed:
                self._calls.requests.put((name, value))
        return bool(part)

    def _take_results(self) -> None:
        while not self._calls.results.empty():
            self._calls.results.get()()

    def settled(self, number: int, held: dict[int, int]) -> None:
        self.xids.report()
        send(settled=number, held=held)

    def fail(self, why: str) -> None:
        self._has_failed = True
        send(problem=f"{why}: the use of device memory is unknown", is_blind=True)
        if not self._numbers:
            # The driver's files use the same order as nvidia-smi.
            known = devices.visible_gpus(os.environ)
            self.know({xids.address_of(gpu.address): index for index, gpu in enumerate(known)})

    def know(self, numbers: dict[tuple[int, int, int], int]) -> None:
        """Begin to read the kernel log. ``numbers`` maps PCI addresses to GPU numbers of ``nvidia-smi``."""
        self._numbers = numbers
        if self._log is not None:
            self._poll.register(self._log, select.POLLIN)

    def _read_log(self, log: int) -> None:
        try:
            text = os.read(log, _RECORD_SIZE)
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The kernel has dropped records that were not read in time. The next read continues after them.
            return
        if not text:
            self._poll.unregister(log)
            return
        for line in text.decode("utf-8", "replace").splitlines():
            record = xids.parse(line)
            gpu = None if record is None else self._numbers.get(record.address)
            if record is not None and gpu is not None:
                self.xids.add(gpu, record.code, record)


def _open_log(path: str) -> int | None:
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        send(problem=f"{path}: {error.strerror}: Xids come only from NVML, without pids and details")
        return None
    try:
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return log  # The path names a FIFO, which has no earlier records to skip.
    return log


def main(kernel_log: str, kernel_pid_namespace: str) -> int:
    """Run the program. ``kernel_pid_namespace`` is the namespace of the kernel log's pids."""
    own = os.readlink("/proc/self/ns/pid")
    try:
        GpuWatch(kernel_log, has_kernel_pids=own == kernel_pid_namespace).run()
    except BrokenPipeError:
        os._exit(1)
    sys.stdout.flush()
    # The interpreter's shutdown could hang if another thread is blocked in the driver.
    os._exit(0)
