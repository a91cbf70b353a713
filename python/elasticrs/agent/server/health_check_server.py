"""Alias of the module :mod:`elasticrs.agent.health_check_server`, with the same name as in torch."""

import sys

from elasticrs.agent import health_check_server
from elasticrs.agent.health_check_server import *  # noqa: F403 -- for type checkers

sys.modules[__name__] = health_check_server
