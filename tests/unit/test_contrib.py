"""The scheduler files in contrib/ are valid and act on the launcher's exit codes."""

import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from helpers.procs import run_program

from elasticrs._engine.job.config import ExitCodes
from elasticrs._engine.job.options import parse

CONTRIB = Path(__file__).resolve().parents[2] / "contrib"
KUBERNETES = [
    document
    for path in sorted(CONTRIB.glob("*/*.yaml"))
    if path.parent.name != "prometheus"
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
KINDS = {each["kind"] for each in KUBERNETES}
CUSTOM = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}
"""Kinds that are not part of Kubernetes, with the names of the models that Kubeflow publishes."""


def of_kind(kind):
    return [each for each in KUBERNETES if each["kind"] == kind]


def of_job(name, spec):
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def pod_of(name, template):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **template}


JOBS = of_kind("Job") + [
    of_job(each["metadata"]["name"], job["template"]["spec"])
    for each in of_kind("JobSet")
    for job in each["spec"]["replicatedJobs"]
]
# No package publishes the schema of a PyTorchJob, but its templates are pod templates.
PODS = [
    pod_of("train", replica["template"])
    for each in of_kind("PyTorchJob")
    for replica in each["spec"]["pytorchReplicaSpecs"].values()
]
PLAIN = [each for each in KUBERNETES if each["kind"] not in {*CUSTOM, "PyTorchJob", "Job"}]
COMMANDS = [
    *(job["spec"]["template"]["spec"]["containers"][0]["command"] for job in JOBS),
    *(pod["spec"]["containers"][0]["command"] for pod in PODS),
    *(each["spec"]["trainer"]["command"] for each in of_kind("TrainJob")),
]
VERDICT = ExitCodes("verdict")


def test_contrib_has_a_manifest_of_each_kubernetes_kind():
    assert {"Service", "StatefulSet", "Job", "JobSet", "PyTorchJob", "TrainJob"} <= KINDS
    assert (len(JOBS), len(PODS), len(COMMANDS)) == (3, 2, 6)


@pytest.mark.parametrize("document", PLAIN + JOBS + PODS, ids=lambda each: each["kind"])
def test_a_kubernetes_manifest_matches_the_published_schema(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    "document", [each for kind in CUSTOM for each in of_kind(kind)], ids=lambda each: each["kind"]
)
def test_a_custom_resource_manifest_matches_the_published_model(document):
    # This import takes long, and every process of pytest imports this file.
    from kubeflow_trainer_api import models

    model = getattr(models, CUSTOM[document["kind"]])
    # The models drop unknown fields, so a document with one would not survive the round trip.
    assert model.from_dict(document).to_dict() == document


@pytest.mark.parametrize("job", JOBS)
def test_a_permanent_failure_fails_the_job_and_a_disruption_is_ignored(job):
    ignored, failed = job["spec"]["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (failed["action"], failed["onExitCodes"]["values"]) == ("FailJob", [VERDICT.permanent])
    names = [each["name"] for each in job["spec"]["template"]["spec"]["containers"]]
    assert failed["onExitCodes"]["containerName"] in names


def test_containers_restart_in_place_except_after_verdict_exit_codes():
    (job,) = [each for each in JOBS if "initContainers" in each["spec"]["template"]["spec"]]
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    (rule,) = trainer["restartPolicyRules"]
    assert rule["action"] == "RestartAllContainers"
    assert rule["exitCodes"] == {"operator": "NotIn", "values": [0, VERDICT.permanent, VERDICT.unfit]}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_command_line_is_valid_and_requests_verdict_exit_codes(command):
    program, *arguments = command
    args = parse(arguments, {})
    assert (program, args.exit_codes) == ("elasticrun", "verdict")
    # The pods' variables say where the nodes meet, so the command has no such options.
    assert args.given.isdisjoint({"rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank"})


@pytest.mark.parametrize("job", JOBS)
def test_the_number_of_nodes_equals_the_number_of_pods(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    args = parse(container["command"][1:], {})
    assert args.nnodes[1] == job["spec"]["parallelism"] == job["spec"]["completions"]


class TestSlurm:
    """The batch script, run with fake Slurm programs that only print their arguments."""

    @pytest.fixture
    def submit(self, tmp_path):
        def submit(first: int, highest: int) -> subprocess.CompletedProcess[str]:
            programs = {
                "scontrol": 'echo "scontrol $*"',
                "sleep": 'echo "sleep $*"',
                # Run the first task here. The exit code of srun is the highest one of all tasks.
                "srun": f'while [ "${{1#--}}" != "$1" ]; do shift; done; SLURM_PROCID=0 "$@"; exit {highest}',
                "elasticrun": f'echo "elasticrun $*"; exit {first}',
            }
            for name, text in programs.items():
                (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
                (tmp_path / name).chmod(0o755)
            env = {
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "47",
                "SLURM_JOB_NUM_NODES": "4",
            }
            script = CONTRIB / "slurm/train.sbatch"
            return run_program(["bash", script], env=env, cwd=tmp_path)

        return submit

    @pytest.mark.parametrize(
        ("first", "highest", "code", "is_requeued"),
        [
            (0, 0, 0, False),
            (1, 1, 1, False),
            (VERDICT.permanent, VERDICT.permanent, VERDICT.permanent, False),
            (VERDICT.unfit, VERDICT.unfit, VERDICT.unfit, True),
            (0, VERDICT.unfit, 0, False),
        ],
        ids=["success", "failure", "permanent", "unfit", "another node was unfit"],
    )
    def test_the_job_is_requeued_if_its_first_node_was_unfit(self, submit, first, highest, code, is_requeued):
        done = submit(first, highest)
        assert done.returncode == code, done.stderr
        assert ("scontrol requeue 47\nsleep infinity" in done.stdout) == is_requeued

    def test_the_command_line_is_valid(self, submit):
        arguments = next(line for line in submit(0, 0).stdout.splitlines() if line.startswith("elasticrun "))
        args = parse(arguments.split()[1:], {})
        assert (args.nnodes, args.exit_codes) == ((3, 4), "verdict")
