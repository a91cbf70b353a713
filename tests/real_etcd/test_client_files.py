"""The etcd client when the file system with its certificates hangs.

The tests replace the certificate by a FIFO, because opening a FIFO blocks until it is opened for writing.
"""

import errno
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from helpers.etcd_client import EtcdClient, names_of_threads
from helpers.procs import HANG, wait_until

from elasticrs import _core

READER = "elasticrs-tls\n"


class HungCertificate:
    """A client certificate whose file blocks readers from :meth:`hang` until :meth:`answer`."""

    def __init__(self, files):
        self.options = {
            "is_tls": True,
            "ca_cert": str(files.ca),
            "cert": str(files.cert),
            "key": str(files.key),
        }
        self.path, self._content = files.cert, files.cert.read_bytes()

    def hang(self):
        self.path.unlink()
        os.mkfifo(self.path)

    def answer(self):
        """Make the file readable again, and release the thread that is blocked in it."""
        fifo = self.path.with_suffix(".hung")
        self.path.rename(fifo)
        self.path.write_bytes(self._content)
        while READER in names_of_threads():
            try:
                writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                # Retry, because the reader has not opened the FIFO yet, or has closed it.
                continue
            os.write(writer, self._content)
            os.close(writer)
            break
        wait_until(lambda: READER not in names_of_threads(), bool)


@pytest.fixture
def certificate(authority, request) -> Iterator[HungCertificate]:
    made = HungCertificate(authority.issue(request.node.name.replace("/", "_")))
    yield made
    if made.path.is_fifo():
        made.answer()


@pytest.fixture
def relay(etcd_tls, relay_to):
    return relay_to(etcd_tls.server.endpoints[0])


def wait_until_it_hangs():
    wait_until(lambda: READER in names_of_threads(), bool)


def test_the_lease_expires_and_workers_stop_while_a_certificate_read_hangs(
    etcd_tls, relay, certificate, connect_etcd, group
):
    supervisor = group.supervisor
    client = connect_etcd(
        [relay.endpoint], f"{etcd_tls.prefix}/", ttl=5.0, supervisor=supervisor, **certificate.options
    ).connected()
    group.start(["sleep", "inf"], ["sleep", "inf"])
    certificate.hang()
    relay.reset()
    wait_until_it_hangs()
    lost = client.lost()
    assert lost.kind == "silent", lost
    supervisor.fence_at(None)
    supervisor.stop(_core.StopPolicy(signal.SIGKILL, 0.0))
    group.end()
    # There is only one thread, although the client has retried several times.
    assert names_of_threads().count(READER) == 1
    client.close()


def test_the_session_continues_when_the_certificate_can_be_read_again(
    etcd_tls, relay, certificate, connect_etcd
):
    client = connect_etcd(
        [relay.endpoint], f"{etcd_tls.prefix}/", ttl=120.0, **certificate.options
    ).connected()
    certificate.hang()
    relay.reset()
    wait_until_it_hangs()
    certificate.answer()
    client.put("k", b"v")
    assert etcd_tls.keys()["/k"] == b"v"


@pytest.mark.parametrize("begun", [True, False], ids=["a session", "the first connection"])
def test_close_returns_while_a_certificate_read_hangs(etcd_tls, relay, certificate, begun):
    if not begun:
        certificate.hang()
    client = EtcdClient([relay.endpoint], f"{etcd_tls.prefix}/", ttl=120.0, **certificate.options)
    if begun:
        client.connected()
        certificate.hang()
        relay.reset()
    wait_until_it_hangs()
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(HANG)
    assert not closing.is_alive()


def test_a_connect_timeout_names_the_certificate_file_that_hangs(etcd_tls, certificate, connect_etcd):
    certificate.hang()
    client = connect_etcd(
        etcd_tls.server.endpoints, f"{etcd_tls.prefix}/", connect_timeout=0.5, **certificate.options
    )
    lost = client.lost()
    assert (lost.kind, certificate.options["cert"] in lost.message) == ("timeout", True), lost
