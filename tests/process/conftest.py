"""What all tests of this folder need."""

from multiprocessing import resource_tracker

import pytest


@pytest.fixture(autouse=True, scope="session")
def tracker() -> None:
    """Multiprocessing's resource tracker comes with the first spawn, and stays."""
    resource_tracker.ensure_running()
