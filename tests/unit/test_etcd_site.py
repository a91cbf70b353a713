"""The etcd settings of the command line and of the Python API. Invalid settings are tested in
test_usage_errors.py.
"""

import os
import re

import pytest

from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import parse
from elasticrs._engine.nodes.describe import PYTHON, describe
from elasticrs._engine.nodes.transport.etcd_site import EXPECTED, NAMES, lease_of
from elasticrs._engine.nodes.transport.settings import KEYS
from elasticrs.rendezvous import RendezvousParameters
from elasticrs.rendezvous.api import rendezvous_handler_registry
from elasticrs.rendezvous.registry import get_rendezvous_handler


@pytest.fixture
def file(tmp_path):
    def file(name, data=b"x", mode=0o600):
        path = tmp_path / name
        path.write_bytes(data)
        path.chmod(mode)
        return str(path)

    return file


def described(endpoint="a", backend="etcd", nodes=(1, 2), environ=None, **config):
    return describe(backend, endpoint, "j", nodes, config, environ or {}, words=PYTHON)


def site(endpoint="a", **config):
    return described(endpoint, **config)[0].etcd


def mistake(endpoint="a", **config):
    with pytest.raises(UsageError) as raised:
        described(endpoint, **config)
    return str(raised.value)


# --- what there is ---


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("a", (False, ("a", 2379))),
        ("a:1, b , [::1]:3", (False, ("a", 1), ("b", 2379), ("::1", 3))),
        ("http://a:1/,http://[fd00::1]", (False, ("a", 1), ("fd00::1", 2379))),
        ("https://a,HTTPS://b:7,https://a", (True, ("a", 2379), ("b", 7))),
    ],
)
def test_etcd_endpoints_are_parsed(endpoint, found):
    made = site(endpoint)
    assert (made.is_tls, *made.endpoints) == found


def test_an_etcd_rendezvous_has_the_expected_defaults():
    met, notices = described("a,[::1]:3")
    assert (met.backend, met.host, met.port, met.endpoint) == ("etcd", "a", 2379, "a:2379,[::1]:3")
    assert met.store == "etcd at a:2379,[::1]:3"
    assert (met.etcd.prefix, met.etcd.read_timeout, notices) == ("/torchelastic/p2p", 60, [])
    assert (met.settings.ttl, met.settings.join_timeout) == (5, 600)


def test_setting_names_of_both_etcd_backends_of_torch_are_accepted(file):
    ca, cert, key = file("ca"), file("cert"), file("key")
    v2 = site(protocol="HTTPS", ca_cert=ca, ssl_cert=cert, ssl_cert_key=key, read_timeout="7")
    assert (v2.is_tls, v2.ca_cert, v2.cert, v2.key, v2.read_timeout) == (True, ca, cert, key, 7)
    first = site("https://a", cacert=ca, cert=cert, key=key, etcd_prefix="/mine/", timeout=9)
    assert first == v2.replaced(prefix="/mine", read_timeout=60)
    assert site(etcd_prefix="/").prefix == ""
    assert site("https://a", cert=cert).key == cert
    assert described(timeout=900, last_call_timeout=3)[0].settings.join_timeout == 900
    assert described(timeout=900, join_timeout=8)[0].settings.join_timeout == 8


def test_all_etcd_backend_names_are_equivalent_and_v2_causes_a_notice():
    assert described(backend="etcd-v3") == described()
    met, (notice,) = described(backend="etcd-v2")
    assert met == described()[0]
    assert notice.startswith("rdzv_backend etcd-v2: ")


def test_the_lease_ttl_follows_from_the_settings():
    met = described(lease_ttl="8")[0]
    assert (met.settings.ttl, met.etcd.ttl) == (8, 8)
    assert met.settings.settle == 30 + 2 * 8 + 5
    assert described(store_grace="8")[0].replaced(config=met.config) == met


def test_the_etcd_password_is_read_from_a_file_and_never_shown(file):
    path = file("password", b"p\xc3\xa4ss\r\n")
    met, notices = described("https://a", user="u", password_file=path)
    assert (met.etcd.user, met.etcd.password, notices) == ("u", "päss", [])
    assert "päss" not in repr(met)
    assert "user='u', password=<secret>" in repr(met.etcd)
    (clear,) = described("localhost,a", user="u", password_file=path)[1]
    assert clear.endswith("https")
    assert described("localhost,127.0.0.1", user="u", password_file=path)[1] == []
    os.chmod(path, 0o644)
    (shared,) = described("https://a", user="u", password_file=path)[1]
    assert shared.endswith(f"chmod o-rwx {path}")


def test_settings_without_effect_are_reported():
    _, notices = described(is_host=1, keep_alive_interval=5, keep_alive_max_attempt=3, token="t")
    settings, token = notices
    assert re.search("is_host, keep_alive_interval, keep_alive_max_attempt: .*lease_ttl", settings)
    assert "token" in token
    assert described(environ={"ELASTICRS_TOKEN": "t"})[1] == notices[1:]


def test_a_single_node_needs_no_etcd():
    assert described("", nodes=(1, 1)) == (None, [])
    assert mistake("", nodes=(1, 1), protocol="ftp").startswith("rdzv_configs: protocol: got 'ftp'")
    assert described("a", nodes=(1, 1))[0].max_nodes == 1


def test_each_job_has_its_own_positive_lease_id():
    assert lease_of("a") == lease_of("a") != lease_of("b")
    assert all(0 < lease_of(str(number)) < 2**63 for number in range(100))


# --- mistakes ---


@pytest.mark.parametrize(
    "endpoint", ["http://a,b", "ftp://a", "a:0", "unix:///run/etcd", "https://http://a", "a,", "a,,b"]
)
def test_invalid_lists_of_endpoints_are_refused(endpoint):
    assert mistake(endpoint) == f"rdzv_endpoint: got {endpoint!r}, expected {EXPECTED}"


@pytest.mark.parametrize("endpoint", ["http://a/v3", "a:x", "[::1", "http://"])
def test_lists_with_one_invalid_endpoint_are_refused(endpoint):
    assert mistake(endpoint).endswith(", expected HOST[:PORT]")


def test_all_known_keys_are_named_once_each():
    named = mistake(zzz="x").partition("known: ")[2].split(", ")
    assert len(named) == len(set(named))
    assert {*NAMES, *(key.name for key in KEYS)} <= set(named)


# --- the same settings through all interfaces ---


def test_etcd_settings_are_read_from_the_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    argv = ["--nnodes=1:2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=https://a,https://b", "--rdzv-id=j"]
    launched = resolve(parse([*argv, "--rdzv-conf=lease_ttl=9", str(script)], {}), {"PATH": "/usr/bin"})
    met = launched.rendezvous
    assert (met.backend, met.endpoint, met.etcd.ttl, met.run_id) == ("etcd", "a:2379,b:2379", 9, "j")
    assert (launched.make_handler, launched.rdzv_backend) == (None, "etcd")
    (notice,) = launched.notices
    assert notice.startswith("--rdzv-backend etcd-v2: ")


@pytest.mark.parametrize("name", ["etcd", "etcd-v2", "etcd-v3"])
def test_every_etcd_backend_name_creates_a_rendezvous_handler(name, caplog):
    assert rendezvous_handler_registry.is_registered(name)
    parameters = RendezvousParameters(name, "a", "j", 1, 1, read_timeout=3)
    handler = get_rendezvous_handler(parameters)
    assert ("etcd-v2" in caplog.text) == (name == "etcd-v2")
    assert (handler.get_backend(), handler.rendezvous.etcd.read_timeout) == (name, 3)
    assert get_rendezvous_handler(RendezvousParameters("etcd", "", "j", 1, 1)).get_backend() == "etcd"
    with pytest.raises(ValueError, match="rdzv_endpoint"):
        get_rendezvous_handler(RendezvousParameters("etcd", "", "j", 1, 2))
