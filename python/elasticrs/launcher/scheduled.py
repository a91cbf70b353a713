"""Options that the user has not set get their values from the scheduler.

::

    --standalone, or at most one node     only the number of workers
    c10d, elasticrs                       nodes, endpoint, id, place in the order of nodes, host of the store
    etcd                                  nodes, id, place in the order of nodes
    static                                nodes, rank of this node, address and port of rank 0
    another back end                      nodes, id

The back end is c10d, unless the user has set it, or one of the options that only ``static`` has. Such a
command line keeps torchrun's meaning.
"""

from __future__ import annotations

from elasticrs.job.config import UsageError
from elasticrs.job.options import OPTIONS
from elasticrs.launcher.namespace import Namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from elasticrs.schedulers.place import Place

_DEFAULTS = {option.dest: option.default for option in OPTIONS}
_OF_STATIC = frozenset(("node_rank", "master_addr", "master_port"))


def with_scheduler(args: Namespace, environ: Mapping[str, str], notices: list[str]) -> Namespace:
    """Return the options with the values that the variables of a scheduler give. Lines for the user, which
    say what was found, are added to ``notices``.

    Args:
        args: parsed command line, which contains the names of the options that it sets (``given``).
        environ: environment variables of this process.
        notices: lines for the user.

    Raises:
        UsageError: the nodes cannot meet as the scheduler started them. The message is one line for the user.
    """
    from elasticrs.schedulers import place_of

    place = place_of(environ)
    if place is None:
        return args
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
    """Return the names of the options that the user has set, on the command line or with a variable."""
    variables = {option.dest for option in OPTIONS if option.has_variable and option.variable in environ}
    return frozenset((*(variables - place.owned), *args.given))


def _says_how_to_meet(args: Namespace, given: Collection[str]) -> bool:
    """Return true if the user has said how many nodes there are and where they meet."""
    is_alone = args.nnodes[1] == 1
    has_address = not {"rdzv_endpoint", "master_addr"}.isdisjoint(given)
    return args.standalone or ("nnodes" in given and (is_alone or has_address))


def found_options(args: Namespace, place: Place, given: Collection[str]) -> dict[str, Any]:
    """Return values for options that the user has not set, by the options' names.

    Args:
        args: parsed command line.
        place: place of this process in a job of a scheduler.
        given: names of the options that the user has set.

    Raises:
        UsageError: the nodes cannot meet as the scheduler started them.
    """
    nodes = args.nnodes[1] if "nnodes" in given else place.nodes
    # A job without a number of nodes is a job of this node, until the user says more.
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
    # The settings of the rendezvous have been merged one by one.
    return {name: value for name, value in found.items() if name not in given or name == "rdzv_conf"}


def _meeting(args: Namespace, place: Place, given: Collection[str]) -> dict[str, Any]:
    from elasticrs.rendezvous.elastic.describe import BACKENDS, C10D, ETCD, STATIC, is_in_file

    if _says_how_to_meet(args, given) and args.nnodes[1] > (place.nodes or args.nnodes[1]):
        # The scheduler does not know the other nodes, for example because each node has a step of its own. An
        # id of this step would be different from theirs.
        return {}
    chosen = STATIC if _OF_STATIC.intersection(given) else C10D
    backend = args.rdzv_backend if "rdzv_backend" in given else chosen
    found: dict[str, Any] = {"rdzv_backend": backend}
    kind = BACKENDS.get(backend)
    if kind in (C10D, ETCD, STATIC):
        found["node_rank"] = place.node_rank
    if kind != STATIC:
        found["rdzv_id"] = place.run_id
        # The variables of the static rendezvous would have no effect.
        found |= {name: _DEFAULTS[name] for name in ("master_addr", "master_port") if name in place.owned}
    if "rdzv_endpoint" in given:
        return found
    if kind == STATIC:
        found |= {"master_addr": place.host, "master_port": place.port}
    elif kind == C10D and not is_in_file(args.rdzv_conf):
        found["rdzv_endpoint"] = f"{place.host}:{place.port}"
        # The name may resolve to several addresses, or to none of this machine's own, so do not guess.
        host = {"is_host": "1" if place.node_rank == 0 else "0"}
        found["rdzv_conf"] = {**host, **args.rdzv_conf}
    return found


def _line(args: Namespace, place: Place, found: Mapping[str, object]) -> str:
    """Return the line that says what was found; empty if nothing was."""
    parts = []
    if "nnodes" in found and place.nodes is not None:
        parts.append("1 node" if place.nodes == 1 else f"{place.nodes} nodes")
    if "node_rank" in found:
        parts.append(f"this is number {place.node_rank}")
    if "rdzv_endpoint" in found:
        parts.append(f"meeting at {found['rdzv_endpoint']}")
    elif found.get("master_addr") == place.host:
        parts.append(f"meeting at {place.host}:{found.get('master_port', args.master_port)}")
    # Another line gives the number if it is a word such as `gpu`.
    if isinstance(workers := found.get("nproc_per_node"), int):
        parts.append("1 worker on this node" if workers == 1 else f"{workers} workers on this node")
    return f"{place.job}: {', '.join(parts)}" if parts else ""
