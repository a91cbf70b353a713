"""Torch's name of :mod:`elasticrs.compat.c10d_rendezvous_backend`; the same module."""

import sys

from elasticrs.compat import c10d_rendezvous_backend
from elasticrs.compat.c10d_rendezvous_backend import *  # noqa: F403 -- for type checkers

sys.modules[__name__] = c10d_rendezvous_backend
