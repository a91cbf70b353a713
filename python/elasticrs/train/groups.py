"""Process groups whose collectives can be aborted by a watching thread.

Gloo cannot abort a collective. But if a group's TCP connections are shut down, the collective fails at once,
here and on the peers. :class:`Connections` records these connections, by their inodes, while a group is
created. If a peer has died before it connected, :meth:`Connections.knock` connects in its place.

- **GROUPS-1** a listening socket is never shut down, because gloo ends the process if ``accept`` fails.
- **GROUPS-2** other threads may close and reuse a descriptor at any moment. Therefore it is duplicated, and
  only a duplicate with the right inode is shut down and closed.
- **GROUPS-3** other connections that are opened while a group is created are shut down only as a last resort
  (:meth:`Connections.shut_others`), with a warning.
- **GROUPS-4** torch's counter for group names is reset before each group, because ranks with different
  prefixes in the store would never find each other after a failed attempt.
"""

from __future__ import annotations

import datetime
import fcntl
import functools
import os
import resource
import socket
import stat
import struct
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from elasticrs._engine.workers.plan import NCCL_ENDS_PROCESSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from torch.distributed import ProcessGroup

_ESTABLISHED, _SYN_SENT, _CLOSE_WAIT, _LISTEN = 1, 2, 8, 10
LAST_RESORT = 4.0
"""Seconds before :meth:`shut_others`, more than :data:`CONNECT_TIMEOUT`: connecting cannot be aborted."""

_TALKING = {_ESTABLISHED, _SYN_SENT, _CLOSE_WAIT}
"""TCP states in which a shutdown aborts communication. LISTEN is excluded because of GROUPS-1."""


class Connections:
    """TCP connections of this worker's process groups. ``store_port``: port of their store. Thread-safe."""

    def __init__(self, store_port: int | None = None) -> None:
        self._store_port = store_port
        self._recorded: set[int] = set()
        self._others: set[int] = set()
        self._connected: set[int] = set()
        self._before: set[int] | None = None
        self._knocked: set[int] = set()
        self._recording_since: float | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the sockets of the process group that is created in the block."""
        self._before = before = set(_sockets())
        self._recording_since = time.monotonic()
        try:
            yield
        finally:
            made = {inode: fd for inode, fd in _sockets().items() if inode not in before}
            recorded = {inode for inode, fd in made.items() if self._is_of_group(fd, inode)}
            self._recorded |= recorded
            self._others |= made.keys() - recorded
            self._connected |= {inode for inode in recorded if _is_connected(made[inode], inode)}
            self._before = self._recording_since = None

    def _is_of_group(self, fd: int, inode: int) -> bool:
        """Return true if a socket belongs to a process group: gloo opened it, or it is a connection to the
        round's store. Gloo's sockets can be recognized, because they have ``SO_REUSEADDR`` but not
        close-on-exec, unlike those of nearly every other library.
        """
        try:
            is_kept_by_exec = not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        except OSError:
            return False
        with _duplicate(fd, inode) as found:
            if found is None:
                return False
            if is_kept_by_exec and found[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                return True
            with suppress(OSError):
                return self._store_port is not None and found[0].getpeername()[1] == self._store_port
        return False

    def are_intact(self) -> bool:
        """Return true if all recorded connections are known to be open. Then no peer has exited."""
        try:
            sockets = _sockets()
        except OSError:
            return False
        return all(inode in sockets and _is_connected(sockets[inode], inode) for inode in self._connected)

    def leave_to_parent(self, ports: set[int]) -> None:
        """In a forked child, replace the sockets of groups and those on ``ports`` with ``/dev/null``.
        Otherwise, the parent's peers would not notice its death while a child lives.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for inode, fd in _sockets().items():
            if inode in self._recorded or _ports(fd) & ports:
                os.dup2(null, fd, inheritable=False)
        os.close(null)

    def knock(self, world_size: int) -> int:
        """Unblock the main thread if it waits for dead peers while a gloo group is created. Connect once for
        each peer, and send the peer's number, as gloo does. Return the number of listening sockets that were
        connected to. Do nothing if file descriptors could run out, or without TCP.
        """
        before, sockets = self._before, _sockets()
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        is_plain = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") in ("", "TCP")
        if before is None or room < 2 * world_size or not is_plain:
            return 0
        count = 0
        for inode, fd in sockets.items():
            if inode in before or inode in self._knocked or not self._is_of_group(fd, inode):
                continue
            with _duplicate(fd, inode) as found:
                if found is None or found[1] != _LISTEN:
                    continue
                family, address = found[0].family, found[0].getsockname()
            self._knocked.add(inode)
            count += 1
            _knock(family, address, world_size)
        return count

    def shut(self) -> int:
        """Shut down the connections of the process groups. Return their number."""
        before, recorded = self._before, self._recorded
        return sum(
            _shut(fd, inode) is not None
            for inode, fd in _sockets().items()
            if inode in recorded
            or (before is not None and inode not in before and self._is_of_group(fd, inode))
        )

    def needs_last_resort(self, began: float, limit: float) -> bool:
        """Return true if :meth:`shut`, first called at ``began``, has not unblocked the main thread."""
        now, since = time.monotonic(), self._recording_since
        if since is not None:
            return now - max(began, since) > LAST_RESORT
        # If no group is being created, the main thread may just be running a long training step.
        return now - began > limit / 2

    def shut_others(self) -> list[str]:
        """Shut down other connections opened during a group's creation. Return the addresses of the peers."""
        before, recorded, peers = self._before, self._recorded, []
        for inode, fd in _sockets().items():
            is_new = before is not None and inode not in before
            if inode not in recorded and (is_new or inode in self._others):
                peer = _shut(fd, inode)
                if peer is not None:
                    peers.append(peer)
        return peers


def _sockets() -> dict[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found


def _ports(fd: int) -> set[int]:
    found: set[int] = set()
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            found.add(duplicate.getsockname()[1])
            found.add(duplicate.getpeername()[1])
    return found


@contextmanager
def _duplicate(fd: int, inode: int) -> Iterator[tuple[socket.socket, int] | None]:
    """Yield a duplicate of a TCP socket, and its TCP state; ``None`` if the descriptor was reused."""
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:
        yield None
        return
    with duplicate:
        try:
            state = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            state = -1
        yield (duplicate, state) if os.fstat(duplicate.fileno()).st_ino == inode else None


def _is_connected(fd: int, inode: int) -> bool:
    with _duplicate(fd, inode) as found:
        return found is not None and found[1] == _ESTABLISHED


def _shut(fd: int, inode: int) -> str | None:
    """Shut down a connection. Return the address of its other end; ``None`` if it is no longer connected."""
    with _duplicate(fd, inode) as found, suppress(OSError):
        if found is None or found[1] not in _TALKING:
            return None
        peer = "an unknown peer"
        with suppress(OSError):
            host, port, *_ = found[0].getpeername()
            peer = f"{host} port {port}"
        found[0].shutdown(socket.SHUT_RDWR)
        return peer
    return None


def _knock(family: int, address: Any, count: int) -> None:
    for number in range(count):
        with suppress(OSError), socket.socket(family) as visitor:
            # The kernel accepts the connection immediately, unless the listener's queue is full.
            visitor.settimeout(0.1)
            visitor.connect(address)
            visitor.sendall(struct.pack("=q", number))


MEETING_TIMEOUT = 10.0
"""Limit in seconds (plus 0.1 per worker) for creating a group. Nothing else ends the wait for a dead peer."""

CONNECT_TIMEOUT = 3.0
"""Limit in seconds for connecting torch's store client, which cannot be interrupted while it retries."""


def connect(host: str, port: int, is_broken: Callable[[], bool]) -> Any:
    """Return torch's store client once the store is reachable. Raise ``RuntimeError`` if it is not."""
    deadline = time.monotonic() + MEETING_TIMEOUT
    while True:
        # Check first, because torch's client would retry until its timeout and cannot be interrupted.
        try:
            socket.create_connection((host, port), 1.0).close()
            break
        except OSError as error:
            if is_broken():
                raise RuntimeError("the round has ended before its store was reached") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"no store at {host}:{port}: {error}") from error
        time.sleep(0.01)
    from torch import distributed

    store = distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, None, False, timeout=datetime.timedelta(seconds=CONNECT_TIMEOUT), wait_for_workers=False
    )
    store.set_timeout(datetime.timedelta(seconds=MEETING_TIMEOUT))
    return store


_hooks: list[Any] = []
"""The ``sys.excepthook`` that torch set with the process group, and the previous hook."""


_helper: list[Any] = []
"""Torch's original function for creating a group, if :func:`record_further_groups` has replaced it."""


def record_further_groups(connections: Connections) -> None:
    """Record the connections of all groups that the program creates later, also those of a device mesh."""
    from torch.distributed import distributed_c10d as c10d

    helper = getattr(c10d, "_new_process_group_helper", None)
    if helper is None or _helper:
        return

    @functools.wraps(helper)
    def recording(*arguments: Any, **options: Any) -> Any:
        with connections.recorded():
            return helper(*arguments, **options)

    _helper.append(helper)
    c10d._new_process_group_helper = recording


def create(backend: str, store: Any, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    """Create the default process group within a short time limit. ``timeout`` is for collectives."""
    from torch import distributed

    if "nccl" in backend:
        # Keep torch's NCCL watchdog from ending the process (see torch's `_abort_process_group`).
        os.environ.setdefault(NCCL_ENDS_PROCESSES, "0")
    _reset_names()
    hook = sys.excepthook
    first = min(timeout, datetime.timedelta(seconds=MEETING_TIMEOUT + world_size / 10))
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=first)
    _hooks[:] = [sys.excepthook, hook]
    store.set_timeout(timeout)
    if first != timeout:
        # Before torch 2.14, only the private name of this function exists.
        getattr(distributed, "set_timeout", distributed.distributed_c10d._set_pg_timeout)(timeout)


def destroy() -> None:
    """Destroy all of torch's process groups in this process. Do nothing if torch has not been imported."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    if _helper:
        distributed.distributed_c10d._new_process_group_helper = _helper.pop()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if _hooks and sys.excepthook is _hooks[0]:
        # Remove the destroyed group's exception hook. Each group adds one, which prints the group's rank.
        sys.excepthook = _hooks[1]
    _hooks.clear()
    _reset_names()


def abort() -> None:
    """Abort the collectives of all NCCL groups from any thread. Gloo's connections are shut down instead. A
    single call aborts all groups, because communicators that are aborted one by one wait for each other.
    """
    from torch import distributed

    if distributed.is_initialized():
        distributed.distributed_c10d._abort_process_group()


def _reset_names() -> None:
    from torch.distributed import distributed_c10d

    distributed_c10d._world.group_count = 0


_COLLECTIVES = (
    *("allgather", "allgather_into_tensor_coalesced", "_allgather_base", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv"),
    *("recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)
"""Collectives that raise an error in a forked child of a worker, where they would block forever."""

_kept: list[Any] = []
"""In a forked child, its copies of its parent's groups. A destructor would wait for threads of the parent."""


forks = 0
"""Number of forks between the process that first called :func:`refuse_in_forked_children` and this one."""


def not_a_worker(worker: int) -> str:
    """Return the error for a forked child of the worker with this pid, if the child acts as a worker."""
    return f"this process was forked from worker {worker} during the training, so it is not a worker"


@functools.cache
def refuse_in_forked_children() -> None:
    """Make torch's collectives raise ``RuntimeError`` in all children that this process forks from now on."""
    os.register_at_fork(after_in_child=_refuse)


def _refuse() -> None:
    global forks  # noqa: PLW0603 -- of this process
    forks += 1
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    group = None if c10d is None else c10d.GroupMember.WORLD
    if group is None or group in _kept:
        return
    refusing = _refusing(group)
    # Queries for the rank, size or backend must still work.
    for table in (
        *(c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks),
        *(c10d._world.pg_backend_config, c10d._world.pg_to_tag),
    ):
        if group in table:
            table[refusing] = table[group]
    _kept.extend((group, refusing))
    c10d.GroupMember.WORLD = refusing


def _refusing(group: ProcessGroup) -> ProcessGroup:
    from torch.distributed import ProcessGroup

    worker = os.getppid()

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(not_a_worker(worker))

    kind = type("_Refusing", (ProcessGroup,), dict.fromkeys(_COLLECTIVES, refuse))
    made: ProcessGroup = kind(group.rank(), group.size())
    return made
