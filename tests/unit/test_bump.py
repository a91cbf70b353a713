"""The tool `tools/bump.py`, which sets the version of a release in all files that contain it."""

import re
from pathlib import Path

from tools.bump import FILES, bumped, with_address
from tools.wheel import with_public_links

from elasticrs._engine.job.options import SECTIONS

ROOT = Path(__file__).resolve().parents[2]


def changed_lines(name, text):
    before = (ROOT / name).read_text("utf-8").splitlines()
    return [(old, new) for old, new in zip(before, text.splitlines(), strict=True) if old != new]


def test_a_bump_changes_the_version_of_our_packages_only():
    texts = bumped(ROOT, "9.8.7", "2030-01-02")
    assert [new for _, new in changed_lines("Cargo.toml", texts["Cargo.toml"])] == ['version = "9.8.7"']
    (line,) = changed_lines("python/elasticrs/__init__.py", texts["python/elasticrs/__init__.py"])
    assert line[1] == '__version__ = "9.8.7"'
    lock = texts["Cargo.lock"]
    ours = re.findall(r'^name = "(elasticrs.*)"\nversion = "(.*)"$', lock, re.MULTILINE)
    members = {path.parent.name for path in ROOT.glob("crates/*/Cargo.toml")}
    assert {name for name, _ in ours} >= members
    assert {version for _, version in ours} == {"9.8.7"}
    assert len(changed_lines("Cargo.lock", lock)) == len(ours)


def test_a_bump_gives_the_changelog_a_section_once(tmp_path):
    text = bumped(ROOT, "9.8.7", "2030-01-02")["CHANGELOG.md"]
    assert "\n## [Unreleased]\n\n## [9.8.7] - 2030-01-02\n\n" in text
    for name, content in bumped(ROOT, "9.8.7", "2030-01-02").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert bumped(tmp_path, "9.8.7", "2031-01-01")["CHANGELOG.md"] == text


def test_a_bump_sets_the_first_version_of_new_options(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    code, page = "python/elasticrs/_engine/job/options.py", "docs/options.md"
    (tmp_path / code).write_text('Option("new", "help", None, since="unreleased")\n', "utf-8")
    (tmp_path / page).write_text("`--new` · not in torchrun · since unreleased\n", "utf-8")
    texts = bumped(tmp_path, "9.8.7", "2030-01-02")
    assert texts[code] == 'Option("new", "help", None, since="9.8.7")\n'
    assert texts[page] == "`--new` · not in torchrun · since 9.8.7\n"


def test_a_new_option_is_not_one_of_the_first_release():
    options = [option for group in SECTIONS.values() for option in group]
    assert sum(not option.since for option in options) == 67


def test_a_bump_sets_the_address_of_the_repository():
    manifest = (ROOT / "pyproject.toml").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for address in ("https://example.org/first/elasticrs", "https://example.org/moved"):
        manifest = with_address(manifest, address)
        assert f'\n[project.urls]\nRepository = "{address}"\n\n' in manifest
        assert manifest.count("[project.urls]") == 1
        linked = with_public_links(readme, manifest)
        targets = re.findall(r'\]\(([^)#]+)|(?:src|srcset)="([^"]+)', linked)
        assert len(targets) > 40
        assert {target.startswith(f"{address}/") for pair in targets for target in pair if target} == {True}
        assert linked.replace(f"{address}/blob/HEAD/", "").replace(f"{address}/raw/HEAD/", "") == readme


def test_without_an_address_the_readme_of_a_release_is_that_of_the_tree():
    assert with_public_links("[a](docs/a.md)", '# Repository = "https://example.org/a"') == "[a](docs/a.md)"
