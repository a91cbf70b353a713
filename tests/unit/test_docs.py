"""Names in the pages exist: options, targets of links, imports. Python code in the pages compiles."""

import re
from pathlib import Path

import pytest

from elasticrs.job.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}
"""What the page of options calls them."""


def without_code(page):
    return re.sub("```.*?```", "", page, flags=re.DOTALL)


def anchors(page):
    """The names that a link may have behind ``#``, as a Markdown viewer makes them from the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_option_is_named_and_no_other():
    lines = [line for line in PAGES["docs/options.md"].splitlines() if line.startswith("|")]
    named = re.findall(r"--?[a-z][a-z-]*", "\n".join(re.split(r"(?<!\\)\|", line)[1] for line in lines))
    assert set(named) == {SHORT.get(option.name, f"--{option.name}") for option in OPTIONS} - {
        "--help",
        "--version",
    }


SNIPPETS = [
    (page, snippet)
    for page, text in PAGES.items()
    for snippet in re.findall("```python\n(.*?)```", text, re.DOTALL)
]


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_python_compiles_and_its_imports_exist(page, snippet):
    compile(snippet, page, "exec")
    for line in snippet.splitlines():
        if line.startswith(("import elasticrs", "from elasticrs")):
            exec(line, {})


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(PAGES[page])):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target
