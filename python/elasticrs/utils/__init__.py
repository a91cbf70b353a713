"""Helpers with the same names as in torch: stores, ports, macros, loggers, and samplers."""

from elasticrs import lazy
from elasticrs._engine.workers.process import macros
from elasticrs.utils.api import get_env_variable_or_raise, get_socket_with_port

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]

_SUBMODULES = ("data", "distributed", "log_level", "logging", "process_state", "store")


def __getattr__(name: str) -> object:
    return lazy(__name__, name, {}, _SUBMODULES)
