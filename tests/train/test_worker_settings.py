"""The settings and credentials that agents pass on for the rendezvous of their workers."""

from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from elasticrs._engine.nodes.describe import describe
from elasticrs._engine.nodes.protocol.records import Keys, workers_keys, workers_of
from elasticrs._engine.nodes.transport import etcd_site, settings
from elasticrs._engine.supervise.decide.member_workers import among_workers, for_workers, variables_of_members
from elasticrs.train.rendezvous import parse

OF_THE_STORE = {"connect_timeout", "store_lost_timeout", "store_grace", "lease_ttl", "read_timeout"}
OF_THE_STORE |= {"keep_alive_interval", "keep_alive_max_attempt", "etcd_prefix", "protocol"}
OF_THE_STORE |= {"ca_cert", "ssl_cert", "ssl_cert_key", "user", "password_file", "cacert", "cert", "key"}
OF_THE_MEETING = {"join_timeout", "last_call_timeout", "restart_call_timeout", "worker_port_range"}
OF_THE_MEETING |= {"order_hint"}
OF_NODES = {"scale_up_delay", "settle", "close_timeout", "exit_barrier_timeout", "stall_timeout", "scale_up"}
OF_NODES |= {"max_node_losses", "max_short_losses", "short_round", "is_host", "bind_addr", "rank"}
OF_NODES |= {"homogeneous", "same_command", "fresh", "drain", "token", "token_file", "store_type"}
OF_NODES |= {"heartbeat_timeout", "cas_backoff_max_seconds", "timeout"}

JOB = SimpleNamespace(nproc=4)
POINT = SimpleNamespace(job="a/job", address=("10.0.0.1", 29400))


def workers_rendezvous(backend="c10d", token="secret", **conf):
    """Return the workers' rendezvous, as parsed from the variables of agents with these settings."""
    environ = {} if token is None else {"ELASTICRS_TOKEN": token}
    nodes, _ = describe(backend, "10.0.0.1:29400", "a/job", (2, 3), conf, environ)
    variables = variables_of_members(among_workers(nodes, JOB), POINT, 17)
    assert token is None or token not in str(variables)
    renamed = {"ELASTICRS_TRAIN_TOKEN": "ELASTICRS_TOKEN"}
    worker = {renamed.get(name, name): value for name, value in variables.items()}
    return parse(worker["ELASTICRS_TRAIN"], worker, may_host=False).rendezvous


def test_each_setting_is_either_for_workers_or_for_nodes():
    keys = {key.name for key in (*settings.KEYS, *etcd_site.KEYS)} | set(etcd_site.NAMES)
    assert keys == OF_THE_STORE | OF_THE_MEETING | OF_NODES
    assert for_workers(dict.fromkeys(keys, "1")).keys() == OF_THE_STORE | OF_THE_MEETING
    assert for_workers(dict.fromkeys(keys)) == {}


@pytest.mark.parametrize(
    ("backend", "token", "conf"),
    [("c10d", "secret", {}), ("c10d", None, {}), ("etcd", None, {}), ("etcd", "secret", {})],
)
def test_agents_remove_the_registration_of_a_worker(backend, token, conf):
    environ = {} if token is None else {"ELASTICRS_TOKEN": token}
    nodes, _ = describe(backend, "10.0.0.1:29400", "a/job", (2, 3), conf, environ)
    worker = workers_rendezvous(backend, token, **conf)
    prefixes = [found.etcd.prefix if found.etcd else "" for found in (nodes, worker)]
    name = f"{workers_of('agent')}1234.5678/1"
    for key in (Keys(worker.job).node(name), Keys(worker.job).slot(name)):
        keys = workers_keys(nodes, POINT.job, 17)
        process = f"{workers_of('agent')}1234"
        for removal in (keys.forget_process(process), keys.forget_members(workers_of("agent"))):
            removed = [prefixes[0] + deletion.prefix for deletion in removal]
            assert sum((prefixes[1] + key).startswith(each) for each in removed) == 1
        other = keys.forget_process(process[:-1]) + keys.forget_members(workers_of("agen"))
        assert not any((prefixes[1] + key).startswith(prefixes[0] + each.prefix) for each in other)


def test_limits_for_nodes_do_not_apply_to_workers():
    found = workers_rendezvous(
        max_node_losses=1, scale_up=0, scale_up_delay=60, drain="job", connect_timeout=3
    )
    assert (found.min_nodes, found.max_nodes, found.job) == (8, 12, "a/job#workers.17")
    own = found.settings
    assert (own.max_node_losses, own.scale_up, own.scale_up_delay, own.drain) == (None, True, 1.0, "node")
    assert own.connect_timeout == 3


def test_workers_get_a_token_for_only_their_own_keys():
    found = workers_rendezvous()
    assert found.scope == "/elasticrs/a%2Fjob#workers"
    assert len(found.settings.token) == 64
    assert workers_rendezvous(token="other").settings.token != found.settings.token
    without = workers_rendezvous(token=None)
    assert (without.scope, without.settings.token) == (None, None)


def test_workers_use_the_agents_user_in_an_external_etcd(tmp_path):
    (tmp_path / "password").write_text("secret")
    (tmp_path / "password").chmod(0o600)
    found = workers_rendezvous("etcd", user="job", password_file=str(tmp_path / "password"))
    assert (found.etcd.user, found.etcd.password) == ("job", "secret")


def test_an_https_etcd_endpoint_keeps_tls_in_the_url_for_workers():
    nodes, _ = describe("etcd", "https://10.0.0.1:2379", "job", (2, 2), {"timeout": 7}, {})
    url = variables_of_members(among_workers(nodes, JOB), POINT, 1)["ELASTICRS_TRAIN"]
    assert urlsplit(url).scheme == "etcd"
    found = parse(url, {}).rendezvous
    assert found.etcd.is_tls
    assert found.settings.join_timeout == 7
