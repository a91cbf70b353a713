"""Build the documentation site and check it. Nothing is fetched from the network.

Every warning of Sphinx is an error, for example about a link to a page or heading that does not exist, or a
page that is not in the navigation. The result is then checked: each link within the site must lead to a file
and an anchor that exist, and a page may not load anything from another site.
"""

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "site"

_LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src")}
"""Elements and attributes with the address of something that a browser loads with the page."""
_LOADED_RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "manifest", "preconnect"}
"""Relations (``<link rel=…>``) whose target a browser loads, or to which it connects."""


class Reference(NamedTuple):
    """An address in a page. ``is_loaded`` is true if a browser loads it together with the page."""

    address: str
    is_loaded: bool


class Page(HTMLParser):
    """Parser for the anchors and references of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[Reference] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the anchors and references of a start tag. Called by the parser."""
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if "href" in found:
            is_loaded = tag == "link" and not _LOADED_RELATIONS.isdisjoint(found.get("rel", "").split())
            self.references.append(Reference(found["href"], is_loaded))
        self.references += (Reference(found[name], True) for name in found if (tag, name) in _LOADED)
        self.references += (
            Reference(candidate.split()[0], True)
            for candidate in found.get("srcset", "").split(",")
            if candidate
        )
        self.references += _in_style(found.get("style", ""))


def _in_style(text: str) -> Iterator[Reference]:
    for address in re.findall(r"""(?:url\(|@import\s)\s*["']?([^"')\s;]+)""", text):
        yield Reference(address, True)


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each broken link of the site, and for each resource that it loads from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    styles = {path: list(_in_style(path.read_text(encoding="utf-8"))) for path in sorted(site.rglob("*.css"))}
    for path, references in (*((path, page.references) for path, page in pages.items()), *styles.items()):
        for reference in references:
            if why := _problem(path, reference, pages):
                yield f"{path.relative_to(site)}: {reference.address}: {why}"


def _problem(path: Path, reference: Reference, pages: dict[Path, Page]) -> str:
    parts = urlsplit(reference.address)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        return "loaded from another site" if reference.is_loaded else ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "there is no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "the page has no such anchor"
    return ""


def undescribed(site: Path) -> Iterator[str]:
    """Yield a line for each public class or function that is missing in the API reference although its module
    is documented.
    """
    # The inventory has four lines of text, followed by compressed data with one line for each object.
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    described = {line.partition(" ")[0] for line in inventory.splitlines()}
    for page in sorted(ROOT.glob("docs/api/*.md")):
        directives = re.findall(r"automodule:: ([\w.]+)((?:\n   :.*)*)", page.read_text(encoding="utf-8"))
        for name, options in directives:
            if ":no-" in options:
                continue
            module = importlib.import_module(name)
            for attribute in getattr(module, "__all__", ()):
                value = getattr(module, attribute)
                is_shown = (inspect.isclass(value) or inspect.isroutine(value)) and attribute not in options
                if is_shown and f"{name}.{attribute}" not in described:
                    yield f"{page.relative_to(ROOT)}: {name}.{attribute} is missing"


QUERIES = {
    "--max-restarts": "docs/options",
    "hang-timeout": "docs/options",
    "PET_NNODES": "docs/options",
    "exit code 93": "docs/failures",
    "last_call_timeout": "docs/settings",
    "ELASTICRS_FAST_EXIT": "docs/variables",
    "worker hung": "docs/events",
    "SIGKILL": "docs/troubleshooting",
    "OOM": "docs/troubleshooting",
    "elasticrs_restarts_total": "docs/metrics",
    "more restarts": "docs/options",
    "how many GPUs": "docs/options",
    "which rank failed first": "docs/failures",
    "NCCL timeout": "docs/failures",
    "resume": "docs/restarts",
}
"""For each text for which people search on the site, the page that the search has to show first."""


def unfound(site: Path, queries: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each query for which the site's search does not show the right page first.

    The search compares the query with the entries of the site's index. An entry is a result if it contains
    the query, and the query is at least half as long as the entry. The nearer the two lengths are, the
    earlier the search shows the result. Pages that contain the query only in their text come later.
    """
    index = _data(site / "searchindex.js")
    for query, expected in queries.items():
        results = [
            (len(query) / len(entry), index["docnames"][page])
            for entry, places in index["indexentries"].items()
            for page, _, is_main in places
            if is_main and query.lower() in entry and len(query) >= len(entry) / 2
        ]
        best = {page for share, page in results if share == max(results)[0]}
        if best != {expected}:
            yield f"a search for {query} does not show {expected} first, but {sorted(best) or 'no entry'}"


def without_excerpt(site: Path) -> Iterator[str]:
    """Yield a message for each entry of the index that leads to no section with a text for the excerpt. Skip
    names of Python, which have descriptions.
    """
    index, texts = _data(site / "searchindex.js"), _data(site / "_static" / "texts.js")
    for entry, places in index["indexentries"].items():
        for page, anchor, _ in places:
            sections = texts.get(index["docnames"][page], [])
            is_of_python = not anchor.startswith("index-")
            if not is_of_python and not any(anchor in ids and text for ids, _, text in sections):
                yield f"a search for {entry} shows no excerpt"


def _data(script: Path) -> Any:
    """Return the JSON value in a script that consists of one statement."""
    text = script.read_text(encoding="utf-8")
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def build(site: Path) -> int:
    """Build the site and return Sphinx's exit code. Remove the old site first, because Sphinx does not update
    pages that refer to removed objects.
    """
    if site.exists():
        shutil.rmtree(site)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", str(ROOT / "docs")]
    options = ["--quiet", "--fail-on-warning", "--jobs", "auto", "-d", str(site / ".doctrees")]
    return subprocess.run([*command, *options, str(ROOT), str(site)], cwd=ROOT, check=False).returncode


def main() -> int:
    """Build and check the site. Return the exit code."""
    if code := build(SITE):
        return code
    found = [*problems(SITE), *undescribed(SITE), *unfound(SITE, QUERIES), *without_excerpt(SITE)]
    print("\n".join(found or [f"open {(SITE / 'index.html').relative_to(ROOT)}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
