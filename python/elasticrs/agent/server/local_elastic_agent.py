"""Torch's name of :mod:`elasticrs.compat.local_elastic_agent`; the same module."""

import sys

from elasticrs.compat import local_elastic_agent
from elasticrs.compat.local_elastic_agent import *  # noqa: F403 -- for type checkers

sys.modules[__name__] = local_elastic_agent
