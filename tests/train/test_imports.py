"""The modules that are loaded when the package is imported."""

import subprocess
import sys


def test_torch_is_not_imported():
    shown = "import sys, elasticrs.train; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
