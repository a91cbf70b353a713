"""Alias of the module :mod:`.health_check_server`, with the same name as in torch."""

import sys

from elasticrs._engine.supervise.observe import health_check_server
from elasticrs._engine.supervise.observe.health_check_server import *  # noqa: F403 -- for type checkers

sys.modules[__name__] = health_check_server
