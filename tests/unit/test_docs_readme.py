"""The first page's Python can be read and its links lead somewhere; the page of options names every option."""

import re
from pathlib import Path

import pytest

from elasticrs.launcher.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS_PAGE = (ROOT / "docs/options.md").read_text(encoding="utf-8")
SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}
"""What the page calls them."""


def cells(number):
    """The texts of one column of the tables of options."""
    lines = OPTIONS_PAGE.splitlines()
    rows = [re.split(r"(?<!\\)\|", line[1:-1]) for line in lines if line.startswith("|")]
    return "\n".join(row[number] for row in rows)


def test_every_option_is_named_and_no_other():
    named = set(re.findall(r"--?[a-z][a-z-]*", cells(0)))
    assert named == {SHORT.get(option.name, f"--{option.name}") for option in OPTIONS} - {
        "--help",
        "--version",
    }


@pytest.mark.parametrize("snippet", re.findall("```python\n(.*?)```", PAGE, re.DOTALL))
def test_its_python_compiles_and_its_imports_exist(snippet):
    compile(snippet, "README.md", "exec")
    for line in snippet.splitlines():
        if line.startswith(("import elasticrs", "from elasticrs")):
            exec(line, {})


def test_its_links_lead_somewhere():
    headings = {
        line.lstrip("# ").lower().replace(" ", "-") for line in PAGE.splitlines() if line.startswith("#")
    }
    targets = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert targets
    for target in targets:
        file, _, heading = target.partition("#")
        assert (ROOT / file).exists(), target
        assert file or heading in headings, target
