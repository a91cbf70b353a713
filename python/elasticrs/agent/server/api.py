"""Alias of the module :mod:`elasticrs.agent.server.simple_elastic_agent`, with the same name as in torch."""

import sys

from elasticrs.agent.server import simple_elastic_agent
from elasticrs.agent.server.simple_elastic_agent import *  # noqa: F403 -- for type checkers

sys.modules[__name__] = simple_elastic_agent
