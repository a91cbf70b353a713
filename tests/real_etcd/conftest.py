"""Clients of etcd."""

import pytest
from helpers.etcd import of_wheel
from helpers.etcd_client import connect_etcd, relay_to
from helpers.groups import group

__all__ = ["connect_etcd", "group", "relay_to"]

OVER_EACH = ("test_client", "test_client_cluster", "test_client_troubles")
"""What depends on the release of etcd: its interface, its words, and how members come and go. The gate tests
the installed release, and the nightly run the other one as well.
"""


def pytest_generate_tests(metafunc):
    name = metafunc.module.__name__.rpartition(".")[2]
    program = of_wheel()
    if name in OVER_EACH and "etcd_program" in metafunc.fixturenames and program is not None:
        programs = [
            pytest.param(None, id="installed"),
            pytest.param(program, id="wheel", marks=pytest.mark.slow),
        ]
        metafunc.parametrize("etcd_program", programs, indirect=True)
