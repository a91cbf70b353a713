"""Runs the store in a separate process, and counts the bytes on its connections."""

import json
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from urllib.request import urlopen

from benchmarks.etcd_member import running
from benchmarks.scale.children import Lines, write_line
from elasticrs import _core

# Fields of struct tcp_info (linux/tcp.h, since 4.19): bytes received, bytes sent, and bytes retransmitted. Do
# not use the number of acknowledged bytes, because an acknowledgment may arrive 40 ms late, in the next
# phase.
BYTES = struct.Struct("=Q64xQQ")
BYTES_OFFSET = 128


def raise_descriptors() -> None:
    """Raise the limit of open file descriptors to the maximum that the kernel allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def traffic() -> dict[str, int]:
    """Return the bytes carried by this process's open connections, as counted by the kernel."""
    sent = received = count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in {socket.AF_INET, socket.AF_INET6}
                if not is_tcp or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_OFFSET + BYTES.size)
        except OSError:
            # The server has closed the connection in the meantime.
            continue
        got, out, again = BYTES.unpack_from(info, BYTES_OFFSET)
        sent += out - again
        received += got
        count += 1
    return {"connections": count, "sent": sent, "received": received}


def traffic_of_etcd(endpoint: str) -> dict[str, int]:
    """Return the bytes carried by an etcd server, as counted by etcd, without the overhead of
    HTTP/2 and TCP.
    """
    with urlopen(f"http://{endpoint}/metrics") as answer:
        values = dict(line.split(b" ") for line in answer.read().splitlines() if line.count(b" ") == 1)
    names = {way: f"etcd_network_client_grpc_{way}_bytes_total".encode() for way in ("sent", "received")}
    return {"connections": 0, **{way: int(float(values[name])) for way, name in names.items()}}


def serve_own(agents: int) -> None:
    """Run elasticrs's store in this process."""
    server = _core.CoordinationServer([("127.0.0.1", 0)], run_id="scale", max_connections=2 * agents + 64)
    write_line(1, {"port": server.port, "pid": os.getpid()})
    lines = Lines()
    while lines.is_open:
        for _ in lines.read():
            write_line(1, traffic())
    server.close()


def serve_etcd() -> None:
    """One member of etcd."""
    with running() as member:
        write_line(1, {"port": int(member.endpoint.rpartition(":")[2]), "pid": member.pid})
        lines = Lines()
        while lines.is_open:
            for _ in lines.read():
                write_line(1, traffic_of_etcd(member.endpoint))


class KeptStore:
    """Runs ``python -m elasticrs.store --state`` with its state file in ``folder``.

    Args:
        folder: for the file.
    """

    def __init__(self, folder: str) -> None:
        self._argv = [sys.executable, "-m", "elasticrs.store", "--host", "127.0.0.1"]
        self._argv += ["--state", f"{folder}/state"]
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        argv = [*self._argv, "--port", str(self.port)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2])

    def end(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()


def serve_kept() -> None:
    """Run elasticrs's store as a program that keeps its state. On command, kill it and start it again."""
    with tempfile.TemporaryDirectory() as folder:
        store = KeptStore(folder)
        write_line(1, {"port": store.port, "pid": store.process.pid})
        lines = Lines()
        while lines.is_open:
            for command in lines.read():
                if command["do"] == "restart":
                    killed = time.monotonic_ns()
                    store.end()
                    store.start()
                    write_line(1, {"killed": killed, "back": time.monotonic_ns(), "pid": store.process.pid})
                else:
                    # The store runs in another process, so its traffic cannot be counted here.
                    write_line(1, {"connections": 0, "sent": 0, "received": 0})
        store.end()


def main() -> None:
    raise_descriptors()
    arguments = json.loads(sys.argv[1])
    if arguments["store"] == "etcd":
        serve_etcd()
    elif arguments["store"] == "kept":
        serve_kept()
    else:
        serve_own(arguments["agents"])


if __name__ == "__main__":
    main()
