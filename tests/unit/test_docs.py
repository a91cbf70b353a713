"""The pages name only existing options, metrics, files, link targets and imports. Their Python code compiles.
Docstrings refer only to existing names.
"""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from tools import reference

from elasticrs._engine.job.options import OPTIONS, TextRequested, parse
from elasticrs._engine.nodes.transport import etcd_site
from elasticrs._engine.nodes.transport.settings import KEYS
from elasticrs._engine.supervise.run import orders

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples/README.md")
}


def without_code(page):
    return re.sub("```.*?```", "", page, flags=re.DOTALL)


def anchors(page):
    """Return the anchors that a Markdown viewer makes from the headings, for use after ``#`` in links."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_side_bar_has_at_most_35_links():
    """The side bar of the site has the links at the end of README.md. Other pages are folded below these."""
    _, _, pages = PAGES["README.md"].partition("\n## Documentation\n")
    assert 20 < len(re.findall(r"\]\([^)]*\.md\)", pages)) <= 35


def test_the_options_and_settings_pages_are_those_that_the_tables_give():
    for path, text in reference.pages().items():
        assert PAGES[str(path.relative_to(ROOT))] == text
    assert set(reference.MORE) == {option.name for option in OPTIONS}


def test_the_examples_on_the_settings_page_are_valid():
    examples = re.findall(r"example: `--rdzv-conf (\w+)=([^`]+)`", PAGES["docs/settings.md"])
    keys = [key for group in reference.SETTINGS.values() for key in group]
    assert [name for name, _ in examples] == [key.name for key in keys]
    for key, (_, value) in zip(keys, examples, strict=True):
        assert key.read(value) != key.default


def test_the_options_page_has_whole_commands_as_code_and_no_default_as_an_example_of_a_time():
    page = PAGES["docs/options.md"]
    assert "`--help rdzv`" in page
    timeouts = (
        "health-check-timeout",
        "warm-timeout",
        "shutdown-timeout",
        "exit-timeout",
        "node-check-timeout",
    )
    for name in timeouts:
        (option,) = (option for option in OPTIONS if option.name == name)
        assert option.kind.convert(reference.MORE[name].example) != option.default, name


def test_the_examples_on_the_options_page_are_valid():
    examples = re.findall(r"example: `([^`]+)`", PAGES["docs/options.md"])
    assert len(examples) == sum(option.kind is not None for option in OPTIONS)
    for example in examples:
        with suppress(TextRequested):  # raised by --check and --print-completion
            parse([*shlex.split(example), "train.py"], {})


def test_the_metrics_page_names_exactly_the_served_prometheus_metrics():
    source = (ROOT / "crates/elasticrs-health/src/metrics.rs").read_text(encoding="utf-8")
    served = set(re.findall(r'"(elasticrs_[a-z_]+)"', source.partition("#[cfg(test)]")[0]))
    suffixes = ("_sum", "_count", "_bucket")
    rows = re.findall(r"^\| (`elasticrs_[^|]*)\|", PAGES["docs/metrics.md"], re.MULTILINE)
    named = set(re.findall(r"`(elasticrs_[a-z_]+)`", "\n".join(rows)))
    assert named == {name for name in served if not name.endswith(suffixes)}


PARTS = ("benchmarks", "contrib", "crates", "docs", "examples", "python", "tests", "tools")
FILES = [path.relative_to(ROOT) for part in PARTS for path in (ROOT / part).rglob("*")]
TAILS = {
    "/".join(path.parts[start:]) for path in (*FILES, *map(Path, PARTS)) for start in range(len(path.parts))
} | {path.name for path in ROOT.iterdir()}
"""Every file and folder of the project, and every end of its path that starts with a whole name."""

FOREIGN = {
    # Files of users, of torch and of Python.
    *("hello.py", "script.py", "torch/_ops.py", "dataloader.py", "profile.py", "random.py"),
    # Generated folders, and keys of the rendezvous.
    *("dist", "site", "benchmarks/results", "fuzz/artifacts", "done", "evidence", "nodes"),
}
"""Names in the pages that look like paths of the project."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_paths_named_in_the_docs_exist(page):
    """A page may shorten a path to its last names, such as ``_engine/supervise/run/loop.py``."""
    text = re.sub(r"\]\([^)]*\)", "]", without_code(PAGES[page]))
    files = re.findall(r"(?<![\w./<{-])([\w.-]+(?:/[\w.-]+)*\.(?:py|pyi|rs|toml|sh))(?![\w/])", text)
    folders = re.findall(
        r"(?<![\w./-])((?:crates|python|tests|tools|docs|contrib|examples)/[\w./-]*\w)", text
    )
    folders += re.findall(r"`([\w-]+(?:/[\w-]+)*)/`", text)
    missing = {*files, *folders} - TAILS - FOREIGN
    assert not missing


SOURCES = {
    ".".join(path.with_suffix("").relative_to(ROOT / "python").parts).removesuffix(".__init__"): text
    for pattern in ("*.py", "*.pyi")
    for path in (ROOT / "python").rglob(pattern)
    if (text := path.read_text(encoding="utf-8"))
}
REFERENCE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?(\.[\w.]+|elasticrs[\w.]*)`")


def is_defined(reference):
    """Return true if the reference is a module, or if a module contains the name that follows its own in the
    reference. A reference that starts with a dot may omit the first names of the module.
    """
    names = reference.strip(".").split(".")
    for end in range(len(names), -1, -1):
        module = ".".join(names[:end])
        texts = [text for name, text in SOURCES.items() if not end or f".{name}".endswith(f".{module}")]
        if texts:
            return end == len(names) or any(re.search(rf"\b{names[end]}\b", text) for text in texts)
    return False


@pytest.mark.parametrize("module", [name for name, text in SOURCES.items() if REFERENCE.search(text)])
def test_names_referenced_in_docstrings_exist(module):
    missing = [each for each in REFERENCE.findall(SOURCES[module]) if not is_defined(each)]
    assert not missing


SNIPPETS = [
    (page, snippet)
    for page, text in PAGES.items()
    for snippet in re.findall("```python\n(.*?)```", text, re.DOTALL)
]


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_python_snippets_in_the_docs_compile_and_their_imports_exist(page, snippet):
    compile(snippet, page, "exec")
    for line in snippet.splitlines():
        if line.startswith(("import elasticrs", "from elasticrs")):
            exec(line, {})


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_in_the_docs_have_existing_targets(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(PAGES[page])):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", [page for page in PAGES if "/design/" not in page])
def test_blocks_of_code_and_output_fit_on_a_screen(page):
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", PAGES[page], re.MULTILINE | re.DOTALL):
        limit = {"json": 250, "python": 80}.get(language, 110)
        has_output = "$ " in block
        for line in block.splitlines():
            is_command = language in {"bash", "console"} and (not has_output or line.startswith("$ "))
            assert len(line) <= (80 if is_command else limit), line


def rows(page, title):
    """Return the rows of all tables in a section, each as a list of cells, without the header rows."""
    section = page.split(f"# {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def test_every_setting_is_named_on_the_settings_page():
    for key in (*KEYS, *etcd_site.KEYS):
        assert f"`{key.name}`" in PAGES["docs/settings.md"]


def test_the_listed_timeouts_are_settings_or_options():
    known = {key.name for key in (*KEYS, *etcd_site.KEYS)} | {f"--{option.name}" for option in OPTIONS}
    named = {
        name
        for row in rows(PAGES["docs/settings.md"], "Time-outs")
        for name in re.findall("`([^`]+)`", row[0])
    }
    assert named
    assert named <= known


def sources():
    """Return the source code of the package, so that tests can search it for messages.

    Messages that are split into adjacent string literals are joined.
    """
    files = [*(ROOT / "python/elasticrs").rglob("*.py"), *(ROOT / "crates/elasticrs-store/src").rglob("*.rs")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.fixture(scope="module")
def program():
    return sources()


@pytest.mark.parametrize(
    "message", [row[0].strip("`") for row in rows(PAGES["docs/messages.md"], "Messages about nodes")]
)
def test_the_documented_messages_exist_in_the_program(program, message):
    # The page shows the message in one piece. The program may split it into several literals, which are
    # joined here.
    assert message in program


def test_the_exit_codes_of_elasticctl_are_those_of_the_table():
    _, _, table = PAGES["docs/operating.md"].partition("| exit code | meaning |\n| --- | --- |\n")
    told = dict(re.findall(r"\| (\d) \| (.*) \|\n", table.partition("\n\n")[0] + "\n"))
    words = ("carried out", "failed", "command line", "different steps", "no such job", "refuses")
    codes = (orders.DONE, orders.FAILED, orders.USAGE, orders.NOT_AGREED, orders.NO_JOB, orders.REFUSED)
    assert len(told) == len(codes)
    for code, word in zip(codes, words, strict=True):
        assert word in told[str(code)]
