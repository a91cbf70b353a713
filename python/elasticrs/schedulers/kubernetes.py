"""A pod of Kubernetes: of an indexed Job, of a JobSet, or of Kubeflow.

=====================  ===================================================================================
Kubeflow Trainer (v2)  ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR``, ``PET_MASTER_PORT``, and an
                       address of the form ``NAME-node-0-0.NAME``
PyTorchJob             the same variables, and an address of the form ``NAME-master-0``
indexed Job, JobSet    ``JOB_COMPLETION_INDEX``, and a host name that ends with this number. No variable
                       has the number of pods
=====================  ===================================================================================

With the variables of Kubeflow, torchrun uses its static rendezvous. The form of the address tells whether
Kubeflow has set them, or a user who wants that rendezvous.
"""

from __future__ import annotations

from elasticrs.job.config import DEFAULT_PORT
from elasticrs.schedulers.place import Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HOSTS = "/etc/hosts"
"""File to which Kubernetes writes the full name of a pod."""

_OF_KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_OWNED = frozenset(name[4:].lower() for name in (*_OF_KUBEFLOW, "PET_NPROC_PER_NODE"))


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this process in its job, or ``None`` if its pod does not belong to such a job.

    Args:
        environ: environment variables of this process, with ``KUBERNETES_SERVICE_HOST``.
    """
    if not all(map(environ.get, _OF_KUBEFLOW)):
        return _in_an_indexed_job(environ)
    address = environ["PET_MASTER_ADDR"]
    name = _name_in(address, "-node-0-0." + address.partition(".")[2])
    if name and address.endswith(f".{name}"):
        return _in_kubeflow(f"TrainJob {name}", name, environ)
    name = _name_in(address, "-master-0")
    # This operator sets the variables of workers, too.
    if name and environ.get("MASTER_ADDR") == address and environ.get("RANK") == environ["PET_NODE_RANK"]:
        return _in_kubeflow(f"PyTorchJob {name}", name, environ)
    return None


def _in_kubeflow(job: str, name: str, environ: Mapping[str, str]) -> Place | None:
    numbers = [environ[variable] for variable in ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT")]
    # An elastic PyTorchJob has a range as its number of nodes. It chooses the rendezvous itself.
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    nodes, rank, port = map(int, numbers)
    host = environ["PET_MASTER_ADDR"]
    return Place(job, nodes, rank, host=host, port=port, run_id=name, owned=_OWNED)


def _in_an_indexed_job(environ: Mapping[str, str]) -> Place | None:
    index = environ.get("JOB_COMPLETION_INDEX", "")
    host = environ.get("HOSTNAME", "")
    name = _name_in(host, f"-{index}")
    if not (index.isascii() and index.isdecimal() and name):
        return None
    domain = _domain_of(host)
    return Place(
        f"Job {name}",
        None,
        int(index),
        host=f"{name}-0.{domain}" if domain else "",
        port=DEFAULT_PORT,
        run_id=name,
        workers=_workers(environ),
        problem=""
        if domain
        else "pods cannot find each other by name without a headless service: create one, "
        "and set spec.subdomain of the pods to its name",
    )


def _domain_of(host: str) -> str:
    """Return the domain of this pod; empty if it has none."""
    try:
        with open(HOSTS, encoding="utf-8", errors="replace") as file:
            names = [name for line in file for name in line.partition("#")[0].split()[1:]]
    except OSError:
        # An image without this file has no names either.
        return ""
    return next((name[len(host) + 1 :] for name in names if name.startswith(f"{host}.")), "")


def _name_in(text: str, suffix: str) -> str:
    """Return the text before the suffix; empty if the text does not end with the suffix."""
    return text[: -len(suffix)] if text.endswith(suffix) else ""


def _workers(environ: Mapping[str, str]) -> int | str | None:
    """Return a worker for each GPU that the device plugin gave to the container; ``None`` if it does not say.
    Images set the variable to ``all``, which says nothing.
    """
    devices = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    if devices[0].startswith("MIG-"):
        # Slices are not counted as devices; see `elasticrs.host.devices`.
        return "gpu"
    return len(devices) if all(device.startswith("GPU-") for device in devices) else None
