"""Helpers with torch's names, for programs that use them: stores, ports, macros, loggers, samplers."""

from elasticrs import lazy
from elasticrs.utils.api import get_env_variable_or_raise, get_socket_with_port
from elasticrs.workers.arguments import macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]

_SUBMODULES = ("data", "distributed", "log_level", "logging", "process_state", "store")


def __getattr__(name: str) -> object:
    return lazy(__name__, name, {}, _SUBMODULES)
