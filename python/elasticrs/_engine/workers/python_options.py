"""Parse the command line of a Python interpreter to find out which program it runs."""

from __future__ import annotations

from elasticrs._engine.job.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_WITH_VALUE = "cmWX"
_LETTERS = frozenset("bBdEhiIJOPqRsStuvVxX?") | frozenset(_WITH_VALUE)
_LONG_WITH_VALUE = "--check-hash-based-pycs"


class PythonCommand(Value):
    """Command line of a Python interpreter.

    ``kind`` is what it runs: ``script``, ``m``, ``c``, ``stdin``, or empty.

    ``options`` do not include the values of options. ``letters`` are the letters of all short options, in one
    string.
    """

    kind: str
    program: str | None
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    letters: str = ""

    @property
    def unknown(self) -> str | None:
        for option in self.options:
            is_long = option.startswith("--")
            if option != _LONG_WITH_VALUE if is_long else not _LETTERS.issuperset(option[1:]):
                return option
        return None


def parse_python(words: Sequence[str]) -> PythonCommand:
    """Parse the arguments of a Python interpreter. Invalid arguments do not raise an error."""
    options: list[str] = []
    letters = ""
    rest = list(words)

    def found(kind: str, program: str | None) -> PythonCommand:
        return PythonCommand(kind, program, tuple(rest), tuple(options), letters)

    while rest:
        word = rest.pop(0)
        if word == "-":
            return found("stdin", word)
        if word == "--":
            return found("script", rest.pop(0) if rest else None)
        if not word.startswith("-"):
            return found("script", word)
        if word.startswith("--"):
            options.append(word)
            if word == _LONG_WITH_VALUE and rest:
                rest.pop(0)
            continue
        index = next((index for index, letter in enumerate(word) if letter in _WITH_VALUE), len(word))
        letters += word[1 : index + 1]
        options.append(word[: index + 1])
        if index == len(word):
            continue
        value = word[index + 1 :] or (rest.pop(0) if rest else None)
        if word[index] in "cm":
            return found(word[index], value)
    return found("", None)
