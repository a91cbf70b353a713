"""Everything behind the names that users import. The engine may be changed freely, and imports none of those
names.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def public(name: str) -> "Any":
    """Return what a program finds under a public name of this package.

    Programs replace some functions, as they do in torch, and register rendezvous back ends. So the engine
    looks such a name up each time it needs it, and uses what the program has put there.

    Args:
        name: the name without ``elasticrs.``, such as ``multiprocessing.errors.get_error_handler``.
    """
    import sys

    module, _, attribute = f"elasticrs.{name}".rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], attribute)
