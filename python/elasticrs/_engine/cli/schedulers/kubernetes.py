"""Detect Kubernetes pods that belong to an indexed Job, a JobSet, or a Kubeflow job.

Each kind of job is recognised by variables and names in the pod:

=====================  ===================================================================================
Kubeflow Trainer (v2)  ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR``, ``PET_MASTER_PORT``, and an
                       address of the form ``NAME-node-0-0.NAME``
PyTorchJob             the same variables, and an address of the form ``NAME-master-0``
indexed Job, JobSet    ``JOB_COMPLETION_INDEX``, and a host name that ends with this number. No variable
                       contains the number of pods
=====================  ===================================================================================

Kubeflow's variables make torchrun use its static rendezvous. A user who wants that rendezvous may set the
same variables. The form of the address shows whether Kubeflow or the user has set them.
"""

from __future__ import annotations

from elasticrs._engine.cli.schedulers import WORKER_VARIABLE, Place, number_in
from elasticrs._engine.job.config import DEFAULT_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HOSTS = "/etc/hosts"
"""File to which Kubernetes writes the full name of a pod."""

_OF_KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_OWNED = frozenset(name[4:].lower() for name in (*_OF_KUBEFLOW, "PET_NPROC_PER_NODE"))


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Return the position of this process in its Kubernetes job; ``None`` if no supported kind of job is
    detected.

    Args:
        environ: environment variables of this process.
    """
    if not all(map(environ.get, _OF_KUBEFLOW)):
        return _in_an_indexed_job(environ)
    address = environ["PET_MASTER_ADDR"]
    name = _name_in(address, "-node-0-0." + address.partition(".")[2])
    if name and address.endswith(f".{name}"):
        return _in_kubeflow(f"TrainJob {name}", name, environ)
    name = _name_in(address, "-master-0")
    # To recognize a PyTorchJob, also check `RANK` and `MASTER_ADDR`, which its operator sets in each pod. In
    # a worker, both variables have other values, so check only that this process is a worker.
    is_set = environ.get("MASTER_ADDR") == address and environ.get("RANK") == environ["PET_NODE_RANK"]
    if name and (is_set or WORKER_VARIABLE in environ):
        return _in_kubeflow(f"PyTorchJob {name}", name, environ)
    return None


def _in_kubeflow(job: str, name: str, environ: Mapping[str, str]) -> Place | None:
    nodes, rank, port = (
        number_in(environ[variable]) for variable in ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT")
    )
    # Ignore an elastic PyTorchJob (its `PET_NNODES` is a range), because it configures the rendezvous itself.
    if nodes is None or rank is None or port is None:
        return None
    host = environ["PET_MASTER_ADDR"]
    return Place(job, nodes, rank, host=host, port=port, run_id=name, owned=_OWNED)


def _in_an_indexed_job(environ: Mapping[str, str]) -> Place | None:
    index = environ.get("JOB_COMPLETION_INDEX", "")
    rank = number_in(index)
    host = environ.get("HOSTNAME", "")
    name = _name_in(host, f"-{index}")
    if rank is None or not name:
        return None
    domain = _domain_of(host)
    return Place(
        f"Job {name}",
        None,
        rank,
        host=f"{name}-0.{domain}" if domain else "",
        port=DEFAULT_PORT,
        run_id=name,
        workers=_workers(environ),
        problem=""
        if domain
        else "pods cannot find each other by name without a headless service: create one, "
        "and set the pods' spec.subdomain to its name",
    )


def _domain_of(host: str) -> str:
    """Return the DNS domain of this pod; empty if it has none."""
    try:
        with open(HOSTS, encoding="utf-8", errors="replace") as file:
            names = [name for line in file for name in line.partition("#")[0].split()[1:]]
    except OSError:
        # The pod's domain is unknown if the hosts file cannot be read.
        return ""
    return next((name[len(host) + 1 :] for name in names if name.startswith(f"{host}.")), "")


def _name_in(text: str, suffix: str) -> str:
    """Return the text without the suffix. If the text does not end with the suffix, return an empty
    string.
    """
    return text[: -len(suffix)] if text.endswith(suffix) else ""


def _workers(environ: Mapping[str, str]) -> int | str | None:
    """Return the number of workers, which is the number of GPUs that the device plugin assigned to the
    container.

    Return ``gpu`` for MIG slices, which lets the launcher count them later. Return ``None`` if
    ``NVIDIA_VISIBLE_DEVICES`` does not list the GPUs, for example because an image set it to ``all``.
    """
    devices = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    if devices[0].startswith("MIG-"):
        # Do not count MIG slices as devices; see `elasticrs._engine.gpus.devices`.
        return "gpu"
    return len(devices) if all(device.startswith("GPU-") for device in devices) else None
