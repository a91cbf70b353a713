"""The argparse parser for programs that build on torchrun's."""

import pytest

from elasticrs.launcher.arguments import parse
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
