"""Fill in options that the user has not set, using the scheduler's environment variables.

The options that are filled in depend on the rendezvous back end::

    --standalone, or at most one node     only the number of workers
    c10d, elasticrs                       number of nodes, endpoint, run id, node order, host of the store
    etcd                                  number of nodes, run id, node order
    static                                number of nodes, this node's rank, address and port of rank 0
    another back end                      number of nodes, run id

The default back end is c10d. If the user has set an option that torchrun uses only with its static
rendezvous, the default is ``static``, so that the command line means the same as in torchrun.
"""

from __future__ import annotations

import os

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, Namespace, set_by_variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from elasticrs._engine.cli.schedulers import Place

_DEFAULTS = {option.dest: option.default for option in OPTIONS}
_OF_STATIC = frozenset(("node_rank", "master_addr", "master_port"))


def with_scheduler(args: Namespace, environ: Mapping[str, str], notices: list[str]) -> Namespace:
    """Return the options, completed with values from the scheduler's environment variables. Add a line that
    reports these values to ``notices``.

    Args:
        args: parsed command line. Its attribute ``given`` contains the names of the options that it sets.
        environ: environment variables of this process.
        notices: list to which lines for the user are added.

    Raises:
        UsageError: the scheduler has started the nodes in a way that prevents a rendezvous. The message is
            one line for the user.
    """
    from elasticrs._engine.cli.schedulers import WORKER_VARIABLE, place_of

    place = place_of(environ, os.getpid())
    if place is None:
        return args
    if WORKER_VARIABLE in environ:
        # Ignore the scheduler's variables, because they describe the nodes of the outer launcher, which has
        # started this process as a worker. Otherwise, this launcher would join the outer job and wait for the
        # end of that job.
        notices.append(f"{place.job} is not used: this launcher runs in a worker of another launcher")
        return Namespace(**{**vars(args), **{name: _DEFAULTS[name] for name in place.owned - {*args.given}}})
    given = _given(args, environ, place)
    found = found_options(args, place, given)
    if line := _line(args, place, found):
        notices.append(line)
    if not _says_how_to_meet(args, given):
        notices += place.notices
    low, high = found.get("nnodes", args.nnodes)
    if low < high and not args.standalone:
        notices += place.elastic_notices
    return Namespace(**{**vars(args), **found})


def _given(args: Namespace, environ: Mapping[str, str], place: Place) -> frozenset[str]:
    """Return the names of the options that the user has set on the command line or in ``PET_`` variables."""
    return frozenset((*(set_by_variables(environ) - place.owned), *args.given))


def _says_how_to_meet(args: Namespace, given: Collection[str]) -> bool:
    """Return true if the user has specified how the nodes meet: ``--standalone``, or the number of nodes and,
    for several nodes, an address.
    """
    is_alone = args.nnodes[1] == 1
    has_address = not {"rdzv_endpoint", "master_addr"}.isdisjoint(given)
    return args.standalone or ("nnodes" in given and (is_alone or has_address))


def found_options(args: Namespace, place: Place, given: Collection[str]) -> dict[str, Any]:
    """Return the scheduler's values for options that the user has not set, keyed by option name.

    Args:
        args: parsed command line.
        place: place of this process in a scheduler's job.
        given: names of the options that the user has set.

    Raises:
        UsageError: the scheduler has started the nodes in a way that prevents a rendezvous.
    """
    nodes = args.nnodes[1] if "nnodes" in given else place.nodes
    # If the number of nodes is unknown, the job uses only this node by default and needs no rendezvous.
    if place.problem and nodes is not None:
        if _says_how_to_meet(args, given):
            return {}
        raise UsageError(f"{place.job}: {place.problem}; or use --standalone or --no-scheduler")
    found: dict[str, Any] = {}
    if place.workers is not None:
        found["nproc_per_node"] = place.workers
    if not args.standalone:
        if place.host and nodes not in (None, 1):
            found |= _meeting(args, place, given)
        if place.nodes is not None:
            found["nnodes"] = (place.nodes, place.nodes)
    # Return the scheduler's `rdzv_conf` even if the user has set this option, because the returned value
    # already includes the user's settings.
    return {name: value for name, value in found.items() if name not in given or name == "rdzv_conf"}


def _meeting(args: Namespace, place: Place, given: Collection[str]) -> dict[str, Any]:
    from elasticrs._engine.nodes.describe import BACKENDS, C10D, ETCD, STATIC, is_in_file

    if _says_how_to_meet(args, given) and args.nnodes[1] > (place.nodes or args.nnodes[1]):
        # Use none of the scheduler's rendezvous settings if the user wants more nodes than the scheduler
        # reports. The nodes may then belong to several job steps, each with a different run id.
        return {}
    chosen = STATIC if _OF_STATIC.intersection(given) else C10D
    backend = args.rdzv_backend if "rdzv_backend" in given else chosen
    found: dict[str, Any] = {"rdzv_backend": backend}
    kind = BACKENDS.get(backend)
    if kind in (C10D, ETCD, STATIC):
        found["node_rank"] = place.node_rank
    if kind != STATIC:
        found["rdzv_id"] = place.run_id
        # Only the static rendezvous uses the master address and port. With any other rendezvous, reset these
        # options if the scheduler has set them.
        found |= {name: _DEFAULTS[name] for name in ("master_addr", "master_port") if name in place.owned}
    if "rdzv_endpoint" in given:
        return found
    if kind == STATIC:
        found |= {"master_addr": place.host, "master_port": place.port}
    elif kind == C10D and not is_in_file(args.rdzv_conf):
        found["rdzv_endpoint"] = f"{place.host}:{place.port}"
        # Set `is_host`, because the host cannot recognize its own address reliably: its name may resolve to
        # several addresses, or to an address that none of its interfaces has.
        host = {"is_host": "1" if place.node_rank == 0 else "0"}
        found["rdzv_conf"] = {**host, **args.rdzv_conf}
    return found


def _line(args: Namespace, place: Place, found: Mapping[str, object]) -> str:
    """Return a line that reports the values taken from the scheduler's variables; empty if there are none."""
    parts = []
    if "nnodes" in found and place.nodes is not None:
        parts.append("1 node" if place.nodes == 1 else f"{place.nodes} nodes")
    if "node_rank" in found:
        parts.append(f"this is number {place.node_rank}")
    if "rdzv_endpoint" in found:
        parts.append(f"meeting at {found['rdzv_endpoint']}")
    elif found.get("master_addr") == place.host:
        parts.append(f"meeting at {place.host}:{found.get('master_port', args.master_port)}")
    # Omit a value such as `gpu`, because the resulting number of workers is reported on a separate line.
    if isinstance(workers := found.get("nproc_per_node"), int):
        parts.append("1 worker on this node" if workers == 1 else f"{workers} workers on this node")
    return f"{place.job}: {', '.join(parts)}" if parts else ""
