"""The argparse parser for programs that build on torchrun's."""

import json
import subprocess
import sys

import pytest

from elasticrs.launcher.arguments import parse
from elasticrs.launcher.options import OPTIONS, OURS
from elasticrs.run import get_args_parser, parse_args

ARGV = ["--nproc_per_node=2", "--max-restarts", "3", "-t", "0:1", "-m", "train", "--x", "1"]


def test_both_parsers_agree(monkeypatch):
    monkeypatch.setenv("PET_ROLE", "reader")
    monkeypatch.setenv("PET_STANDALONE", "1")
    ours = vars(parse(ARGV, {"PET_ROLE": "reader", "PET_STANDALONE": "1"}))
    theirs = vars(get_args_parser().parse_args(ARGV))
    assert theirs == ours == vars(parse_args(ARGV))
    assert (theirs["nproc_per_node"], theirs["role"], theirs["standalone"]) == (2, "reader", True)


def test_mistakes_are_named(capsys):
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["--max-restarts=-1", "x"])
    assert "got '-1', expected a whole number, 0 or more" in capsys.readouterr().err


def test_a_program_can_add_options_of_its_own():
    parser = get_args_parser()
    parser.add_argument("--mine")
    assert parser.parse_args(["--mine=1", "train.py"]).mine == "1"


TORCHS_OPTIONS = """
import json
from torch.distributed.run import get_args_parser
print(json.dumps([
    [action.option_strings, action.dest, action.nargs == 0, action.default, type(action).__name__]
    for action in get_args_parser()._actions if action.option_strings and action.dest != "help"
]))
"""


@pytest.mark.torch
def test_torchruns_options_are_all_there_with_their_defaults():
    done = subprocess.run(
        [sys.executable, "-c", TORCHS_OPTIONS], capture_output=True, text=True, timeout=50, check=True
    )
    theirs = {}
    for spellings, dest, is_flag, default, action in json.loads(done.stdout.splitlines()[-1]):
        has_variable = action in ("env", "check_env")
        theirs[dest] = (sorted(set(spellings)), is_flag, has_variable, default)
    ours = {option.dest: option for option in OPTIONS if option.group != OURS}
    assert ours.keys() == theirs.keys()
    spellings_of = {action.dest: action.option_strings for action in get_args_parser()._actions}
    for dest, (spellings, is_flag, has_variable, default) in theirs.items():
        option = ours[dest]
        assert sorted(spellings_of[dest]) == spellings
        assert (option.is_flag, option.has_variable) == (is_flag, has_variable), dest
        expected = option.convert(default) if isinstance(default, str) and default else default
        # What torch leaves empty has a value of its kind here.
        assert parse(["x"], {}).__dict__[dest] == expected or not (option.default or expected), dest
