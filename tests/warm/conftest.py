"""Modules for warm starts, and an agent's state of them."""

import json
import os
from types import SimpleNamespace

import pytest

from elasticrs._engine.supervise.run.warming import Warming


@pytest.fixture
def library(tmp_path):
    """Return a function that writes modules to a folder and returns the environment in which they are
    importable.
    """

    def write(**modules):
        folder = tmp_path / "library"
        folder.mkdir(exist_ok=True)
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return {"PYTHONPATH": str(folder)}

    return write


class Reports:
    """An agent's state of warm starts. The test sends the reports that a nursery would send.

    Attributes:
        said: the messages printed so far.
        renewed: number of nurseries that were stopped so that the next one imports again.
    """

    def __init__(self):
        self.said = []
        self.renewed = 0
        self.state = Warming(self.said.append, 120.0)

    def ends(self, *records, **event):
        """Report these records, and the end of the importing process."""
        os.write(self.state.report, b"".join(json.dumps(record).encode() + b"\n" for record in records))
        usual = {"is_ready": False, "hung": False, "exitcode": None}
        self.state.ended(SimpleNamespace(**{**usual, **event}))

    def may_fork(self, is_idle=True):
        """Return true if workers may be forked. ``is_idle`` is false if the supervisor keeps its nursery."""

        def renew():
            self.renewed += is_idle
            return is_idle

        return self.state.may_fork(SimpleNamespace(renew_nursery=renew))


@pytest.fixture
def warming():
    made = Reports()
    yield made
    made.state.close()
