"""Every command in the documentation runs in a test, or a hidden comment on the page says why not.

A block of commands has the language ``console`` or ``bash``. In a ``console`` block whose commands start with
``$``, the other lines are output. The test runs the block in an empty folder with a small ``train.py``, and
expects exit code 0. A comment on the line before the block changes this:

``<!-- test: needs WHAT -->``
    not run, because it needs a cluster, a GPU, Docker, the network, …
``<!-- test: in FILE -->``
    not run here, because the named test or tool of the project runs it.
``<!-- test: until TEXT -->``
    a server: runs until it has printed the text, and is then stopped by SIGTERM.
``<!-- test: slow -->``
    runs only in ``make nightly``, because it takes long.

Whatever the comment, the options of ``elasticrun`` and the targets of ``make`` have to exist.
"""

import re
import shlex
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import ports
from helpers.launcher import Launched, clean_environment
from helpers.procs import run_program

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import TextRequested, parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
NEEDS = (
    "a cluster",
    "a GPU",
    "Docker",
    "Kubernetes",
    "Slurm",
    "the network",
    "a nightly Rust",
    "etcd with users",
)
FIXED_PORTS = ("29400", "8080")
SCRIPT = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"

FENCE = re.compile(r"(?ms)^(?: *<!-- test: ([^\n]*?) -->\n)?( *)```(\w*)\n(.*?)^ *```$")


class Block(NamedTuple):
    """The commands of a block on a page, one per line."""

    place: str
    marker: str
    commands: list[str]


def commands_of(text):
    """Return the commands of a block without comments, and with continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in lines if line]


def blocks_of(path):
    text = path.read_text(encoding="utf-8")
    for marker, _, language, content in FENCE.findall(text):
        if language in ("console", "bash"):
            line = text[: text.index(content)].count("\n")
            yield Block(f"{path.relative_to(ROOT)}:{line}", marker, commands_of(content))


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
RUN = [
    pytest.param(block, id=block.place, marks=[pytest.mark.slow] if block.marker == "slow" else [])
    for block in BLOCKS
    if block.marker in ("", "slow") and "make " not in " ".join(block.commands)
]
SERVERS = [pytest.param(block, id=block.place) for block in BLOCKS if block.marker.startswith("until ")]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def environment():
    folder = Path(sys.executable).parent
    found = clean_environment()
    return {**found, "PATH": f"{folder}:{found['PATH']}", "OMP_NUM_THREADS": "1"}


def with_free_ports(text):
    for port in FIXED_PORTS:
        text = re.sub(rf"\b{port}\b", str(ports.free()), text)
    return text


@pytest.mark.parametrize("block", RUN)
def test_documented_commands_run(folder, block):
    script = with_free_ports("\n".join(("set -eu", *block.commands)))
    done = run_program(["bash", "-c", script], cwd=folder, env=environment(), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", SERVERS)
def test_documented_servers_run_until_they_are_stopped(folder, block):
    (command,) = block.commands
    argv = ["bash", "-c", f"exec {with_free_ports(command)}"]
    server = Launched(argv, env=environment(), cwd=folder)
    try:
        server.wait_for_line(re.escape(block.marker.removeprefix("until ")))
        server.signal(signal.SIGTERM)
        server.exits(0)
    finally:
        server.close()


def test_markers_on_pages_name_a_reason_or_a_file():
    for place, marker, commands in BLOCKS:
        kind, _, what = marker.partition(" ")
        assert kind in ("", "needs", "in", "until", "slow"), (place, marker)
        if kind == "needs":
            assert set(what.split(", ")) <= set(NEEDS), (place, marker)
        if kind == "in":
            assert (ROOT / what).is_file(), (place, marker)
        if any(command.startswith("make ") for command in commands):
            # A target such as `make test` would run this test again.
            assert kind in ("needs", "in"), (place, marker)


def words_of(command):
    """Return the words of a simple command. A variable or a command substitution becomes ``2``."""
    return shlex.split(re.sub(r"\$\([^)]*\)|\$\{?\w+\}?", "2", command))


def launches():
    """Yield the location and the arguments of each ``elasticrun`` command in the documentation."""
    for place, _, commands in BLOCKS:
        for command in commands:
            # Skip commands with an ellipsis, because it is not an argument.
            _, found, arguments = f" {command}".partition(" elasticrun ")
            if found and "…" not in arguments:
                yield place, words_of(arguments)


@pytest.mark.parametrize(("place", "argv"), list(launches()))
def test_documented_elasticrun_options_exist(place, argv):
    try:
        parse(argv, {})
    except TextRequested:
        return
    except UsageError as error:
        pytest.fail(f"{place}: {error}")


def test_documented_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [command for block in BLOCKS for command in block.commands if command.startswith("make ")]
    assert len(commands) > 5
    for command in commands:
        named = {word for word in command.split()[1:] if "=" not in word}
        assert named <= targets, command


def test_commands_appear_only_in_blocks_with_a_language():
    """Blocks without a language and indented blocks contain no commands, because they would not be tested."""
    first = re.compile(
        r"\s*(?:\$ |elasticrun |torchrun |python3? |make |pip |curl |docker |kubectl |srun |sbatch )"
    )
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        silent = [content for _, _, language, content in FENCE.findall(text) if not language]
        assert not [content for content in silent if first.match(content)], path
        indented = re.findall(r"(?m)^\n    (.*)$", FENCE.sub("", text))
        assert not [line for line in indented if first.match(line)], path
