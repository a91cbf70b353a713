"""The client of etcd v3 with faulty servers, connections, permissions and files."""

import datetime
import shutil
import socket
import ssl
import time
from contextlib import contextmanager

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from helpers import ports
from helpers.coordination import Client
from helpers.etcd_client import EtcdClient
from helpers.etcd_fixtures import serving as serving_etcd
from helpers.peers import answering, peer
from helpers.procs import HANG, wait_until

from elasticrs import _core
from elasticrs._core import Compare, Op

# --- sessions that cannot be opened ---


def ends(client, kind, text=""):
    """Check that the client's session ends for this reason, with a line that contains the text."""
    lost = client.lost()
    assert (lost.kind, text in lost.message, "\n" in lost.message) == (kind, True, False), lost.message


def refused(endpoints, kind, text="", *, prefix="/mine/x/", **options):
    client = EtcdClient(endpoints, prefix, **options)
    ends(client, kind, text)
    client.close()


@pytest.fixture
def lonely_etcd(tmp_path):
    """One server for one test."""
    yield from serving_etcd(tmp_path)


def test_a_restored_backup_ends_an_idle_session(lonely_etcd, tmp_path, connect_etcd):
    idle = connect_etcd(lonely_etcd.endpoints, "/r/", ttl=20.0, read_timeout=3.0).connected()
    idle.watch("key", exact=True)
    lonely_etcd.kill(0)
    shutil.copytree(lonely_etcd.data_of(0), tmp_path / "backup")
    lonely_etcd.mend()

    other = connect_etcd(lonely_etcd.endpoints, "/r/").connected()
    other.put("key")
    other.close()
    assert idle.changes() == [("key", b"")]
    lonely_etcd.kill(0)
    shutil.rmtree(lonely_etcd.data_of(0))
    shutil.copytree(tmp_path / "backup", lonely_etcd.data_of(0))
    lonely_etcd.mend()
    lost = idle.lost()
    # The session ends with the request's timeout, or with its lease if no keep-alive was answered before
    # that.
    assert (lost.kind in ("timeout", "silent"), "backup" in lost.message) == (True, True)


def test_endpoints_without_a_server_are_reported_as_refused():
    client = EtcdClient([("127.0.0.1", ports.free()), ("127.0.0.1", ports.free())], "/mine/x/")
    lost = client.lost()
    client.close()
    assert (lost.kind, lost.message.count("connection refused")) == ("refused", 2)


def test_an_unresolvable_host_name_is_reported():
    refused([("no-such-host.invalid", 2379)], "resolve")


def test_a_dead_endpoint_is_skipped(etcd, connect_etcd):
    endpoints = [("127.0.0.1", ports.free()), *etcd.server.endpoints]
    for _ in range(5):
        connect_etcd(endpoints, f"{etcd.prefix}/").connected()


def test_an_http_server_is_not_accepted_as_etcd():
    with answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as endpoint:
        refused([endpoint], "not_ours", "API v2")


def test_a_server_that_never_answers_causes_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refused([listener.getsockname()], "timeout", "0.3 s", connect_timeout=0.3)


def test_endpoints_of_different_clusters_are_refused(etcd, small, connect_etcd):
    client = connect_etcd([*etcd.server.endpoints, *small.endpoints], f"{etcd.prefix}/").connected()
    ends(client, "not_ours", "different clusters")


# --- TLS ---


def tls(files, **more):
    options = {"ca_cert": files.ca, "cert": files.cert, "key": files.key}
    return {"is_tls": True, **{name: path and str(path) for name, path in options.items()}, **more}


def test_a_client_with_a_certificate_can_connect(etcd_tls, authority, connect_etcd):
    files = authority.issue("client")
    client = connect_etcd(etcd_tls.server.endpoints, f"{etcd_tls.prefix}/", **tls(files)).connected()
    client.put("k", b"v")
    assert etcd_tls.keys()["/k"] == b"v"


@contextmanager
def serving_tls(cert, key=None):
    """A server that presents this certificate and then closes the connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])

    with peer(lambda connection: context.wrap_socket(connection, server_side=True).close()) as address:
        yield address


def test_a_ca_certificate_is_refused_as_a_server_certificate(tmp_path):
    ca = trustme.CA()
    file, pem = tmp_path / "ca.pem", tmp_path / "both.pem"
    ca.cert_pem.write_to_path(str(file))
    pem.write_bytes(ca.private_key_pem.bytes() + ca.cert_pem.bytes())
    with serving_tls(pem) as endpoint:
        refused([endpoint], "tls", "CA:TRUE", is_tls=True, ca_cert=str(file))


TODAY = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
DAY = datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("when", "says"),
    [({"not_before": TODAY + DAY}, "yet"), ({"not_after": TODAY - DAY}, "expired")],
    ids=["early", "expired"],
)
def test_a_certificate_outside_its_validity_period_is_refused_by_both_sides(etcd_tls, authority, when, says):
    # A wrong clock on either side would have the same effect.
    files = authority.issue(f"wrong time {says}", **when)
    with serving_tls(files.cert, files.key) as endpoint:
        refused([endpoint], "tls", says, is_tls=True, ca_cert=str(files.ca))
    refused(etcd_tls.server.endpoints, "tls", "refused", **tls(files))


def test_wrong_or_missing_certificates_are_refused(etcd_tls, authority, other_authority):
    files, endpoints = authority.issue("client"), etcd_tls.server.endpoints
    stranger = other_authority.issue("stranger")
    refused(endpoints, "tls", "authority", **tls(files, ca_cert=str(other_authority.ca)))
    refused(endpoints, "tls", "ask", **tls(files, cert=None, key=None))
    refused(endpoints, "tls", "refused", **tls(stranger, ca_cert=str(authority.ca)))


def test_files_without_certificates_are_named_in_the_error(tmp_path, authority):
    files = authority.issue("client")
    nothing = tmp_path / "nothing.pem"
    refused([("127.0.0.1", 1)], "tls", str(nothing), **tls(files, ca_cert=str(nothing)))
    nothing.write_text("nothing")
    for name in ("ca_cert", "cert", "key"):
        refused([("127.0.0.1", 1)], "tls", "nothing.pem", **tls(files, **{name: str(nothing)}))


def test_tls_on_only_one_side_is_reported(etcd, etcd_tls, authority):
    refused(etcd.server.endpoints, "tls", "TLS", **tls(authority.issue("client")))
    refused(etcd_tls.server.endpoints, "tls", "TLS")


# --- authentication ---


def test_a_user_can_access_keys_below_its_prefix(etcd_auth, connect_etcd):
    user = etcd_auth.server.user
    who = {"user": user.name, "password": user.password}
    client = connect_etcd(etcd_auth.server.endpoints, f"{etcd_auth.prefix}/", **who).connected()
    client.watch("", snapshot=True)
    client.put("k", b"v")
    assert client.changes() == [("k", b"v")]
    # Changing the password invalidates all tokens of the user.
    etcd_auth.server.ask("auth/user/changepw", name=user.name, password=user.password)
    client.put("k", b"w")
    assert client.changes() == [("k", b"w")]


def test_a_user_is_accepted_by_an_etcd_without_authentication(etcd, connect_etcd):
    connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/", user="u", password="p").connected()


@pytest.fixture(scope="module")
def jwt_etcd(tmp_path_factory):
    """A server that issues signed user tokens (JWT), which expire after two seconds."""
    folder = tmp_path_factory.mktemp("jwt")
    key = rsa.generate_private_key(65537, 2048)
    (folder / "private").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    (folder / "public").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    keys = f"pub-key={folder / 'public'},priv-key={folder / 'private'}"
    for server in serving_etcd(folder, 1, None, "--auth-token", f"jwt,{keys},sign-method=RS256,ttl=2s"):
        server.enable_auth("/mine/")
        yield server


def test_an_expired_jwt_is_renewed(jwt_etcd, connect_etcd):
    user = jwt_etcd.user
    who = {"user": user.name, "password": user.password}
    client = connect_etcd(jwt_etcd.endpoints, "/mine/", **who).connected()
    client.watch("", snapshot=True)
    for value in (b"1", b"2"):
        client.put("k", value)
        assert client.changes() == [("k", value)]
        # Wait until a token that is newer than the client's has expired.
        asked = jwt_etcd.ask("auth/authenticate", name=user.name, password=user.password)
        jwt_etcd.wait_until_stale(asked["token"])
    refused(jwt_etcd.endpoints, "denied", user=user.name, password="wrong")


# --- limits ---


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server that rejects large requests."""
    limits = ("--max-request-bytes", str(400_000))
    yield from serving_etcd(tmp_path_factory.mktemp("small"), 1, None, *limits)


def test_a_request_larger_than_the_server_limit_ends_the_session(small, connect_etcd):
    client = connect_etcd(small.endpoints, "large/").connected()
    send(client, Op.put("k", bytes(450_000), True))
    ends(client, "limit", "too large")


# --- broken connections ---


@pytest.fixture
def relay(etcd, relay_to):
    return relay_to(etcd.server.endpoints[0])


@pytest.fixture
def client(etcd, relay, connect_etcd):
    return connect_etcd([relay.endpoint], f"{etcd.prefix}/", ttl=30.0).connected()


def send(client, *ops, compares=()):
    client.tag += 1
    client.inner.txn(client.tag, list(compares), list(ops), [])


def test_a_write_whose_response_is_lost_is_applied_once(etcd, relay, client):
    client.put("seen", b"old")
    client.put("gone/1")
    relay.set(is_stalled_down=True)
    ops = [Op.put("k", b"v", True), Op.get("k"), Op.delete_prefix("gone/"), Op.delete("none")]
    ops += [Op.get("seen"), Op.range("", 1), Op.predecessor("", "seen")]
    send(client, *ops, compares=[Compare.missing("k")])
    wait_until(lambda: etcd.keys().get("/k"))
    etcd.server.ask("kv/put", key=f"{etcd.prefix}/seen", value="new")
    relay.reset()
    relay.set(is_stalled_down=False)
    reply = client.reply()
    one, got, gone, none, seen, (first,), predecessor = reply.results
    assert (reply.ok, one, got.value, gone, none, predecessor) == (True, 1, b"v", 1, 0, None)
    assert (got.mod_revision, seen.value, first.key) == (reply.revision, b"old", "k")
    assert client.txn([Compare.missing("k")]).ok is False


def test_a_write_that_never_arrived_is_applied_once(etcd, relay, client):
    relay.set(is_stalled_up=True)
    send(client, Op.put("k", b"v", True), compares=[Compare.missing("k")])
    relay.reset()
    relay.set(is_stalled_up=False)
    assert client.reply().ok
    assert etcd.keys()["/k"] == b"v"


def test_a_watch_has_no_gaps_or_repeats_after_connection_resets(etcd, relay, client, connect_etcd):
    other = connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/").connected()
    client.watch("w", snapshot=True)
    told = []
    for index in range(60):
        other.put("w", b"%d" % index)
        if index % 7 == 3:
            relay.reset()
    while len(told) < 60:
        told += client.changes()
    assert told == [("w", b"%d" % index) for index in range(60)]


def test_a_watch_reports_the_differences_after_a_compaction(etcd, relay, client, connect_etcd):
    other = connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/").connected()
    for key in ("stays", "changes", "goes", "comes again"):
        other.put(f"w/{key}")
    made = {each.key: each.create_revision for each in client.watch("w/", snapshot=True).results}
    relay.set(new="refuse")
    relay.reset()
    other.put("w/changes", b"1")
    other.txn(then=[Op.delete("w/goes"), Op.delete("w/comes again")])
    again = other.put("w/comes again", b"2")
    other.put("w/new", b"3")
    etcd.server.compact()
    relay.set(new="serve")
    changes = client.next(_core.Changes).changes
    assert sorted((each.key, each.value, each.create_revision) for each in changes) == [
        ("w/changes", b"1", made["w/changes"]),
        ("w/comes again", b"2", again),
        ("w/goes", None, made["w/goes"]),
        ("w/new", b"3", changes[-1].create_revision),
    ]
    other.put("w/new", b"4")
    assert client.changes() == [("w/new", b"4")]


def test_an_unanswered_session_ends_before_its_lease_expires(etcd, relay, connect_etcd):
    # The client gives up a fifth of the lease before its end. The test has to look at the key in this time.
    client = connect_etcd([relay.endpoint], f"{etcd.prefix}/", ttl=6.0).connected()
    client.put("mine", leased=True)
    relay.set(is_stalled_up=True, is_stalled_down=True)
    ends(client, "silent")
    assert etcd.keys().get("/mine") is not None
    wait_until(lambda: not etcd.keys())


def test_close_returns_soon_without_a_response(etcd, relay, client):
    relay.set(is_stalled_up=True)
    begun = time.monotonic()
    client.close()
    assert time.monotonic() - begun < HANG / 2


def test_a_request_without_a_response_in_time_ends_the_session(etcd, relay, connect_etcd):
    client = connect_etcd([relay.endpoint], f"{etcd.prefix}/", ttl=60.0, read_timeout=0.5).connected()
    relay.set(is_stalled_up=True)
    send(client, Op.get("k"))
    ends(client, "timeout", "within 0.5 s")


def test_a_request_waits_for_an_unreachable_etcd_while_the_lease_is_valid(etcd, relay, connect_etcd):
    client = connect_etcd([relay.endpoint], f"{etcd.prefix}/", ttl=60.0, read_timeout=0.5).connected()
    relay.set(is_stalled_up=True)
    relay.reset()
    Client.next(client, _core.StoreNotice)
    send(client, Op.get("k"))
    relay.set(is_stalled_up=False)
    assert "again" in Client.next(client, _core.StoreNotice).message
    assert client.reply().ok


def test_a_client_whose_events_are_not_read_loses_its_lease(etcd, connect_etcd):
    client = connect_etcd(etcd.server.endpoints, f"{etcd.prefix}/", ttl=2.0, stall_timeout=0.2).connected()
    client.put("mine", leased=True)
    wait_until(lambda: not etcd.keys())
    assert client.lost().kind == "silent"
