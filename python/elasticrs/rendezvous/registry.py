"""Find the rendezvous handler for a backend: first in elasticrs, then in the program, then in the entry
points ``elasticrs.rendezvous_handlers`` and ``torchrun.handlers`` of installed packages.

As in torch, an entry point is a function without arguments that returns a creator. It is loaded only when its
backend is requested, because it may be broken.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, cast

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.nodes.describe import BACKENDS, PYTHON, Words, check_backend, describe, is_in_file
from elasticrs.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    is_kind,
    rendezvous_handler_registry,
)
from elasticrs.rendezvous.one_node_handler import OneNodeRendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["get_rendezvous_handler"]

_log = logging.getLogger("elasticrs.rendezvous")

_DEFAULT_TIMEOUT = 900
"""Timeout in seconds that torch's launcher passes to every handler."""

GROUPS = ("elasticrs.rendezvous_handlers", "torchrun.handlers")


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler of the backend in ``params``. Raise ``ValueError`` if that is not possible."""
    find_backend(params.backend, PYTHON)
    return rendezvous_handler_registry.create_handler(params)


def handler_of_command_line(
    backend: str,
    endpoint: str,
    run_id: str,
    nodes: tuple[int, int],
    local_addr: str | None,
    settings: Mapping[str, Any],
) -> RendezvousHandler:
    """Create a rendezvous handler with the options of the command line.

    Raises ``UsageError`` if an option or the creator is wrong. Passes on errors of the service that the
    handler needs: ``RendezvousError``, ``OSError`` and ``RuntimeError``, with which torch reports lost
    connections.
    """
    configs = {"timeout": _DEFAULT_TIMEOUT, **settings}
    parameters = RendezvousParameters(backend, endpoint, run_id, *nodes, local_addr, **configs)
    try:
        return get_rendezvous_handler(parameters)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"--rdzv-backend {backend}: {error}") from error
    except Exception as error:
        if is_kind(error, RendezvousError) or isinstance(error, (OSError, RuntimeError)):
            raise
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"--rdzv-backend: {backend!r} failed: {why}") from error


def find_backend(name: str, words: Words) -> None:
    """Look for an unregistered backend in the installed packages. Raise ``ValueError`` if that fails."""
    if rendezvous_handler_registry.is_registered(name) or _register_from_package(name, words):
        return
    from importlib import metadata

    installed = {entry.name for group in GROUPS for entry in metadata.entry_points(group=group)}
    others = sorted({*rendezvous_handler_registry.names(), *installed} - BACKENDS.keys())
    check_backend(name, words, others)


def _register_from_package(name: str, words: Words) -> bool:
    from importlib import metadata

    for group in GROUPS:
        for entry in metadata.entry_points(group=group, name=name):
            try:
                creator = entry.load()()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise UsageError(
                    f"{words.backend}: {name!r} cannot be loaded from {entry.value}: {why}"
                ) from error
            rendezvous_handler_registry.register(name, creator)
            return True
    return False


def _register_out_of_tree_handlers() -> None:
    """Register the rendezvous handlers of installed packages, as torch does. Warn if one cannot be loaded."""
    from importlib import metadata

    for name in {entry.name for group in GROUPS for entry in metadata.entry_points(group=group)}:
        if not rendezvous_handler_registry.is_registered(name):
            try:
                _register_from_package(name, PYTHON)
            except UsageError as error:
                _log.warning("%s", error)


def _create(params: RendezvousParameters) -> RendezvousHandler:
    rendezvous, notices = describe(
        params.backend,
        params.endpoint.strip(),
        params.run_id,
        (params.min_nodes, params.max_nodes),
        params.config,
        os.environ,
        local_addr=params.local_addr,
        words=PYTHON,
    )
    for notice in notices:
        _log.warning("%s", notice)
    if rendezvous is None:
        return OneNodeRendezvous(params)
    from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler

    return ElasticRendezvousHandler(rendezvous, params.backend)


def _create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    if not is_in_file(params.config):
        return _create(params)
    if path := params.endpoint.strip():
        # Check this file first. If it cannot be used, torch would retry for minutes.
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise UsageError(
                f"--rdzv-endpoint: got {path!r}, expected a file that all nodes can open: {error.strerror}"
            ) from error
    # Use torch's own rendezvous if the nodes meet through a file, as torchrun does.
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    # This class has the same interface as torch's class.
    theirs: Any = params
    backend, store = create_backend(theirs)
    handler: Any = create_handler(store, backend, theirs)
    return cast("RendezvousHandler", handler)


for _backend in BACKENDS:
    rendezvous_handler_registry.register(_backend, _create_c10d if _backend == "c10d" else _create)
