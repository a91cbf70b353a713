"""The demo of several nodes runs as its documentation promises, with and without network namespaces."""

import shutil
from pathlib import Path

import pytest
from helpers import hosts

ROOT = Path(__file__).parents[2]
EPOCHS = "22"
"""The host is back after some six; the others are there for a quick machine, on which it comes back late."""

PLACES = [
    pytest.param((), marks=pytest.mark.privileged, id="namespaces"),
    pytest.param(("--loopback",), id="loopback"),
]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", PLACES)
def test_training_continues_while_a_host_is_disconnected_and_rejoins(run_demo, tmp_path, options):
    if not options and (reason := hosts.why_not()):
        pytest.skip(reason)
    # Use the folder name of a fresh clone, because the project's name is then part of every script's path.
    clone = tmp_path / "elasticrs"
    for part in ("examples", "tests/helpers"):
        shutil.copytree(ROOT / part, clone / part)
    printed = run_demo(clone / "examples" / "ddp_multinode" / "demo.py", "--epochs", EPOCHS, *options)
    told = [line[11:].split(":")[0] for line in printed.splitlines() if line[8:9] == "s"]
    assert [line for line in told if "workers train" in line] == [
        "3 workers train",
        "2 workers train",
        "3 workers train",
    ]
    assert "the same workers train" in printed
    assert "NOT AS PROMISED" not in printed
