"""Stands behind torch's names for etcd: they can be imported, and using one says what to use instead."""

from __future__ import annotations

from typing import NoReturn


def missing(name: str) -> NoReturn:
    """Raise a ``ValueError`` that says what to use instead."""
    raise ValueError(
        f"{name} is not available in this version of elasticrs: use the rendezvous backend c10d, which needs "
        "no server"
    )


class Missing:
    """A class that cannot be instantiated."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        missing(type(self).__name__)
