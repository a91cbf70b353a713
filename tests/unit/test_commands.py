"""Comparison of the commands of the nodes of a job."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.nodes.protocol.rendezvous import (
    MAX_WORDS,
    Command,
    command_of_file,
    command_of_function,
    command_of_program,
    command_of_python,
    difference,
)

texts = st.text(st.characters(exclude_categories=()), max_size=400)


def on(node, *words, place="/train.py", user=0):
    return Command(words, place, node, user)


def are_same(ours, theirs, *, is_same_host=False):
    found = difference(ours, theirs, is_same_host=is_same_host)
    assert (found is None) == (difference(theirs, ours, is_same_host=is_same_host) is None)
    return found is None


@given(st.lists(texts, max_size=60), st.lists(texts, max_size=60))
def test_commands_are_the_same_if_their_arguments_are(one, other):
    ours, theirs = (command_of_file("train.py", each) for each in (one, other))
    assert are_same(ours, ours)
    if not any(each.startswith("--") for each in (*one, *other)):
        names = any(os.uname().nodename.partition(".")[0] in each for each in (*one, *other))
        assert are_same(ours, theirs) == (one == other) or names


@given(st.lists(texts, max_size=300))
def test_a_recorded_command_has_a_limited_size(arguments):
    words = command_of_file("train.py", arguments).words
    assert sum(len(json.dumps(word)) for word in words) < MAX_WORDS + 100


@pytest.mark.parametrize("length", [10, 1000])
@pytest.mark.parametrize("number", [1, 100, 2000])
def test_a_difference_is_seen_wherever_it_is(number, length):
    same = ["x" * length] * 2000
    changed = [*same[: number - 1], "x" * (length - 1) + "y", *same[number:]]
    one, other = (command_of_file("train.py", each) for each in (same, changed))
    assert not are_same(one, other)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("t.py", "--out=/scratch/n1/a"), ("t.py", "--out=/scratch/n2/a")),
        (("t.py", "--host", "n1.test"), ("t.py", "--host", "n2.test")),
        (("t.py", "n1"), ("t.py", "n2.test")),
    ],
)
def test_names_of_nodes_may_differ(ours, theirs):
    assert are_same(on("n1.test", *ours), on("n2.test", *theirs))


def test_a_node_with_the_name_of_an_argument_does_not_change_it():
    ours, theirs = on("gpu", "t.py", "--device=gpu"), on("b", "t.py", "--device=gpu")
    assert are_same(ours, theirs)
    assert not are_same(on("a", "t.py", "--data=a"), on("b", "t.py", "--data=c"))
    assert not are_same(on("n1", "t.py", "n11"), on("n2", "t.py", "n21"))


@pytest.mark.parametrize("option", ["--node-rank", "--node_rank", "--machine-rank", "--local-addr"])
def test_options_of_one_node_may_differ(option):
    for spelled in ([option, "{}"], [f"{option}={{}}"]):
        ours, theirs = (
            command_of_file("t.py", ["-v", *(each.format(number) for each in spelled), "--lr=1"])
            for number in "01"
        )
        assert are_same(ours, theirs)
    assert not are_same(
        command_of_file("t.py", [option, "--lr=1"]), command_of_file("t.py", [option, "--lr=2"])
    )


def test_on_one_host_the_folder_matters(tmp_path, monkeypatch):
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        made.append((command_of_file("./train.py", []), command_of_python(["-u", "-m", "train"])))
    for ours, theirs in zip(*made, strict=True):
        assert are_same(ours, theirs)
        assert not are_same(ours, theirs, is_same_host=True)
    monkeypatch.chdir(tmp_path)
    assert are_same(command_of_file("a/train.py", []), made[0][0], is_same_host=True)


def test_program_user_and_number_of_arguments_matter():
    ours = on("a", "t.py", "1")
    assert difference(ours, on("a", "t.py", "1", user=1000), is_same_host=True) == ("user 0", "user 1000")
    assert not are_same(ours, on("a", "u.py", "1", place="/u.py"))
    assert not are_same(ours, on("a", "t.py"))
    assert not are_same(ours, on("a", "t.py", "1", "1"))
    assert not are_same(command_of_program("true", []), command_of_program("false", []))


def test_options_of_python_do_not_matter_but_its_program_does():
    same = [command_of_python([*options, "t.py", "1"]) for options in ([], ["-u"], ["-X", "dev", "-OO"])]
    assert all(are_same(same[0], each, is_same_host=True) for each in same)
    for other in (["-m", "t.py", "1"], ["-c", "t.py", "1"], ["-", "1"], ["t.py", "-u"]):
        assert not are_same(same[0], command_of_python(other))


def test_functions_are_told_apart_by_their_names():
    same = command_of_function(are_same)
    assert are_same(same, command_of_function(are_same), is_same_host=True)
    assert not are_same(same, command_of_function(on), is_same_host=True)
