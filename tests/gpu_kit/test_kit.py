"""Run the GPU kit's checks on a CPU with gloo."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.built import old_kernel
from helpers.launcher import clean_environment
from helpers.procs import run_program

from gpu_kit.checks import CHECKS

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.torch]


def run_kit(results, *options, prefix=(), env=None):
    command = [*prefix, sys.executable, "-m", "tests.gpu_kit", "--json", results, *options]
    return run_program(command, env=clean_environment(env), cwd=ROOT, timeout=590)


def rows_of(results):
    return {row["check"]: row for row in json.loads(results.read_text())["checks"]}


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_all_checks_pass_on_a_cpu(tmp_path):
    results = tmp_path / "results.json"
    done = run_kit(results, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(results)
    assert list(rows) == list(CHECKS)
    assert {name for name, row in rows.items() if row["outcome"] != "passed"} == set()
    assert all(row["figures"] for row in rows.values())


def test_a_kernel_without_pidfds_is_refused_and_skips_the_other_checks(tmp_path):
    results = tmp_path / "results.json"
    options = ("--device", "cpu", "--only", "kernel", "--only", "count")
    done = run_kit(results, *options, prefix=old_kernel("pidfd_open"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(results)
    assert (rows["kernel"]["outcome"], rows["kernel"]["figures"]["pidfds"]) == ("passed", False)
    assert "pidfd_open" in rows["kernel"]["figures"]["says"]
    assert rows["count"]["outcome"] == "skipped"


def test_the_checks_use_the_given_wheel_and_a_broken_wheel_fails(tmp_path):
    wheel = tmp_path / "elasticrs-0-py3-none-any.whl"
    info = "elasticrs-0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("elasticrs/__init__.py", "")
        archive.writestr("elasticrs/launch.py", "raise SystemExit(93)")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: elasticrs\nVersion: 0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    results = tmp_path / "results.json"
    done = run_kit(results, "--device", "cpu", "--only", "count", "--wheel", wheel)
    assert done.returncode == 1, done.stdout + done.stderr
    row = rows_of(results)["count"]
    assert row["outcome"] == "failed"
    assert "ended before" in row["detail"]


def test_a_machine_without_a_gpu_is_refused(tmp_path):
    results = tmp_path / "results.json"
    done = run_kit(results, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert "no GPU" in done.stderr
    assert not results.exists()
