"""Names, signatures, defaults and options match torch's, except for those that
docs/api/names.md lists.
"""

from pathlib import Path

import pytest

from compat import names, table

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.torch
def test_the_compatibility_table_lists_exactly_the_differences_from_torch(torch_programs):
    # Compare in a separate process, because importing torch would cost this process hundreds of megabytes and
    # start threads.
    done = torch_programs.run_module("compat", TESTS)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


REACHED = """
import os, sys
# The root is imported by all of them.
import elasticrs
lacking = []
for name in sys.argv[1:]:
    package, _, module = name.rpartition(".")
    pid = os.fork()
    if pid == 0:
        __import__(package)
        found = getattr(sys.modules[package], module, None)
        os._exit(0 if found is not None and found is sys.modules.get(name) else 1)
    if os.waitpid(pid, 0)[1] != 0:
        lacking.append(name)
print(*lacking)
"""


@pytest.mark.torch
def test_modules_are_attributes_after_importing_only_their_package(torch_programs):
    modules = sorted({place for place, _ in table.read(table.DOCUMENT.read_text(encoding="utf-8"))})
    modules.remove(names.OPTIONS)
    assert len(modules) > 30
    done = torch_programs.run(REACHED, *modules)
    assert done.stdout == "\n", done.stderr


class Theirs:
    """A class of a simulated torch version."""

    def __init__(self, one, two=2): ...

    def method(self, value): ...

    def left_out(self): ...


class Ours:
    """Our counterpart of :class:`Theirs`, with some differences."""

    def __init__(self, one, two=3, *, three=None): ...

    def method(self, other): ...


def compared(theirs, ours):
    comparison = names.Comparison()
    comparison._class("place", "Name", theirs, ours)
    return {name: states for (_, name), states in comparison.found.items()}


def test_the_comparison_finds_every_kind_of_difference(monkeypatch):
    monkeypatch.setattr(Theirs, "__module__", "torch.distributed.elastic.made_up")
    assert compared(Theirs, Theirs) == {}
    assert compared(Theirs, Ours) == {
        "Name": ["bases"],
        "Name(two)": ["default"],
        "Name(three)": ["extra"],
        "Name.method(value)": ["missing"],
        "Name.method(other)": ["extra"],
        "Name.left_out": ["missing"],
    }


TABLE = f"""
Prose with | a bar.

{table.FIRST}

### `elasticrs.place`

{table.HEAD[0]}
{table.HEAD[1]}
| `same`, `also` | same |  |
| `gone` | missing | it is etcd's |

{table.LAST}
More prose.
"""


def test_each_wrong_row_of_the_compatibility_table_is_reported():
    place = "elasticrs.place"
    found = {(place, "same"): "same", (place, "also"): "same", (place, "gone"): "missing"}
    rows = table.read(TABLE)
    assert list(table.problems(found, rows)) == []
    for change in ({(place, "also"): "default"}, {(place, "gone"): "same"}, {(place, "new"): "same"}):
        (problem,) = table.problems({**found, **change}, rows)
        assert next(iter(change))[1] in problem
    (problem,) = table.problems({key: found[key] for key in list(found)[:2]}, rows)
    assert "gone" in problem
    (problem,) = table.problems(found, {**rows, (place, "gone"): ("missing", "")})
    assert "no reason" in problem


def test_rewriting_the_table_keeps_the_valid_reasons_and_the_prose():
    place = "elasticrs.place"
    found = {(place, "gone"): "missing", (place, "left"): "missing", (place, "same"): "same"}
    text = table.written(TABLE, found, {})
    assert table.read(text) == {
        (place, "gone"): ("missing", "it is etcd's"),
        (place, "left"): ("missing", ""),
        (place, "same"): ("same", ""),
    }
    assert text.startswith("\nProse")
    assert text.endswith("More prose.\n")
    assert table.written(text, found, {}) == text
