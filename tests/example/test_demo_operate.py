"""The demo `make demo-operate`, which operates a training on three nodes as a user would."""

import pytest


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_the_demo_runs_as_documented(run_demo, tmp_path):
    output = run_demo("operate/demo.py", "--pictures", tmp_path, timeout=580)
    assert "page (" in output
    for what in ("restart", "drain of a node"):
        assert f"{what}: all ranks after step" in output
    assert "NOT AS PROMISED" not in output
