"""Parsing of the interpreter's command line, compared with the interpreter itself."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.workers.python_options import PythonCommand, parse_python


@pytest.mark.parametrize(
    ("words", "kind", "program", "arguments"),
    [
        (["t.py", "-c", "x"], "script", "t.py", ("-c", "x")),
        (["-c", "pass", "a", "--b"], "c", "pass", ("a", "--b")),
        (["-cpass", "a"], "c", "pass", ("a",)),
        (["-uBc", "pass"], "c", "pass", ()),
        (["-X", "faulthandler", "t.py"], "script", "t.py", ()),
        (["-Xfaulthandler", "-W", "error", "t.py", "-W"], "script", "t.py", ("-W",)),
        (["-OWerror", "-m", "pdb", "t.py"], "m", "pdb", ("t.py",)),
        (["-mpdb", "-c", "continue"], "m", "pdb", ("-c", "continue")),
        (["--check-hash-based-pycs", "never", "t.py"], "script", "t.py", ()),
        (["-O", "-", "a"], "stdin", "-", ("a",)),
        (["-O", "--", "-t.py"], "script", "-t.py", ()),
        (["-O"], "", None, ()),
        (["-c"], "c", None, ()),
        (["-m"], "m", None, ()),
        ([], "", None, ()),
    ],
)
def test_the_program_and_its_arguments_are_found(words, kind, program, arguments):
    found = parse_python(words)
    assert (found.kind, found.program, found.arguments) == (kind, program, arguments)
    assert found.unknown is None


@pytest.mark.parametrize("option", ["-z", "--lr", "-uz", "--lr=1"])
def test_an_option_that_python_does_not_have_is_named(option):
    assert parse_python(["-u", option, "t.py"]).unknown == option


@given(st.lists(st.text(max_size=4) | st.sampled_from(["-c", "-m", "-", "--", "-X", "-W", "-u"])))
def test_all_words_are_parsed(words):
    found = parse_python(words)
    assert isinstance(found, PythonCommand)
    assert list(found.arguments) == words[len(words) - len(found.arguments) :]


@pytest.mark.parametrize(
    "words", [["-c", "CODE", "a", "-u"], ["-X", "dev", "-c", "CODE"], ["-OOWerror", "-BcCODE", "--", "a"]]
)
def test_the_interpreter_agrees(words):
    code = "import sys; print(sys.argv)"
    words = [word.replace("CODE", code) for word in words]
    done = subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(["-c", *parse_python(words).arguments])
