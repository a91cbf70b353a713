"""Configuration of Sphinx for the documentation site, which `make docs` builds.

The pages of the site are the Markdown files that people also read in the repository. Only the pages in
`docs/api` contain directives of Sphinx. The site's navigation is made from the list of pages at the end of
README.md, and from the lists of two index pages.
"""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import elasticrs  # noqa: E402

project = "elasticrs"
version = release = elasticrs.__version__

# The source folder is the root of the project, so that links between README.md, the pages and other files
# work.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "examples/README.md"]
exclude_patterns = [
    ".*",
    *("benchmarks", "contrib", "crates", "dist", "python", "site", "target", "tests", "tools"),
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Headings down to this level can be targets of links.
myst_heading_anchors = 4
# Treat blocks without a language as output of programs.
highlight_language = "text"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
# List attributes in a class's own section, because separate entries would describe dataclass fields twice.
napoleon_use_ivar = True

# Show quotes and dashes as they are written. Otherwise, Sphinx would show the two dashes of options as one.
smartquotes = False

html_theme = "furo"
html_title = f"elasticrs {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_show_search_summary = False  # search.js shows excerpts
html_logo = html_favicon = "_static/logo.svg"
html_show_copyright = False


def edit_links(manifest: str) -> dict[str, str]:
    """Return the settings of Furo for links that edit a page, if ``pyproject.toml`` has the address of the
    project's repository.
    """
    address = re.search(r'^Repository = "(.*)"$', manifest, re.MULTILINE)
    if address is None:
        return {}
    return {"source_repository": f"{address[1]}/", "source_branch": "main", "source_directory": ""}


html_theme_options = edit_links((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def load_names(_app: Sphinx) -> None:
    """Set the attributes that the documented packages create on first use, because autodoc sees only existing
    attributes.
    """
    for page in sorted(ROOT.glob("docs/api/*.md")):
        for name in re.findall(r"automodule:: ([\w.]+)", page.read_text(encoding="utf-8")):
            module = importlib.import_module(name)
            for attribute in getattr(module, "__all__", ()):
                setattr(module, attribute, getattr(module, attribute))


def add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add hidden tables of contents to README.md and to the index pages, because Sphinx makes the navigation
    from these. Make one from each line of a list of pages, such as
    ``- Use it: [hangs](docs/hangs.md) · [logs](docs/logs.md)``.
    """
    if page == root_doc:
        _, _, pages = source[0].partition("\n## Documentation\n")
    elif page.endswith("/index"):
        pages = source[0]
    else:
        return
    for entry in re.findall(r"^- (.*(?:\n  .*)*)", pages, re.MULTILINE):
        caption = entry.partition(":")[0]
        links = re.findall(r"\[([^]]+)\]\(([^)#]+)\.md\)", entry)
        titles = (f"{title[0].upper()}{title[1:]} <{target}>" for title, target in links)
        options = (":hidden:", ":titlesonly:", f":caption: {caption}")
        lines = ("", "```{toctree}", *options, "", *titles, "```", "")
        source[0] += "\n".join(lines)


def show_pictures(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Replace each ``<picture>``, which only GitHub understands, with an image for each theme of the site."""

    def images_of(picture: re.Match[str]) -> str:
        dark, text, width, light = picture.groups()
        size = f":width: {width}px\n" if width else ""
        variants = (("light", light), ("dark", dark))
        images = "\n".join(
            f"```{{image}} {file}\n:class: only-{on}\n:alt: {text}\n{size}```" for on, file in variants
        )
        return f"````{{container}} picture\n{images}\n````"

    dark, light = r'<source .* srcset="(.*)">', r'<img alt="(.*?)"(?: width="(.*)")? src="(.*)">'
    source[0] = re.sub(rf"<picture>\s*{dark}\s*{light}\s*</picture>", images_of, source[0])


def directives(names: Iterable[str]) -> str:
    """Return Markdown that adds entries to the index of the site."""
    return "".join(f"```{{index}} ! {name}\n```\n\n" for name in names)


def turn_rows_into_sections(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Give each row of a table below ``<!-- headings -->`` a heading, so that links and searches lead to it.
    The heading is the first cell, and the last cell is the text. A line below has the other cells.
    """

    def section_of(titles: list[str], cells: list[str]) -> str:
        names = re.findall(r"`([\w .<>-]+)`", re.sub("(?<=`) of .*", "", cells[0]))
        between = zip(titles[1:-1], cells[1:-1], strict=True)
        facts = " · ".join(f"{title}: {cell}" for title, cell in between if cell)
        text = f"{cells[-1][:1].upper()}{cells[-1][1:]}."
        return f"{directives(names)}### {cells[0]}\n\n{text}\n\n{facts}\n"

    def sections_of(table: re.Match[str]) -> str:
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[1].splitlines()
        ]
        return "\n".join(section_of(rows[0], row) for row in rows[2:])

    source[0] = re.sub(r"^<!-- headings -->\n\n((?:\|.*\n)+)", sections_of, source[0], flags=re.MULTILINE)


def add_index_entries(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add entries to the index of the site, because the search shows first the pages to which entries of the
    index lead. Add an entry for the name and one for the variable of each option, and one for each setting.
    In all pages, a comment such as ``<!-- index: exit code 93, SIGKILL -->`` adds the entries that it lists.
    """
    if page in {"docs/options", "docs/settings"}:
        source[0] = re.sub(
            r"^### `([\w-]+)`\n\n.*\n\n.*$",
            lambda found: directives([found[1], *re.findall(r"`(PET_\w+)`", found[0])]) + found[0],
            source[0],
            flags=re.MULTILINE,
        )
    source[0] = re.sub(
        r"^<!-- index: (.*) -->$",
        lambda found: directives(found[1].split(", ")),
        source[0],
        flags=re.MULTILINE,
    )


def mark_flags(_app: Sphinx, document: nodes.document, _page: str) -> None:
    """Mark options and commands that contain options, so that the style sheet keeps each word in one line."""
    for literal in document.findall(nodes.literal):
        if re.search("(?:^| )-", literal.astext()):
            literal["classes"].append("flag")


def colour_commands(_app: Sphinx, document: nodes.document, _page: str) -> None:
    """Colour a block of commands without prompts as a script. Sphinx would show its lines as output."""
    for block in document.findall(nodes.literal_block):
        if block.get("language") == "console" and not re.search(r"^\$ ", block.astext(), re.MULTILINE):
            block["language"] = "bash"


def label_cells(_app: Sphinx, document: nodes.document, _page: str) -> None:
    """Put the column's title into each cell of a table that is too wide for a phone, because it has three or
    more columns or a long word. The title is visible only on a phone, where each row is shown as a card. Also
    mark tables with four or more columns of words. On wide screens, their columns are equally wide, because
    such a table would otherwise be wider than the page.
    """
    for table in document.findall(nodes.table):
        titles = [
            entry.astext() for head in table.findall(nodes.thead) for entry in head.findall(nodes.entry)
        ]
        longest = max(map(len, table.astext().split()))
        if len(titles) < 3 and longest <= 20:
            continue
        has_figures = any("text-right" in entry["classes"] for entry in table.findall(nodes.entry))
        table["classes"] += ["cards"] if has_figures or len(titles) <= 3 else ["cards", "words"]
        for row in (row for body in table.findall(nodes.tbody) for row in body.findall(nodes.row)):
            for title, entry in zip(titles, row.findall(nodes.entry), strict=True):
                if title and entry.children:
                    entry.children[0].insert(0, nodes.inline(text=title, classes=["label"]))


def remove_links_to_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to folders with their text, because the site has no pages for folders."""
    folder = Path(app.env.doc2path(page)).parent

    def text_of(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^]]+)\]\(([\w./-]+)\)", text_of, source[0])


def leave_changelog_out(app: Sphinx, page: str, _source: list[str]) -> None:
    """Leave the changelog out of the search, because it contains every word."""
    if page == "CHANGELOG":
        app.env.metadata[page]["nosearch"] = ""


def add_search(app: Sphinx, page: str, *_: object) -> None:
    """Load the script that shows excerpts, and the texts that it needs, into the page of the search."""
    if page == "search":
        app.add_js_file("texts.js")
        app.add_js_file("search.js")


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write the ids, the title and the text of each section to ``texts.js``, by the name of its page."""
    if error is not None:
        return
    texts = {
        page: [
            [section["ids"], section[0].astext(), " ".join(_own_text(section).split())]
            for section in app.env.get_doctree(page).findall(nodes.section)
        ]
        for page in app.env.found_docs
        if "nosearch" not in app.env.metadata[page]
    }
    (app.outdir / "_static" / "texts.js").write_text(f"const TEXTS = {json.dumps(texts)};\n", "utf-8")


def _own_text(section: nodes.section) -> str:
    """Return the text of a section without its title and the sections in it."""
    parts = (child for child in section[1:] if not isinstance(child, (nodes.section, nodes.raw)))
    shown = (part for part in parts if "picture" not in part.get("classes", ()))
    # Leave out the lines of reports that only separate.
    return re.sub("={9,}|-{9,}", "", " ".join(child.astext() for child in shown))


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Copy the first page to index.html, the page that web servers show by default."""
    if error is None:
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx's events. Called by Sphinx."""
    app.connect("builder-inited", load_names)
    app.connect("source-read", add_navigation)
    app.connect("source-read", show_pictures)
    app.connect("source-read", turn_rows_into_sections)
    app.connect("source-read", add_index_entries)
    app.connect("doctree-resolved", label_cells)
    app.connect("doctree-resolved", mark_flags)
    app.connect("doctree-resolved", colour_commands)
    app.connect("source-read", leave_changelog_out)
    app.connect("source-read", remove_links_to_folders)
    app.connect("html-page-context", add_search)
    app.connect("build-finished", write_texts)
    app.connect("build-finished", add_index)
