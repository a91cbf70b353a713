"""Tests for the multi-node options of the command line and the Python API. test_usage_errors.py tests the
error messages.
"""

import pytest

from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import parse
from elasticrs._engine.nodes.describe import PYTHON, describe
from elasticrs.rendezvous import RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler

ENV = {"PATH": "/usr/bin:/bin"}
BACKENDS = "c10d, elasticrs, static, etcd, etcd-v3, etcd-v2"
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=node1")


@pytest.fixture
def launch(script):
    def launch(*argv, **environ):
        return resolve(parse([*argv, script], environ), {**ENV, **environ})

    return launch


def test_a_single_node_launch_has_no_rendezvous_by_default(launch):
    for argv in (
        (),
        ("--standalone",),
        ("--standalone", "--nnodes=1:4", "--rdzv-conf=join_timeout=3", "--node-rank=3"),
        ("--nnodes=1", "--rdzv-conf", "join_timeout=3"),
        ("--master-port=29501",),
        ("--rdzv-endpoint=node1:1234",),
        ("--rdzv-backend=c10d",),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        ("--rdzv-backend=elasticrs", "--rdzv-endpoint=[::1]:0", "--nnodes=1"),
    ):
        assert launch(*argv).rendezvous is None, argv


@pytest.mark.parametrize("backend", ["c10d", "elasticrs"])
def test_rendezvous_options_set_backend_endpoint_and_node_counts(launch, backend):
    argv = (
        "--nnodes=2:4",
        "--rdzv-backend",
        backend,
        "--rdzv-endpoint=node1",
        "--rdzv-id=j",
        "--local-addr=me",
    )
    job = launch(*argv)
    met = job.rendezvous
    assert (met.backend, met.host, met.port, met.endpoint) == ("c10d", "node1", 29400, "node1:29400")
    assert (met.min_nodes, met.max_nodes, met.run_id, job.run_id) == (2, 4, "j", "j")
    assert (met.node_rank, met.local_addr, met.settings.order_hint) == (None, "me", 0)
    assert job.master_port is None
    assert launch(*argv, "--rdzv-endpoint=[fd00::1]:7").rendezvous.endpoint == "[fd00::1]:7"


def test_one_node_with_backend_and_endpoint_has_a_rendezvous(launch):
    met = launch(*C10D).rendezvous
    assert (met.min_nodes, met.max_nodes, met.endpoint) == (1, 1, "node1:29400")
    assert launch("--rdzv-backend=c10d", "--rdzv-endpoint=localhost").rendezvous.port == 29400


def test_rendezvous_settings_are_read_from_options(launch):
    made = launch(
        *C10D,
        "--rdzv-conf=join_timeout=0.5,token=a=b",
        "--drain=job",
        "--node-rank=3",
        "--shutdown-timeout=7",
        "--exit-barrier-timeout=9",
    ).rendezvous.settings
    assert (made.join_timeout, made.token, made.drain, made.order_hint) == (0.5, b"a=b", "job", 3)
    assert (made.settle, made.exit_barrier_timeout) == (7 + 2 * 5 + 5, 9)
    barrier = "--rdzv-conf=exit_barrier_timeout=2"
    assert launch(*C10D, barrier).rendezvous.settings.exit_barrier_timeout == 2
    both = launch(*C10D, barrier, "--exit-barrier-timeout=9", TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT="6")
    assert both.rendezvous.settings.exit_barrier_timeout == 9
    assert launch(*C10D, "--rdzv-conf=order_hint=8", "--node-rank=3").rendezvous.settings.order_hint == 8
    assert launch(*C10D, "--rdzv-conf=drain=job").rendezvous.settings.drain == "job"
    assert launch(*C10D, "--rdzv-conf=drain=job", "--drain=node").rendezvous.settings.drain == "node"


def test_rendezvous_settings_are_read_from_environment_variables(launch):
    job = launch(
        PET_NNODES="2:3",
        PET_RDZV_BACKEND="c10d",
        PET_RDZV_ENDPOINT="node1:7",
        PET_RDZV_ID="j",
        PET_RDZV_CONF="join_timeout=5",
        PET_NODE_RANK="2",
        PET_LOCAL_ADDR="me",
        PET_DRAIN="job",
        PET_EXIT_BARRIER_TIMEOUT="4",
        ELASTICRS_TOKEN="t",
    ).rendezvous
    assert (job.min_nodes, job.max_nodes, job.endpoint, job.run_id) == (2, 3, "node1:7", "j")
    made = job.settings
    assert (made.join_timeout, made.order_hint, made.drain, made.token) == (5, 2, "job", b"t")
    assert (made.exit_barrier_timeout, job.local_addr) == (4, "me")
    barrier = launch(*C10D, TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT="6").rendezvous.settings
    assert barrier.exit_barrier_timeout == 6


def test_static_options_set_the_node_rank_and_the_endpoint(launch):
    launched = launch("--nnodes=3", "--node-rank=2", "--master-addr=node1", "--master-port=7", "--rdzv-id=j")
    met = launched.rendezvous
    assert (met.backend, met.endpoint, met.node_rank, met.settings.order_hint) == ("static", "node1:7", 2, 2)
    assert (met.min_nodes, met.max_nodes) == (3, 3)
    assert (launched.master_addr, launched.master_port) == ("node1", 7)
    assert launched.notices == []
    assert launch("--nnodes=2", "--master-addr=fd00::1").rendezvous.endpoint == "[fd00::1]:29500"
    assert launch("--nnodes=2", "--rdzv-endpoint=node1:8").rendezvous.endpoint == "node1:8"
    hinted = launch("--nnodes=2", "--node-rank=1", "--rdzv-conf=order_hint=5").rendezvous
    assert hinted.settings.order_hint == 1
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node1", "PET_MASTER_PORT": "7"}
    assert (
        launch(**variables).rendezvous
        == launch("--nnodes=2", "--node-rank=1", "--master-addr=node1", "--master-port=7").rendezvous
    )


def test_questionable_options_cause_notices_instead_of_errors(launch):
    (loopback,) = launch("--nnodes=2").notices
    assert "static" in loopback
    assert "127.0.0.1" in loopback
    (no_effect,) = launch(*C10D, "--master-port=1").notices
    assert "--master-port" in no_effect


# --- the Python API ---


def api(backend="c10d", endpoint="node1", nodes=(1, 2), node_rank=None, **config):
    return describe(backend, endpoint, "j", nodes, config, {}, node_rank=node_rank, words=PYTHON)[0]


def test_the_python_api_reports_errors_with_its_own_setting_names():
    assert api(join_timeout=3, timeout=900).settings.join_timeout == 3
    assert api().settings.order_hint is None
    static = api("static", "node1:7", (2, 2), rank=1)
    assert (static.node_rank, static.settings.order_hint) == (1, 1)
    for how, named in (
        ({"endpoint": ""}, "rdzv_endpoint"),
        ({"backend": "static"}, "min_nodes:max_nodes: got 1:2"),
        ({"backend": "static", "nodes": (2, 2), "rank": 2}, r"rdzv_configs\['rank'\]: got 2"),
        ({"backend": "static", "nodes": (2, 2), "rank": "x"}, "rdzv_configs: rank: got 'x'"),
        ({"zzz": 1}, "rdzv_configs: .*zzz"),
    ):
        with pytest.raises(UsageError, match=f"^{named}"):
            api(**how)


def test_rendezvous_handlers_refuse_invalid_settings():
    def handler(backend="c10d", **config):
        return get_rendezvous_handler(RendezvousParameters(backend, "", "j", 1, 1, **config))

    assert handler("elasticrs", timeout=900).get_backend() == "elasticrs"
    with pytest.raises(ValueError, match=r"rdzv_configs: .*zzz"):
        handler(zzz=1)
    with pytest.raises(ValueError, match=f"rdzv_backend: got 'mine'.* {BACKENDS}"):
        handler("mine")


def test_a_world_readable_token_file_causes_a_line_in_the_log(tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o644)
    parameters = RendezvousParameters("c10d", "", "j", 1, 1, token_file=str(path))
    get_rendezvous_handler(parameters)
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    ("config", "seconds"),
    [({}, 900), ({"timeout": "30"}, 30), ({"timeout": 30, "join_timeout": 7}, 7), ({"join_timeout": 7}, 7)],
)
def test_timeout_sets_the_join_timeout_of_the_static_backend(config, seconds):
    config = {**config, "rank": 0}
    meeting = describe("static", "node1:29500", "j", (2, 2), config, {}, words=PYTHON)[0]
    assert meeting.settings.join_timeout == seconds


def test_timeout_does_not_set_the_join_timeout_of_c10d():
    meeting = describe("c10d", "node1:29500", "j", (2, 2), {"timeout": 30}, {}, words=PYTHON)[0]
    assert meeting.settings.join_timeout == 600


def test_a_file_store_or_a_registered_backend_gets_its_own_handler(launch):
    from elasticrs.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register("of_a_program", lambda _params: None)
    try:
        for argv in (
            ("--rdzv-backend=c10d", "--rdzv-conf=store_type=File"),
            ("--rdzv-backend=of_a_program", "--rdzv-conf=a=b"),
        ):
            job = launch(*argv, "--rdzv-endpoint=there", "--nnodes=1:3", "--exit-barrier-timeout=5")
            assert (job.make_handler is None, job.rendezvous) == (False, None)
            assert job.exit_barrier_timeout == 5
        with pytest.raises(UsageError, match=f"{BACKENDS}, of_a_program"):
            launch("--rdzv-backend=of_nobody")
    finally:
        del rendezvous_handler_registry._registry["of_a_program"]


@pytest.mark.parametrize(
    "argv", [(), ("--standalone",), ("--standalone", "--rdzv-backend=c10d"), ("--nnodes=2", "--node-rank=1")]
)
def test_store_type_file_has_no_effect_without_c10d(launch, argv):
    launched = launch(*argv, "--rdzv-conf=store_type=file")
    assert launched.make_handler is None
    assert any("store_type=file" in notice for notice in launched.notices)
    with pytest.raises(UsageError, match="store_type: got 'tape'"):
        launch(*argv, "--rdzv-conf=store_type=tape")


def test_a_launch_with_a_built_in_backend_has_no_separate_handler(launch):
    for argv in ((), C10D, ("--standalone", "--rdzv-backend=c10d")):
        assert launch(*argv).make_handler is None
