"""Random number generators that imports make; see ``nursery.py``, which loads this.

A generator without a seed takes one from the operating system, so it differs between processes. Made before
the fork, it would be the same in all workers. :class:`Watch` finds those of ``random`` and of numpy, and
leaves those alone that got a seed from their maker.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NEEDED = ("random", "bisect", "hashlib", "math", "operator", "warnings")
"""Modules that :class:`Watch` imports."""
_SEED_BYTES = 16
"""Of a seed that numpy takes from the operating system."""


class _Entropy:
    """``os.urandom``, which notes what may become a seed. It is no function, because a class that holds it
    must not bind it.
    """

    def __init__(self, real: Callable[[int], bytes]) -> None:
        self._real = real
        self.is_watched = True
        self.drawn: set[int] = set()

    def __call__(self, size: int) -> bytes:
        data = self._real(size)
        if self.is_watched and size == _SEED_BYTES:
            self.drawn.add(int.from_bytes(data, "big"))
        return data


class Watch:
    """Watches how generators get their seeds, until :meth:`end`."""

    def __init__(self) -> None:
        self._urandom = os.urandom
        self._entropy = _Entropy(os.urandom)
        vars(os)["urandom"] = self._entropy
        import random

        self._random: Any = random
        vars(self._random)["_urandom"] = self._entropy
        self._seed = random.Random.seed
        self._unseeded: dict[int, Any] = {}
        self._random.Random.seed = self._noting()

    def _noting(self) -> Callable[..., None]:
        real, unseeded = self._seed, self._unseeded

        def seed(self: Any, a: Any = None, version: int = 2) -> None:
            real(self, a, version)
            unseeded.pop(id(self), None)
            if a is None:
                unseeded[id(self)] = self

        return seed

    def end(self) -> list[Callable[[], None]]:
        """Stop watching, and return functions that reseed the generators found in each worker."""
        self._entropy.is_watched = False
        if vars(os)["urandom"] is self._entropy:
            vars(os)["urandom"] = self._urandom
        vars(self._random)["_urandom"] = self._urandom
        self._random.Random.seed = self._seed
        return [*(generator.seed for generator in self._unseeded.values()), *self._of_numpy()]

    def _of_numpy(self) -> list[Callable[[], None]]:
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is None:
            return []
        shared = numpy.mtrand._rand._bit_generator
        found = [shared]
        # As a rule that is the only one, and a look at all objects would take long.
        if len(self._entropy.drawn) > 1:
            import gc

            # The class by `type`: a proxy might import something when it is asked for `__class__`.
            every = [each for each in gc.get_objects() if issubclass(type(each), numpy.BitGenerator)]
            found += [each for each in every if each is not shared]
        unseeded = [each for each in found if self._is_unseeded(each)]
        return [numpy.seed if each is shared else _renewal(each) for each in unseeded]

    def _is_unseeded(self, generator: Any) -> bool:
        # The first name is that of numpy before 1.25.
        sequence = getattr(generator, "_seed_seq", None) or getattr(generator, "seed_seq", None)
        return getattr(sequence, "entropy", None) in self._entropy.drawn


def _renewal(generator: Any) -> Callable[[], None]:
    def renew() -> None:
        generator.state = type(generator)().state

    return renew
