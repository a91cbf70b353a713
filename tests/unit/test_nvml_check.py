"""Tests for the GPU health check, run as a program that loads a fake NVML."""

import os
import sys

import pytest
from helpers.fake_nvml import gpus
from helpers.procs import run_program

from elasticrs._engine.gpus.node_check import UNFIT, NodeCheck
from elasticrs._engine.gpus.nvml import RECOVERY_ACTIONS
from elasticrs._engine.gpus.nvml_check import NO_ANSWER
from elasticrs._engine.job.config import HealthSource

__all__ = ["gpus"]

ASK = "import sys; from elasticrs._engine.gpus import nvml_check; sys.exit(nvml_check.main())"
SHORT_LIMIT = ASK.replace("sys.exit", "nvml_check.LIMIT = 0.5; sys.exit")
COMMAND = (sys.executable, "-c", ASK)
RESET, REBOOT = 1, 2


@pytest.fixture
def check(gpus):
    """Return a function that runs the program and returns its exit code and the lines of its output."""

    def run(**environment):
        done = run_program(COMMAND, env={**os.environ, **gpus.environment, **environment})
        assert done.stderr == ""
        return done.returncode, done.stdout.splitlines()

    return run


def test_gpus_without_errors_are_fit(check, gpus):
    gpus.set("count", 2)
    gpus.set("gpu1/field230", 0)
    assert check() == (0, ["2 GPUs are fit"])


def test_an_unexpected_exception_is_no_answer(gpus):
    broken = ASK.replace("sys.exit", "nvml_check.why_unfit = lambda _: 1 / 0; sys.exit")
    done = run_program((sys.executable, "-c", broken), env={**os.environ, **gpus.environment})
    assert done.returncode == NO_ANSWER
    assert "ZeroDivisionError" in done.stdout


@pytest.mark.parametrize("action", range(1, 8))
def test_a_recovery_action_makes_the_node_unfit(check, gpus, action):
    gpus.set("count", 2)
    gpus.set("gpu1/field230", action)
    code, (line,) = check()
    assert code == UNFIT
    assert "GPU 1" in line
    assert RECOVERY_ACTIONS[action] in line


def test_an_unknown_recovery_action_is_reported_and_leaves_the_gpu_fit(check, gpus):
    gpus.set("gpu0/field230", 93)
    code, (remark, last) = check()
    assert (code, last) == (0, "1 GPU is fit")
    assert "93" in remark


def test_the_last_line_names_all_unfit_gpus(check, gpus):
    gpus.set("count", 2)
    gpus.set("gpu0/field230", RESET)
    gpus.set("gpu1/field230", REBOOT)
    code, (line,) = check()
    assert code == UNFIT
    assert "GPU 0" in line
    assert "GPU 1" in line


@pytest.mark.parametrize(
    ("fields", "is_unfit", "remarks"),
    [
        ({4: 3}, False, 2),
        ({144: 1}, False, 2),
        ({4: 3, 144: 1}, True, 3),
        ({145: 1}, True, 1),
        ({230: 0, 4: 3, 144: 1}, False, 2),
        ({230: 0, 145: 1}, True, 0),
    ],
)
def test_memory_errors_are_used_if_the_driver_reports_no_recovery_action(
    check, gpus, fields, is_unfit, remarks
):
    gpus.remove("gpu0/field230")
    for number, value in fields.items():
        gpus.set(f"gpu0/field{number}", value)
    code, lines = check()
    assert (code, len(lines)) == (UNFIT if is_unfit else 0, remarks + 1)
    assert ("unfit" in lines[-1]) == is_unfit


@pytest.mark.parametrize(("code", "is_unfit"), [(15, True), (16, True), (999, False), (4, False)])
@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetFieldValues"])
def test_a_lost_gpu_is_unfit_and_other_nvml_errors_are_inconclusive(check, gpus, function, code, is_unfit):
    gpus.set("fails", f"{function} {code}")
    exit_code, lines = check()
    assert exit_code == (UNFIT if is_unfit else NO_ANSWER)
    assert function in "\n".join(lines)


def test_a_node_without_gpus_passes_the_check(check, gpus):
    gpus.set("count", 0)
    assert check()[0] == 0


@pytest.mark.parametrize("code", [9, 13, 18, 999])
def test_an_nvml_initialization_failure_is_inconclusive(check, gpus, code):
    gpus.set("fails", f"nvmlInit_v2 {code}")
    exit_code, (line,) = check()
    assert exit_code == NO_ANSWER
    assert "NVML" in line or "NVIDIA" in line


def test_a_missing_nvml_library_is_inconclusive(check, tmp_path):
    code, (line,) = check(LD_LIBRARY_PATH=str(tmp_path))
    assert code == NO_ANSWER
    assert "libnvidia-ml.so.1" in line


def test_an_nvml_library_without_a_required_function_is_inconclusive(check, tmp_path):
    """The C library is loaded in place of NVML, and it has none of NVML's functions."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        libc = next(line.split()[-1] for line in maps if "/libc.so" in line or "/libc-" in line)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "libnvidia-ml.so.1").symlink_to(libc)
    code, (line,) = check(LD_LIBRARY_PATH=str(tmp_path / "other"))
    assert code == NO_ANSWER
    assert "nvmlInit_v2" in line


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetFieldValues"])
def test_a_hanging_nvml_function_is_named_and_the_check_is_inconclusive(gpus, function):
    gpus.set("hangs", f"{function} 1")
    done = run_program((sys.executable, "-c", SHORT_LIMIT), env={**os.environ, **gpus.environment})
    assert (done.returncode, done.stderr) == (NO_ANSWER, "")
    assert function in done.stdout


def test_an_unfit_gpu_found_before_nvml_hangs_is_reported(gpus):
    gpus.set("count", 2)
    gpus.set("gpu0/field230", RESET)
    gpus.set("hangs", "nvmlDeviceGetFieldValues 2")
    done = run_program((sys.executable, "-c", SHORT_LIMIT), env={**os.environ, **gpus.environment})
    assert done.returncode == UNFIT
    assert "GPU 0" in done.stdout.splitlines()[-1]


def test_the_nvml_check_runs_as_a_node_check(gpus, monkeypatch):
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    gpus.set("gpu0/field230", REBOOT)
    (result,) = NodeCheck([HealthSource.parse("nvml")], 60.0).finish()
    assert result.unfit is not None
    assert "reboot" in result.unfit
