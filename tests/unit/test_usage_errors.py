"""A mistake in the command line, its variables or its files prints a single line and exits with code 2. No
worker is started.

``tests/golden/usage-errors-*.txt`` contain the command lines, or back end, endpoint and settings, and the
lines that are printed.
"""

import ast
import os

import pytest
from helpers.launcher import clean_environment

from elasticrs._engine.cli import command_line
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.nodes.describe import PYTHON, describe
from elasticrs._engine.workers import logs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder that contains the files named in the command lines."""
    (tmp_path / "train.py").write_text("raise AssertionError('started')\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "crlf.sh").write_bytes(b"#!/bin/sh\r\ntrue\r\n")
    (tmp_path / "crlf.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "layout", lambda *_: pytest.fail("log files were laid out"))
    return tmp_path


def line_of(words, monkeypatch, capfd):
    """Run the command line and return the line that it prints. Words like ``NAME=value`` set environment
    variables.
    """
    environ = {**clean_environment({"CUDA_VISIBLE_DEVICES": ""})}
    argv = []
    for word in words:
        name, is_assigned, value = word.partition("=")
        if is_assigned and name.isidentifier() and name.isupper():
            environ[name] = value
        else:
            argv.append(word)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", environ)
        assert command_line.main(argv) == 2, words
    written = capfd.readouterr()
    (line,) = written.err.splitlines()
    assert (line.startswith("elasticrs: "), written.out) == (True, ""), words
    return line


@pytest.mark.parametrize("kind", ["options", "nodes"])
def test_invalid_command_lines_print_the_expected_line(folder, monkeypatch, capfd, golden, kind):
    name = f"usage-errors-{kind}"
    texts = {title: line_of(title.split()[1:], monkeypatch, capfd) for title in golden.titles(name)}
    golden(name, texts, {r"are more than .*": "are more than LIMIT"})
    assert sorted(os.listdir(folder)) == ["binary", "crlf.sh", "empty", "folder", "train.py"]


def test_invalid_rendezvous_settings_raise_the_expected_error(folder, golden):
    texts = {}
    for title in golden.titles("usage-errors-settings"):
        backend, endpoint, config = ast.literal_eval(title)
        with pytest.raises(UsageError) as raised:
            describe(backend, endpoint, "j", (1, 2), config, {}, words=PYTHON)
        (line,) = str(raised.value).splitlines()
        texts[title] = line.partition("; known: ")[0]
    golden("usage-errors-settings", texts)
