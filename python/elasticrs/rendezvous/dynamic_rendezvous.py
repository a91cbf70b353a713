"""Torch's name of :mod:`elasticrs.compat.dynamic_rendezvous`; the same module."""

import sys

from elasticrs.compat import dynamic_rendezvous
from elasticrs.compat.dynamic_rendezvous import *  # noqa: F403 -- for type checkers

sys.modules[__name__] = dynamic_rendezvous
