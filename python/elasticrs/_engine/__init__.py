"""Everything behind the names that users import. The engine may change freely, and imports none of them."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def public(name: str) -> "Any":
    """Return what programs find under a public name, given without ``elasticrs.``.

    The engine looks such a name up at each use, because programs replace functions and register back ends.
    """
    import sys

    module, _, attribute = f"elasticrs.{name}".rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], attribute)
