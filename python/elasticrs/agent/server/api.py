"""Torch's name of :mod:`elasticrs.compat.simple_elastic_agent`; the same module."""

import sys

from elasticrs.compat import simple_elastic_agent
from elasticrs.compat.simple_elastic_agent import *  # noqa: F403 -- for type checkers

sys.modules[__name__] = simple_elastic_agent
