"""The commands of the manifests in contrib/kubernetes, run in network namespaces that have the names and
variables of pods. No cluster is involved: the tests set what its controllers would set.
"""

import os
import signal
from pathlib import Path

import pytest
import yaml
from helpers import procs
from helpers.nodes import READY, WORKERS, Worker, finish, round_of

pytestmark = pytest.mark.privileged

MANIFESTS = Path(__file__).resolve().parents[2] / "contrib/kubernetes"
DOMAIN = "team.svc.cluster.local"


def document(name, kind):
    text = (MANIFESTS / name).read_text(encoding="utf-8")
    return next(each for each in yaml.safe_load_all(text) if each["kind"] == kind)


def indexed(job, spec, service):
    """Return the variables of each pod of an indexed Job by pod name, the service, and the container's
    command.
    """
    pods = {f"{job}-{index}": {"JOB_COMPLETION_INDEX": str(index)} for index in range(spec["completions"])}
    return pods, service, spec["template"]["spec"]["containers"][0]["command"]


def of_job():
    manifest = document("job.yaml", "Job")
    spec = manifest["spec"]
    return indexed(manifest["metadata"]["name"], spec, spec["template"]["spec"]["subdomain"])


def of_job_set():
    manifest = document("jobset.yaml", "JobSet")
    name, (job,) = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"]
    return indexed(f"{name}-{job['name']}-0", job["template"]["spec"], name)


def of_train_job():
    manifest = document("trainjob.yaml", "TrainJob")
    name, trainer = manifest["metadata"]["name"], manifest["spec"]["trainer"]
    pods = {
        f"{name}-node-0-{index}": {
            "JOB_COMPLETION_INDEX": str(index),
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
        for index in range(trainer["numNodes"])
    }
    return pods, name, trainer["command"]


def of_pytorch_job():
    manifest = document("pytorchjob.yaml", "PyTorchJob")
    name, replicas = manifest["metadata"]["name"], manifest["spec"]["pytorchReplicaSpecs"]
    names = [f"{name}-{kind.lower()}-{n}" for kind in replicas for n in range(replicas[kind]["replicas"])]
    pods = {
        pod: {
            "MASTER_ADDR": f"{name}-master-0",
            "MASTER_PORT": "23456",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(names)),
            "PET_NNODES": str(len(names)),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": f"{name}-master-0",
            "PET_MASTER_PORT": "23456",
        }
        for rank, pod in enumerate(names)
    }
    return pods, "", replicas["Master"]["template"]["spec"]["containers"][0]["command"]


@pytest.fixture
def pods(network, launch, tmp_path):
    """Return a function that runs a manifest's command on one host for each pod. It returns the launchers and
    the hosts in the order of the pods.
    """

    agents = set()

    def start(kind, *options):
        variables, service, command = kind()
        machines = network(len(variables))
        hosts = dict(zip(variables, machines.hosts, strict=True))
        for pod, host in hosts.items():
            # With a headless service, each pod has a DNS name in the service's domain.
            names = (f"{pod}.{service}.{DOMAIN}", f"{pod}.{service}") if service else (pod,)
            machines.name(**dict.fromkeys(names, host))
        options = [*command[1:-1], "--nproc-per-node=1", "--rdzv-conf=last_call_timeout=5", *options]
        launched = [
            launch(
                *options,
                WORKERS / "ranks.py",
                env={"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": pod, **variables[pod]},
                cwd=tmp_path,
                prefix=host.prefix(tmp_path),
            )
            for pod, host in hosts.items()
        ]
        agents.update(each.pid for each in launched)
        return launched, list(hosts.values())

    yield start
    # Reap the nurseries (the processes that fork workers) of killed agents.
    procs.reap_adopted(keep=agents)


@pytest.mark.parametrize("kind", [of_job, of_job_set, of_train_job, of_pytorch_job])
def test_the_pods_of_a_manifest_form_one_job(pods, kind):
    launched, hosts = pods(kind)
    workers = round_of(launched, [1] * len(launched))
    assert [(each.rank, each.world) for each in workers] == [(n, len(hosts)) for n in range(len(hosts))]
    for number, agent in enumerate(launched):
        agent.wait_for_line(rf"Job train\S*: .*this is number {number}, meeting at ")
        assert "has no effect" not in agent.stderr
    finish(launched, workers)


@pytest.mark.parametrize("kind", [of_train_job, of_pytorch_job])
def test_the_other_kubeflow_pod_notices_a_lost_pod_and_waits_for_nodes(pods, kind):
    """The other pods notice the loss, which they would not do with torchrun's static rendezvous."""
    launched, hosts = pods(kind, "--rdzv-conf=keep_alive_interval=0.4")
    round_of(launched, [1, 1])
    launched[1].signal(signal.SIGKILL)
    launched[0].wait_for_line("waiting for nodes: ")
    procs.wait_until(lambda: not [each for each in hosts[1].processes() if "ranks.py" in each.command])
    launched[1].wait()
    os.kill(launched[0].pid, signal.SIGTERM)
    launched[0].exits(1)


def test_a_job_set_continues_without_one_pod(pods):
    launched, hosts = pods(of_job_set)
    round_of(launched, [1] * 4)
    hosts[3].power_off()
    workers = round_of(launched[:3], [2] * 3)
    assert {each.world for each in workers} == {3}
    finish(launched[:3], workers)


def test_worker_ranks_come_from_the_rendezvous_and_not_from_the_pod(pods):
    # A PyTorchJob sets RANK and WORLD_SIZE, but they are meant for programs that run without a launcher.
    launched, _ = pods(of_pytorch_job, "--nproc-per-node=2")
    told = [Worker.parse(each[1]) for agent in launched for each in agent.wait_for_lines(READY.pattern, 2)]
    assert sorted((each.rank, each.world) for each in told) == [(n, 4) for n in range(4)]
    finish(launched, told)
