"""The launcher handles signals while a name server does not answer."""

import os
import signal
import socket

import pytest
from helpers import procs

pytestmark = pytest.mark.beyond_torchrun

SETUP = """
set -e
mount --bind "$1" /etc/resolv.conf
shift
exec "$@"
"""


@pytest.fixture
def name_server(tmp_path):
    """Yield a socket that receives DNS queries but never answers, and a command prefix that makes it the name
    server.
    """
    address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 53))
        conf = tmp_path / "resolv.conf"
        conf.write_text(f"nameserver {address}\noptions timeout:30 attempts:5\n")
        yield sock, ("unshare", "--mount", "sh", "-c", SETUP, "sh", str(conf))


@pytest.mark.parametrize(
    "where",
    [
        ("--rdzv-backend=c10d", "--rdzv-endpoint=store.example:29400"),
        ("--master-addr=store.example", "--node-rank=1"),
        ("--master-addr=store.example", "--node-rank=0"),
    ],
)
def test_a_signal_is_handled_during_name_resolution(launch, worker_script, name_server, where):
    sock, prefix = name_server
    launched = launch("--nnodes=2", *where, worker_script("print('never')"), prefix=prefix)
    assert procs.wait_readable(sock.fileno())
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert launched.stdout == ""
