"""The modules that are loaded when the package is imported."""

import sys

from helpers.procs import run_program

from elasticrs import train


def test_importing_elasticrs_train_does_not_import_torch():
    shown = "import sys, elasticrs.train; print('torch' in sys.modules)"
    done = run_program([sys.executable, "-c", shown], check=True)
    assert done.stdout == "False\n"


def test_each_submodule_is_loaded_on_first_use():
    for name in train._SUBMODULES:
        assert getattr(train, name).__name__ == f"elasticrs.train.{name}"
