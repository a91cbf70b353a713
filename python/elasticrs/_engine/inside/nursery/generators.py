"""Finds random number generators that preloaded modules have created, so that each forked worker can reseed
them. Loaded by ``nursery.py``.

A generator that is created without a seed takes one from the operating system, so its numbers normally differ
between processes. If such a generator is created before the fork, all workers get the same numbers.
:class:`Watch` finds such generators of ``random`` and of numpy. It does not report generators that were
created with an explicit seed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NEEDED = ("random", "bisect", "hashlib", "math", "operator", "warnings")
"""Modules that :class:`Watch` imports, directly or indirectly."""
_SEED_BYTES = 16
"""Length of a seed that numpy takes from the operating system, in bytes."""


class _Entropy:
    """Wrapper around ``os.urandom`` that records each value that may have become a numpy seed.

    It is a callable object, because a function would become a method if a class stored it.
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
    """Records which random number generators take their seed from the operating system, until :meth:`end` is
    called.
    """

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
        """Stop recording. Return functions that reseed the recorded random generators in each worker."""
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
        # Search all objects for further numpy generators only if more than one seed was recorded, because the
        # search is slow. The first seed belongs to numpy's shared generator, which is already known.
        if len(self._entropy.drawn) > 1:
            import gc

            # Use `type` instead of `isinstance`, because reading `__class__` of a proxy may import a module.
            every = [each for each in gc.get_objects() if issubclass(type(each), numpy.BitGenerator)]
            found += [each for each in every if each is not shared]
        unseeded = [each for each in found if self._is_unseeded(each)]
        return [numpy.seed if each is shared else _renewal(each) for each in unseeded]

    def _is_unseeded(self, generator: Any) -> bool:
        # The attribute is named `_seed_seq` before numpy 1.25, and `seed_seq` in later versions.
        sequence = getattr(generator, "_seed_seq", None) or getattr(generator, "seed_seq", None)
        return getattr(sequence, "entropy", None) in self._entropy.drawn


def _renewal(generator: Any) -> Callable[[], None]:
    def renew() -> None:
        generator.state = type(generator)().state

    return renew
