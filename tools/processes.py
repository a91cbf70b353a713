"""Read the processes and threads of running jobs, and what connects them, from ``/proc``.

``tools/pictures.py`` draws the pictures of the architecture from the result.
"""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

WORKER = """
import signal
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
signal.pause()
"""
"""Program of the workers: joins a process group, reports that, and waits."""

NODES = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --nproc-per-node 1 --rdzv-conf"
JOBS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "cold": (2, ("--standalone --nproc-per-node 2",)),
    "warm": (2, ("--standalone --nproc-per-node 2 --warm auto",)),
    "two-nodes": (2, (f"{NODES} is_host=1,order_hint=0", f"{NODES} is_host=0,order_hint=1")),
}
"""For each picture, the number of workers, and the options of each node's launcher."""


SHARED = (
    (r"pipe:", "pipe"),
    (r"socket:", "copy of its connection"),
    (r"/memfd:(?:elasticrs-fence|nursery-activity) ", "shared memory"),
    (r"/memfd:elasticrs-keep ", "kept state"),
    (r".*/std(?:out|err)\.log$", "log files"),
)
"""What two processes share if both have a descriptor that leads to this."""


class Facts(NamedTuple):
    """What was seen of a job.

    Args:
        processes: the names of each process's threads, by what the process is, such as ``agent 1``.
        links: what connects two processes, by their names, such as ``pipe``. A link that one process has to
            another one is in the order in which they stand: a pidfd of the first one for the second one.
    """

    processes: dict[str, list[str]]
    links: list[tuple[str, str, str]]


def facts_of(name: str, worker: str = WORKER) -> Facts:
    """Run the job of a picture, and read its processes when each worker has printed ``ready``."""
    workers, nodes = JOBS[name]
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        script = Path(folder, "train.py")
        script.write_text(worker, encoding="utf-8")
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("ELASTICRS_", "PET_"))},
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
        }
        elasticrun = str(Path(sys.executable).with_name("elasticrun"))
        lines, output = os.pipe()
        launchers = [
            subprocess.Popen(
                [
                    *(elasticrun, *options.format(port=port).split()),
                    *("--log-dir", f"{folder}/logs", "--redirects", "3", "--tee", "3", str(script)),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for options in nodes
        ]
        os.close(output)
        with os.fdopen(lines, encoding="utf-8") as read:
            try:
                for _ in range(workers):
                    assert any("ready" in line for line in read), f"the job of {name} has ended too early"
                return facts([launcher.pid for launcher in launchers])
            finally:
                for launcher in launchers:
                    launcher.send_signal(signal.SIGTERM)
                for launcher in launchers:
                    launcher.wait()


def facts(agents: Sequence[int]) -> Facts:
    """Read the processes of a job, given the pids of its agents."""
    names = dict(_named(agents))
    threads = {
        name: sorted({(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()})
        for pid, name in names.items()
    }
    peers, connections = _peers(), _connections()
    held = {name: dict(_descriptors(pid)) for pid, name in names.items()}
    links = set()
    for (one, ones), (other, others) in combinations(held.items(), 2):
        # A nursery holds a copy of its agent's connection, so that the connection outlives the agent.
        are_ends = not {"nursery", "sentinel"} & {one.split()[0], other.split()[0]}
        for target, inode in ones.items():
            if inode in peers and peers[inode] in others.values():
                links.add((one, other, "socket pair"))
            if are_ends and inode in connections and connections[inode] in others.values():
                links.add((one, other, "TCP"))
            if target in others:
                links.update((one, other, kind) for pattern, kind in SHARED if re.match(pattern, target))
    pidfds = {f"pidfd:{pid}": name for pid, name in names.items()}
    for name, descriptors in held.items():
        links.update((name, pidfds[each], "pidfd") for each in descriptors.keys() & pidfds.keys())
    return Facts(threads, sorted(links))


def _named(agents: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the pid and the name of each process: agents, nurseries, sentinels and ranks."""
    for number, agent in enumerate(agents, 1):
        node = f" {number}" if len(agents) > 1 else ""
        yield agent, f"agent{node}"
        for child in _children(agent):
            is_sentinel = Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"worker-nursery\0!")
            yield child, f"{'sentinel' if is_sentinel else 'nursery'}{node}"
            for worker in _children(child):
                environment = Path(f"/proc/{worker}/environ").read_bytes().decode(errors="replace")
                rank = re.search(r"(?:^|\0)RANK=(\d+)", environment)
                yield worker, f"rank {rank[1] if rank else '?'}"


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def _descriptors(pid: int) -> Iterator[tuple[str, int]]:
    """Yield what each file descriptor of a process leads to, and the inode of a socket, otherwise 0."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("pipe:") and target == os.readlink(f"/proc/{pid}/fd/1"):
            continue  # the console
        if target == "anon_inode:[pidfd]":
            about = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text()
            target = f"pidfd:{about.partition('Pid:')[2].split()[0]}"
        if target.startswith("/memfd:"):
            target = f"{target} {descriptor.stat().st_ino}"
        is_socket = re.fullmatch(r"socket:\[(\d+)\]", target)
        yield target, int(is_socket[1]) if is_socket else 0


def _connections() -> dict[int, int]:
    """Return the inode of the peer of each end of a TCP connection within this machine, by its inode."""
    ends = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text("ascii").splitlines()[1:]:
            _, one, other, state, *_, inode = row.split()[:10]
            if state == "01":
                # The last digits of an IPv4 address that is written as an IPv6 address are the IPv4 address.
                ends[one[-13:], other[-13:]] = int(inode)
    return {inode: ends[end[::-1]] for end, inode in ends.items() if end[::-1] in ends}


def _peers() -> dict[int, int]:
    """Ask the kernel for the inode of the peer of each Unix socket, by its inode."""
    by_family, done, peer = 20, 3, 2  # SOCK_DIAG_BY_FAMILY, NLMSG_DONE, UNIX_DIAG_PEER
    everything = 0xFFFFFFFF
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, everything, 0, 4, everything, everything)
    head = struct.pack("=IHHII", 16 + len(request), by_family, 0x301, 1, 0)
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:
        kernel.send(head + request)
        while True:
            answer = kernel.recv(1 << 16)
            while answer:
                size, kind = struct.unpack_from("=IH", answer)
                if kind == done:
                    return found
                (inode,) = struct.unpack_from("=I", answer, 20)
                at = 32
                while at < size:
                    length, attribute = struct.unpack_from("=HH", answer, at)
                    if attribute == peer:
                        (found[inode],) = struct.unpack_from("=I", answer, at + 4)
                    at += (length + 3) & ~3
                answer = answer[(size + 3) & ~3 :]
