"""``--keep`` uses parts of Lightning and transformers that are not public, and ignores unknown versions."""

import os
import subprocess
import sys

import pytest
from helpers.procs import HANG

KNOWN = """
import importlib, sys
from elasticrs._engine.inside.keep import frameworks
module = importlib.import_module(sys.argv[1])
frameworks.patch(module)
print(hasattr(getattr(module.Trainer, sys.argv[2]), "__wrapped__"))
"""


def run(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, env={**os.environ, "RANK": "7"}, capture_output=True, text=True, check=False, timeout=HANG
    )


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("module", "method"),
    [
        ("lightning.pytorch.trainer.trainer", "fit"),
        ("pytorch_lightning.trainer.trainer", "fit"),
        ("transformers.trainer", "train"),
    ],
)
def test_the_installed_version_has_what_is_used(module, method):
    done = run(KNOWN, module, method)
    # If a framework has changed, this line names the method or parameter.
    assert [line for line in done.stderr.splitlines() if "elasticrs: keep:" in line] == []
    assert done.stdout == "True\n", done.stderr


UNKNOWN = """
import sys, types
from elasticrs._engine.inside.keep import frameworks

class Connector:
    def resume_start(self, checkpoint_path): ...
    def resume_end(self): ...
    def restore_optimizers(self): ...
    def dump_checkpoint(self, weights_only): ...
    def _get_lightning_module_state_dict(self): ...

class Renamed(Connector):
    def resume_start(self, source): ...

class Empty: ...

package = sys.modules["pytorch_lightning"] = types.ModuleType("pytorch_lightning")
package.__version__ = "9.9"
for connector in (Connector, Renamed, Empty, None):
    class Trainer:
        def fit(self, model, ckpt_path=None): ...

    before = Trainer.fit
    module = types.ModuleType("pytorch_lightning.trainer.trainer")
    module.Trainer = Trainer
    if connector is not None:
        module._CheckpointConnector = connector
    frameworks.patch(module)
    print(Trainer.fit is before)
"""


@pytest.mark.torch
def test_an_unknown_version_is_left_alone_with_one_line():
    done = run(UNKNOWN)
    assert done.stdout.split() == ["False", "True", "True", "True"]
    said = "elasticrs: keep: rank 7: Keep is off, because pytorch_lightning 9.9 is not known to work: "
    problems = [line.partition(said)[2].partition(";")[0] for line in done.stderr.splitlines()]
    assert problems[:2] == [
        "Renamed.resume_start has no parameter checkpoint_path",
        "Empty has no resume_start",
    ]
    assert problems[2].startswith("AttributeError(")
    assert len(problems) == 3
