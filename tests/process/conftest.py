"""Fixtures and helpers for all tests in this folder."""

from multiprocessing import resource_tracker

import pytest


@pytest.fixture(autouse=True, scope="session")
def tracker() -> None:
    """Start multiprocessing's resource tracker now, because the first spawn would start it and leave it
    running.
    """
    resource_tracker.ensure_running()
