"""Tests for options taken from the environment variables of Kubernetes and Kubeflow."""

import pytest

from elasticrs._engine.cli import schedulers
from elasticrs._engine.cli.arguments import meeting_of, resolve
from elasticrs._engine.cli.schedulers import with_scheduler
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import parse

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TRAIN_JOB = {
    **POD,
    "HOSTNAME": "train-node-0-1",
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}
PYTORCH_JOB = {
    **POD,
    "HOSTNAME": "train-worker-0",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "8",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
}
INDEXED = {**POD, "HOSTNAME": "train-2", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture(autouse=True)
def hosts(tmp_path, monkeypatch):
    """Create the hosts file of a pod with a headless service."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1\tlocalhost\n# pod\n10.1.0.7\ttrain-2.train.team.svc.cluster.local\ttrain-2\n")
    monkeypatch.setattr(schedulers, "HOSTS", str(file))
    return file


def scheduled(*argv, **environ):
    notices = []
    args = with_scheduler(parse([*argv, "train.py"], environ), environ, notices)
    return args, notices


def meeting(args):
    return args.nnodes, args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id, args.node_rank, args.rdzv_conf


@pytest.mark.parametrize(
    ("environ", "job", "endpoint"),
    [
        (TRAIN_JOB, "TrainJob train", "train-node-0-0.train:29500"),
        (PYTORCH_JOB, "PyTorchJob train", "train-master-0:23456"),
    ],
)
class TestKubeflow:
    def test_nodes_use_the_c10d_rendezvous(self, environ, job, endpoint):
        args, notices = scheduled(**environ)
        assert meeting(args) == ((2, 2), "c10d", endpoint, "train", 1, {"is_host": "0"})
        assert args.nproc_per_node == 4
        assert notices == [f"{job}: 2 nodes, this is number 1, meeting at {endpoint}"]

    def test_kubeflow_variables_are_not_reported_as_without_effect(self, environ, job, endpoint):
        launch = resolve(parse(["-m", "this"], environ), {"PATH": "/usr/bin:/bin", **environ})
        assert launch.rendezvous.endpoint == endpoint
        assert not [line for line in launch.notices if "has no effect" in line], job

    def test_an_explicit_static_rendezvous_works_as_in_torchrun(self, environ, job, endpoint):  # noqa: ARG002
        for argv, variables in (
            (["--rdzv-backend=static"], {}),
            ([], {"PET_RDZV_BACKEND": "static"}),
            (["--master-port=29501"], {}),
        ):
            args, _ = scheduled(*argv, **environ, **variables)
            found = meeting_of(args, environ, 30, [])["rendezvous"]
            assert (found.is_static, args.node_rank) == (True, 1)
            host, port = environ["PET_MASTER_ADDR"], "29501" if "--master-port=29501" in argv else None
            assert found.endpoint == f"{host}:{port or environ['PET_MASTER_PORT']}"

    def test_an_option_overrides_the_value_from_kubeflow(self, environ, job, endpoint):  # noqa: ARG002
        args, _ = scheduled("--nnodes=1:2", "--rdzv-id=mine", "--nproc-per-node=3", **environ)
        assert (args.nnodes, args.rdzv_id, args.nproc_per_node) == ((1, 2), "mine", 3)
        assert args.rdzv_endpoint == endpoint
        args, _ = scheduled("--standalone", **environ)
        assert args.rdzv_backend == "static"

    @pytest.mark.parametrize(
        "change",
        [
            {"PET_MASTER_ADDR": "10.1.0.7"},
            {"PET_MASTER_ADDR": "train-0.train"},
            {"PET_MASTER_ADDR": "train-node-0-0.other"},
            {"PET_MASTER_ADDR": "head-node-0-0."},
            {"PET_NNODES": "1:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "train-worker-0:23456"},
        ],
    )
    def test_variables_set_by_the_user_keep_their_meaning(self, environ, job, endpoint, change):  # noqa: ARG002
        changed = {**environ, **change, "JOB_COMPLETION_INDEX": ""}
        before = vars(parse(["train.py"], changed))
        assert vars(scheduled(**changed)[0]) == before

    def test_a_single_node_job_uses_no_rendezvous(self, environ, job, endpoint):  # noqa: ARG002
        args, notices = scheduled(**{**environ, "PET_NNODES": "1", "PET_NODE_RANK": "0", "RANK": "0"})
        assert (args.nnodes, args.rdzv_backend) == ((1, 1), "static")
        assert notices == [f"{job}: 1 node"]


def test_a_manual_static_job_outside_kubeflow_is_unchanged():
    environ = {name: value for name, value in TRAIN_JOB.items() if name.startswith("PET_")}
    for more in ({}, {**POD, "PET_MASTER_ADDR": "node1"}):
        args = resolve(parse(["-m", "this"], {**environ, **more}), {"PATH": "/bin", **environ, **more})
        assert args.rendezvous.is_static


class TestIndexedJob:
    def test_only_the_number_of_nodes_is_required(self):
        endpoint = "train-0.train.team.svc.cluster.local:29400"
        for argv, variables in ((["--nnodes=2:4"], {}), ([], {"PET_NNODES": "2:4"})):
            args, notices = scheduled(*argv, **INDEXED, **variables)
            assert meeting(args) == ((2, 4), "c10d", endpoint, "train", 2, {"is_host": "0"})
            assert notices == [f"Job train: this is number 2, meeting at {endpoint}"]

    def test_a_pod_of_a_job_set_gets_its_endpoint_and_run_id(self, hosts):
        name = "train-nodes-0-3"
        hosts.write_text(f"10.1.0.7\t{name}.train.team.svc.cluster.local\t{name}\n")
        args, _ = scheduled("--nnodes=4", **POD, HOSTNAME=name, JOB_COMPLETION_INDEX="3")
        assert args.rdzv_endpoint == "train-nodes-0-0.train.team.svc.cluster.local:29400"
        assert args.rdzv_id == "train-nodes-0"

    def test_without_a_number_of_nodes_each_pod_is_its_own_job(self, hosts):
        for text in (hosts.read_text(), "127.0.0.1 localhost\n"):
            hosts.write_text(text)
            before = vars(parse(["train.py"], INDEXED))
            args, notices = scheduled(**INDEXED)
            assert (vars(args), notices) == (before, [])

    def test_pods_without_a_headless_service_are_refused(self, hosts):
        for missing in (False, True):
            if missing:
                hosts.unlink()
            else:
                hosts.write_text("127.0.0.1 localhost\n10.1.0.7 train-2\n")
            with pytest.raises(UsageError, match="headless service"):
                scheduled("--nnodes=4", **INDEXED)
            args, _ = scheduled("--nnodes=4", "--rdzv-backend=c10d", "--rdzv-endpoint=store", **INDEXED)
            assert args.rdzv_endpoint == "store"

    @pytest.mark.parametrize(
        ("devices", "workers"),
        [("GPU-1,GPU-2", 2), ("all", 1), ("void", 1), ("", 1), ("0,1", 1), ("MIG-1,MIG-2", "gpu")],
    )
    def test_nproc_per_node_is_the_number_of_gpus_from_the_device_plugin(self, devices, workers):
        args, _ = scheduled(**INDEXED, NVIDIA_VISIBLE_DEVICES=devices)
        assert args.nproc_per_node == workers

    @pytest.mark.parametrize(
        "change",
        [{"JOB_COMPLETION_INDEX": "x"}, {"JOB_COMPLETION_INDEX": "3"}, {"HOSTNAME": ""}, {"HOSTNAME": "-2"}],
    )
    def test_a_pod_outside_an_indexed_job_is_unchanged(self, change):
        environ = {**INDEXED, **change, "PET_NNODES": "4"}
        before = vars(parse(["train.py"], environ))
        assert vars(scheduled(**environ)[0]) == before


WORKER = {"TORCHELASTIC_RUN_ID": "train", "RANK": "7", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "4242"}


@pytest.mark.parametrize("environ", [TRAIN_JOB, PYTORCH_JOB])
def test_a_launcher_in_a_worker_ignores_the_variables_of_kubeflow(environ):
    args, (notice,) = scheduled("--nproc-per-node=2", **{**environ, **WORKER})
    assert meeting(args) == meeting(parse(["train.py"], {}))
    assert (args.nproc_per_node, args.master_port) == (2, parse(["train.py"], {}).master_port)
    assert "is not used" in notice


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT", "JOB_COMPLETION_INDEX"])
def test_a_kubernetes_number_with_too_many_digits_is_not_used(name):
    number = "9" * 5000
    of_kubeflow = name.startswith("PET_")
    environ = (
        {**TRAIN_JOB, name: number} if of_kubeflow else {**INDEXED, "HOSTNAME": f"a-{number}", name: number}
    )
    found = schedulers.kubernetes_allocation(environ)
    assert found is None or not found.job.startswith("TrainJob")
