"""Fixtures for workers that use :class:`elasticrs.Keep`."""

from helpers.keep_agent import agent, programs

__all__ = ["agent", "programs"]
