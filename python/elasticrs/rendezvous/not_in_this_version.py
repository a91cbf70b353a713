"""What is behind torch's names for etcd: importing them works, using them says what to use."""

from __future__ import annotations

from typing import NoReturn


def missing(name: str) -> NoReturn:
    """Refuse something.

    Raises:
        ValueError: always; says what to use.
    """
    raise ValueError(
        f"{name} is not available in this version of elasticrs: use the rendezvous backend c10d, which needs "
        "no server"
    )


class Missing:
    """A class that cannot be made.

    Raises:
        ValueError: from the constructor.
    """

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        missing(type(self).__name__)
