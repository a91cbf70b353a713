"""The check of the documentation site, which `make docs` runs, finds broken links and external resources. The
API reference describes every public name.
"""

import json
import re
from pathlib import Path
from urllib.parse import urlencode

import pytest
from helpers import procs
from helpers.browser import in_browser
from tools.docs import build, problems, unfound, without_excerpt

from elasticrs.rendezvous import TORCHS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path):
    """A documentation site of two pages without problems."""
    (tmp_path / "static").mkdir()
    (tmp_path / "static/style.css").write_text("a { background: url('data:image/png;base64,xx') }")
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="static/style.css"><a href="sub%20page.html#b">b</a>'
        '<a href="#top">top</a><h1 id="top">a</h1><a href="https://example.com/page">elsewhere</a>'
    )
    (tmp_path / "sub page.html").write_text('<h1 id="b">b</h1><link rel="index" href="a.html">')
    return tmp_path


def test_a_site_without_problems_passes_the_check(site):
    assert list(problems(site)) == []


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://cdn.example.com/x.js"></script>',
        '<script src="//cdn.example.com/x.js"></script>',
        '<link rel="stylesheet" href="https://fonts.example.com/css">',
        '<link rel="preconnect" href="https://fonts.example.com">',
        '<img src="http://example.com/x.png">',
        '<img srcset="https://example.com/x.png 2x">',
        '<div style="background: url(https://example.com/x.png)">',
    ],
)
def test_external_resources_in_html_are_reported(site, element):
    (site / "sub page.html").write_text(f'<h1 id="b">b</h1>{element}')
    (line,) = problems(site)
    assert line.startswith("sub page.html: ")
    assert line.endswith("loaded from another site")


@pytest.mark.parametrize("rule", ["@import 'https://example.com/x.css';", "a { src: url(//example.com/x) }"])
def test_external_resources_in_stylesheets_are_reported(site, rule):
    (site / "static/style.css").write_text(rule)
    assert [line.partition(":")[0] for line in problems(site)] == ["static/style.css"]


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("missing.html", "there is no such file"),
        ("static", "there is no such file"),
        ("a.html#missing", "the page has no such anchor"),
        ("#missing", "the page has no such anchor"),
    ],
)
def test_broken_links_are_reported(site, link, why):
    (site / "sub page.html").write_text(f'<h1 id="b">b</h1><a href="{link}">x</a>')
    assert list(problems(site)) == [f"sub page.html: {link}: {why}"]


def names_of(module):
    """Return the names in ``__all__``, also those of modules that it hands on whole. Do not
    import the module, because some modules import torch.
    """
    package, _, last = module.rpartition(".")
    if package == "elasticrs.rendezvous" and last in TORCHS:
        return set()  # The module is torch's own.
    path = ROOT / "python" / module.replace(".", "/")
    package = path / "__init__.py"
    source = package if package.exists() else path.with_suffix(".py")
    text = source.read_text(encoding="utf-8")
    stated = re.search(r"^__all__ = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    names = set(re.findall(r'"(\w+)"', stated[1])) if stated else set()
    if "__all__ +=" in text:
        names.update(*map(names_of, re.findall(r"^from (elasticrs[\w.]+) import \*", text, re.MULTILINE)))
    return names


def test_every_public_name_is_in_the_api_reference():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    described = set().union(*map(names_of, re.findall(r"automodule:: ([\w.]+)", pages)))
    described.update(re.findall(r"auto(?:function|data):: [\w.]+\.(\w+)", pages))
    names = (ROOT / "docs/api/names.md").read_text(encoding="utf-8")
    modules = re.findall(r"^### `([\w.]+)`$", names, re.MULTILINE)
    missing = {(module, name) for module in modules for name in names_of(module) - described}
    assert len(modules) > 20
    assert not missing


def test_a_query_is_found_if_the_best_entry_of_the_index_is_on_its_page(tmp_path):
    entries = {
        "--max-restarts": [[0, "index-0", True]],
        "pet_max_restarts": [[0, "index-0", True]],
        "--max-restarts of torchrun": [[1, "index-0", True]],
        "sigkill": [[1, "index-1", False]],
    }
    index = {"docnames": ["options", "other"], "indexentries": entries}
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})")
    assert list(unfound(tmp_path, {"--max-restarts": "options", "max-restarts": "options"})) == []
    wrong = {"--max-restarts": "other", "SIGKILL": "other", "start": "options"}
    assert [line.split()[3] for line in unfound(tmp_path, wrong)] == ["--max-restarts", "SIGKILL", "start"]


def test_an_entry_of_the_index_needs_a_section_with_a_text(tmp_path):
    entries = {"--keep": [[0, "index-0", True]], "resume": [[0, "index-1", True]]}
    index = {"docnames": ["options"], "indexentries": entries}
    (tmp_path / "_static").mkdir()
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})")
    texts = {"options": [[["keep", "index-0"], "--keep", "Goes on."], [["index-1"], "Resume", ""]]}
    (tmp_path / "_static/texts.js").write_text(f"const TEXTS = {json.dumps(texts)};")
    assert list(without_excerpt(tmp_path)) == ["a search for resume shows no excerpt"]


QUESTIONS = {
    "which option retries only n times": "docs/options.html#max-restarts",
    "what does exit code 93 mean": "docs/failures.html#exit-codes",
    "which rank failed and why, and in which file": "docs/failures.html#the-report",
    "how do I stop without losing a step": "docs/keep.html#go-on-in-the-next-job",
    "how do I find a hang before the limit": "docs/operating.html#how-do-i-see-the-stacks-of-all-ranks",
    "how do I keep the state without a checkpoint": "docs/keep.html#when-to-use-it",
    "what changes from torchrun": "docs/switch.html#moving-from-torchrun",
    "run on several nodes with Slurm": "docs/schedulers.html#slurm",
    "which metric counts restarts": "docs/metrics.html#elasticrs-restarts-total",
    "give an environment variable to workers": "docs/variables.html#set-for-workers",
    "what does PET_NNODES do": "docs/options.html#nnodes",
}
"""For each question of a newcomer, the section that the search has to show first."""


@pytest.mark.slow
@in_browser
def test_a_search_for_a_question_shows_its_answer_first(browser, tmp_path):
    site = tmp_path / "site"
    assert build(site) == 0
    first = "document.querySelector('#search-results .context')?.parentElement.querySelector('a').href"
    found = {}
    for question in QUESTIONS:
        browser.open(f"{(site / 'search.html').as_uri()}?{urlencode({'q': question})}")
        browser.wait_for("Search Results", procs.HANG)
        found[question] = browser.evaluate(first).removeprefix(f"{site.as_uri()}/")
    assert found == QUESTIONS
    assert browser.complaints == []
