"""The reserved port, and counting devices without torch."""

import socket

import pytest

from elasticrs.devices import cuda_device_count
from elasticrs.ports import ReservedPort


@pytest.fixture
def port():
    reserved = ReservedPort()
    yield reserved.number
    reserved.close()


def test_a_reserved_port_is_refused_to_others(port):
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_a_reserved_port_does_not_listen(port):
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_store_that_reuses_addresses_can_listen_on_it(port, family):
    with socket.socket(family) as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            store.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        store.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        store.listen()
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_closing_gives_the_port_back():
    reserved = ReservedPort()
    reserved.close()
    reserved.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", reserved.number))


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1234,GPU-5678"}, 2),
    ],
)
def test_devices_are_counted_as_cuda_shows_them(tmp_path, environ, count):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert cuda_device_count(environ, driver=str(tmp_path / "no"), dev=str(tmp_path)) == count


def test_the_drivers_own_list_comes_first(tmp_path):
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert cuda_device_count({}, driver=str(tmp_path / "gpus"), dev=str(tmp_path)) == 1
    assert (
        cuda_device_count({"CUDA_VISIBLE_DEVICES": "0"}, driver=str(tmp_path / "no"), dev=str(tmp_path)) == 0
    )
