"""Compare the commands of the nodes of a job. All nodes of a job have to run the same command, so that
independent jobs never merge into one.

- **CMD-1** Two commands are the same if their programs, their arguments and the users who run them are equal.
  The Python interpreter and the options of the launcher are not compared.
- **CMD-2** Some differences between the nodes of a job are ignored: the values of options such as
  ``--node-rank`` (:data:`OF_ONE_NODE`), and words that differ only in the node's name.
- **CMD-3** The record of a command has a limited size. If a command is longer, the record contains a digest
  of the rest.
"""

from __future__ import annotations

import json
import os
import sys

from elasticrs._engine.job.value import Value
from elasticrs._engine.workers.python_options import parse_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OF_ONE_NODE = frozenset({
    *("node-rank", "machine-rank", "node-id", "node-index"),
    *("node-name", "node-addr", "hostname", "host-name", "local-addr"),
})  # fmt: skip
"""Names of script options whose values usually differ between the nodes of one job."""

ANY = "*"
"""Placeholder for a value that is not compared."""

MAX_WORD = 200
MAX_WORDS = 3000
"""Maximum size of all words of a command, in bytes of JSON. ``MAX_WORD`` is the maximum size of one word."""


class Command(Value):
    """Command of a node's workers. Nodes compare their commands, because all nodes have to run the same one.

    Args:
        words: program and arguments, each of limited size.
        place: absolute path that identifies the program. It has to be the same for all agents on the same
            host. On different hosts, only the name of the program has to be the same, because each host may
            keep the job in another folder.
        node: name of the node.
        user: user id of the user who runs the command.
    """

    words: tuple[str, ...]
    place: str
    node: str
    user: int


def command_of(words: Sequence[str], place: str) -> Command:
    """Return the command that consists of these words, for this node and the user of this process.

    Args:
        words: program and arguments as the user has written them.
        place: see :class:`Command`.
    """
    return Command(tuple(_bounded(list(_hidden(words)))), _cut(place), os.uname().nodename, os.geteuid())


def command_of_file(path: str, arguments: Sequence[str]) -> Command:
    """Return the command that runs the script or the program at this path."""
    return command_of([os.path.normpath(path), *arguments], _real(path))


def command_of_python(words: Sequence[str]) -> Command:
    """Return the command that a Python interpreter runs, without the options of the interpreter.

    Args:
        words: arguments of the interpreter.
    """
    found = parse_python(words)
    program = found.program or ""
    if found.kind == "script":
        return command_of_file(program, found.arguments)
    name = program if found.kind == "stdin" else f"-{found.kind} {program}"
    return _command_of_name(name, found.arguments)


def _command_of_name(name: str, arguments: Sequence[str]) -> Command:
    """Return a command whose program has a name instead of a path. Its ``place`` contains the working
    directory, because the name may refer to another program in another directory.
    """
    return command_of([name, *arguments], os.path.join(_real(os.curdir), name))


def command_of_program(program: str, arguments: Sequence[str]) -> Command:
    """Return the command that runs a program. If the name of the program has no folder, PATH is searched for
    it.
    """
    if os.sep in program:
        return command_of_file(program, arguments)
    return _command_of_name(program, arguments)


def command_of_function(function: Callable[..., object]) -> Command:
    """Return the command of workers that run a function. The arguments of the function are not compared,
    because they are arbitrary objects.
    """
    module = getattr(function, "__module__", "")
    name = f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if file and module == "__main__":
        name += f" of {os.path.basename(file)}"
    return command_of([name], os.path.join(_real(file or os.curdir), name))


def difference(ours: Command, theirs: Command, *, is_same_host: bool) -> tuple[str, str] | None:
    """Return the first difference between two commands as two phrases for the user: one describes this node's
    command, the other describes the other node's command. Return ``None`` if the commands are the same.
    """
    if ours.user != theirs.user:
        return f"user {ours.user}", f"user {theirs.user}"
    is_elsewhere = ours.place != theirs.place
    if is_elsewhere and (is_same_host or not _is_same(ours, theirs, 0)):
        program = f"program {ours.words[0]!r}"
        if ours.words[0] == theirs.words[0]:
            return f"{program} at {ours.place!r}", f"the one at {theirs.place!r}"
        return program, repr(theirs.words[0])
    for number in range(1, max(len(ours.words), len(theirs.words))):
        if not _is_same(ours, theirs, number):
            own, other = _word(ours, number), _word(theirs, number)
            return f"argument {number} {_shown(own)}", _shown(other)
    return None


def _shown(word: str | None) -> str:
    return "(none)" if word is None else repr(word)


def _word(command: Command, number: int) -> str | None:
    return command.words[number] if number < len(command.words) else None


def _is_same(ours: Command, theirs: Command, number: int) -> bool:
    own, other = _word(ours, number), _word(theirs, number)
    if own is None or other is None:
        return own == other
    return own == other or _without_name(own, ours.node) == _without_name(other, theirs.node)


def _without_name(text: str, node: str) -> str:
    """Replace a node's full and short host name with a placeholder, wherever they are whole words."""
    for name in filter(None, dict.fromkeys((node, node.partition(".")[0]))):
        start = 0
        while (start := text.find(name, start)) >= 0:
            end = start + len(name)
            is_word = not (text[:start][-1:].isalnum() or text[end : end + 1].isalnum())
            if is_word:
                text = text[:start] + ANY + text[end:]
            start += len(ANY) if is_word else len(name)
    return text


# --- parts of a command ---


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:
        # The working directory was removed, so a relative path cannot be resolved.
        return path


def _hidden(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with a placeholder for the values of options that differ between nodes."""
    hides_next = False
    for word in words:
        option, equals, _ = word.partition("=")
        is_of_node = option.startswith("--") and option[2:].replace("_", "-").lower() in OF_ONE_NODE
        if hides_next and not word.startswith("--"):
            yield ANY
        else:
            yield f"{option}={ANY}" if is_of_node and equals else word
        hides_next = is_of_node and not equals


def _bounded(words: Sequence[str]) -> Iterator[str]:
    left = MAX_WORDS
    for index, word in enumerate(words):
        short = _cut(word)
        left -= _size(short)
        if left < 0:
            yield f"... {len(words) - index} more ({_digest(words[index:])})"
            return
        yield short


def _cut(word: str) -> str:
    if _size(word) <= MAX_WORD:
        return word
    kept = word[: MAX_WORD // 2]
    while _size(kept) > MAX_WORD // 2:
        kept = kept[: len(kept) * 3 // 4]
    return f"{kept}... ({_digest([word])})"


def _size(word: str) -> int:
    return len(json.dumps(word))


def _digest(words: Sequence[str]) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(words).encode("ascii")).hexdigest()[:16]
