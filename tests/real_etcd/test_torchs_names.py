"""Use of the etcd rendezvous under torch's names, with a real etcd."""

from types import SimpleNamespace

import pytest

from elasticrs.rendezvous.api import RendezvousClosedError, RendezvousParameters
from elasticrs.rendezvous.etcd_rendezvous import EtcdRendezvous, EtcdRendezvousHandler, create_rdzv_handler


def test_the_legacy_etcd_rendezvous_of_torch_works(etcd):
    host, port = etcd.server.endpoints[0]
    client = SimpleNamespace(host=host, port=port, protocol="http")
    meeting = EtcdRendezvous(client, f"{etcd.prefix}/p2p", 1, 1, 1, 60, 30)
    handler = EtcdRendezvousHandler(meeting, None)
    assert (handler.get_backend(), handler.get_run_id()) == ("etcd", "1")
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("k", "v")
    assert info.store.get("k") == b"v"
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()
    late = EtcdRendezvousHandler(meeting)
    with pytest.raises(RendezvousClosedError):
        late.next_rendezvous()
    late.shutdown()


def test_an_etcd_rendezvous_handler_is_created_from_parameters(etcd):
    handler = create_rdzv_handler(
        RendezvousParameters("etcd", etcd.endpoint, "run", 1, 1, etcd_prefix=etcd.prefix)
    )
    assert handler.get_backend() == "etcd"
    assert handler.next_rendezvous().world_size == 1
    handler.set_succeeded()
    assert handler.shutdown()
