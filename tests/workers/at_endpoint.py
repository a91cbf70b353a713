"""A worker that connects as a client of torch's TCPStore to HOST PORT instead of MASTER_ADDR and MASTER_PORT.
HOST PORT are its arguments, or the value of the variable ENDPOINT. The worker waits for all ranks, and prints
the attempt that each rank has published. With the argument RESTART, rank 0 fails in the first attempt.
"""

import os
import socket
import struct
import sys

host, port, *how = sys.argv[1:] or os.environ["ENDPOINT"].split()
rank, world, attempt = (
    int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
)


def field(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


names = [field(b"/rank%d" % each) for each in range(world)]
with socket.create_connection((host, int(port)), timeout=60) as store:
    replies = store.makefile("rb")
    store.sendall(b"\0\xce\xf7\x85\x3c" + b"\r" + struct.pack("<I", os.getpid()))
    assert replies.read(4) == struct.pack("<I", os.getpid())
    store.sendall(b"\x01" + names[rank] + field(b"%d" % attempt))
    # Wait for the keys of all ranks, and read them.
    store.sendall(b"\x06" + struct.pack("<Q", world) + b"".join(names))
    assert replies.read(1) == b"\0"
    values = []
    for name in names:
        store.sendall(b"\x03" + name)
        (length,) = struct.unpack("<Q", replies.read(8))
        values.append(replies.read(length).decode())
    # Count the workers that have read all values. Read the reply before closing the connection.
    store.sendall(b"\x04" + field(b"/seen") + struct.pack("<q", 1))
    replies.read(8)
os.write(1, f"SEEN rank={rank} attempt={attempt} values={','.join(values)}\n".encode())
if how == ["RESTART"] and attempt == 0 and rank == 0:
    sys.exit(1)
