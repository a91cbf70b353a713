"""Groups of plain programs."""

from helpers.groups import group

__all__ = ["group"]
