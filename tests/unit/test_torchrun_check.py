"""``elasticrun --check torchrun ARGS…`` describes what elasticrun does differently for a torchrun command
line.

``tests/golden/check-torchrun.txt`` contains command lines and the texts that are printed.
"""

import shlex

import pytest

from elasticrs._engine.cli import command_line
from elasticrs._engine.cli import help as texts
from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.gpus import devices, numa
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import OPTIONS, parse

SCREEN = 45
"""Lines of a terminal that fills a screen."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with a script, on a simulated machine with two GPUs."""
    monkeypatch.setattr(devices, "worker_count", lambda *_: devices.Count(2, "gpu", "/proc/driver/nvidia"))
    (tmp_path / "train.py").write_text("raise AssertionError('started')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(title):
    """Check a command line. Words like ``NAME=value`` before the program set environment variables."""
    words = shlex.split(title)
    environ = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    while words[0].partition("=")[0].isupper():
        name, _, environ[name] = words.pop(0).partition("=")
    return texts.check(words, environ)


def all_differences():
    args = parse(["train.py"], {})
    return texts._differences("torchrun", args, frozenset(), resolve(args, {"PATH": "/usr/bin:/bin"}), {})


def test_check_output_and_exit_codes_match_the_golden_file(folder, golden):
    outputs = {}
    for title in golden.titles("check-torchrun"):
        text, code = check(title)
        assert code == (2 if "would not run" in text else 0)
        lines = text.splitlines()
        assert len(lines) <= SCREEN
        assert all(
            len(line) <= texts.WIDTH for line in lines if not line.startswith(("  elasticrun", "elasticrun"))
        )
        outputs[title] = text
    golden("check-torchrun", outputs)


def test_every_difference_is_shown_for_some_command_line(folder, golden, monkeypatch):
    monkeypatch.setattr(numa, "cpus_by_local_rank", lambda _mode, nproc, _environ: [[0]] * nproc)
    titles = [*golden.titles("check-torchrun"), "torchrun --numa-binding node train.py"]
    printed = " ".join(check(title)[0] for title in titles)
    flat = " ".join(printed.split())
    assert [text for _, _, text in all_differences() if text not in flat] == []


def test_differences_name_only_existing_options(folder):
    named = {subject for _, subject, _ in all_differences() if subject.startswith("--")}
    # torch.distributed.launch adds `--local-rank` to the arguments of the script, so it is not an option of
    # elasticrun.
    assert named - {option.flag for option in OPTIONS} == {"--local-rank"}


@pytest.mark.parametrize(
    "title",
    [
        "elasticrun train.py",
        "python -m",
        "python -m trainer",
        "torchrun --help",
        "torchrun --check torchrun x",
    ],
)
def test_command_lines_that_start_no_torchrun_job_are_refused(folder, title):
    with pytest.raises(UsageError, match=r"^--check: "):
        check(title)


def test_the_check_option_starts_no_job(folder, capfd):
    assert command_line.main(["--check", "torchrun", "--log-dir", "logs", "train.py"]) == 0
    assert command_line.main(["--check=torchrun", "absent.py"]) == 2
    assert command_line.main(["--check", "train.py"]) == 2
    written = capfd.readouterr()
    assert "elasticrun --log-dir logs train.py" in written.out
    assert "'absent.py'" in written.out
    assert "--check" in written.err
    assert [path.name for path in folder.iterdir()] == ["train.py"]
