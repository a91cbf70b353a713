"""The etcd servers for the tests behave as their fixtures document."""

import base64
import http.client
import ssl

import pytest
from helpers import procs


def put(server, key, value="", at=0, **more):
    return server.ask("kv/put", at=at, key=key, value=value, **more)


def test_each_test_has_its_own_prefix(etcd):
    put(etcd.server, f"{etcd.prefix}/k", "v")
    assert etcd.keys() == {"/k": b"v"}
    assert etcd.endpoint == f"127.0.0.1:{etcd.server.members[0].port}"


def test_leases_end(etcd):
    lease = etcd.server.ask("lease/grant", TTL=60)["ID"]
    put(etcd.server, f"{etcd.prefix}/k", lease=lease)
    assert lease in etcd.server.leases()
    etcd.server.ask("lease/revoke", ID=lease)
    assert not etcd.keys()


def test_old_revisions_are_forgotten(etcd):
    revision = put(etcd.server, f"{etcd.prefix}/k")["header"]["revision"]
    put(etcd.server, f"{etcd.prefix}/k")
    etcd.server.compact()
    etcd.server.defragment()
    with pytest.raises(AssertionError, match="required revision has been compacted"):
        etcd.server.ask("kv/range", key=f"{etcd.prefix}/k", revision=revision)


def test_members_die_stop_and_come_back(etcd_cluster):
    server = etcd_cluster.server
    leader = server.leader()
    server.kill(leader)
    other = next(index for index in range(3) if index != leader)
    server.wait_healthy(other)
    put(server, f"{etcd_cluster.prefix}/k", "1", at=other)
    server.stop(other)
    assert not server.is_healthy(other)
    server.mend()
    assert server.get(etcd_cluster.prefix, at=leader) == {f"{etcd_cluster.prefix}/k": b"1"}


def test_the_next_test_finds_all_members(etcd_cluster):
    assert all(etcd_cluster.server.is_healthy(index) for index in range(3))
    etcd_cluster.server.kill(0)


def test_a_certificate_of_the_authority_is_wanted(etcd_tls, other_authority):
    put(etcd_tls.server, f"{etcd_tls.prefix}/k", "v")
    assert etcd_tls.keys() == {"/k": b"v"}
    context = ssl.create_default_context(cafile=str(etcd_tls.server.files.ca))
    context.load_cert_chain(*other_authority.issue("stranger")[1:])
    host, port = etcd_tls.server.endpoints[0]
    connection = http.client.HTTPSConnection(host, port, timeout=procs.HANG, context=context)

    def ask():
        connection.request("GET", "/version")
        connection.getresponse()

    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask()
    connection.close()


def test_a_user_may_touch_only_its_own_prefix(etcd_auth):
    server = etcd_auth.server
    login = server.ask("auth/authenticate", name=server.user.name, password=server.user.password)

    def status(key):
        host, port = server.endpoints[0]
        connection = http.client.HTTPConnection(host, port, timeout=procs.HANG)
        body = f'{{"key": "{base64.b64encode(key.encode()).decode()}"}}'
        connection.request("POST", "/v3/kv/put", body, {"Authorization": login["token"]})
        answer = connection.getresponse().status
        connection.close()
        return answer

    assert status(f"{etcd_auth.prefix}/k") == 200
    assert status("/other/k") != 200
    assert etcd_auth.keys() == {"/k": b""}
