"""Set the version of the next release: ``make bump VERSION=1.2.3 [REPOSITORY=https://…]``.

Writes the version into ``Cargo.toml``, ``Cargo.lock`` and ``elasticrs.__version__``, and into the declaration
and the description of each option that is new in it. Also gives the changelog a section for the version, with
the text that stood under "Unreleased". Writes the public address of the repository into ``pyproject.toml``.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "## [Unreleased]\n"

Change = Callable[[str, str, str], str]
"""Function that returns the new text of a file. Its arguments are the old text, the version and the date."""


def _manifest(text: str, version: str, _date: str) -> str:
    return re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE)


def _lock(text: str, version: str, _date: str) -> str:
    # Do not change the packages of other projects, which have a line with their source after the version.
    ours = r'(?<=^name = "elasticrs)(.*"\nversion = )".*"$(?!\nsource)'
    return re.sub(ours, rf'\1"{version}"', text, flags=re.MULTILINE)


def _package(text: str, version: str, _date: str) -> str:
    return re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', text, flags=re.MULTILINE)


def _changelog(text: str, version: str, date: str) -> str:
    if f"## [{version}]" in text:
        return text
    return text.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {date}\n", 1)


def _options(text: str, version: str, _date: str) -> str:
    return re.sub(r'(since[ =]"?)unreleased\b', rf"\g<1>{version}", text)


FILES: Mapping[str, Change] = {
    "Cargo.toml": _manifest,
    "Cargo.lock": _lock,
    "python/elasticrs/__init__.py": _package,
    "CHANGELOG.md": _changelog,
    "python/elasticrs/_engine/job/options.py": _options,
    "docs/options.md": _options,
}


def with_address(manifest: str, repository: str) -> str:
    """Return the text of ``pyproject.toml`` with the address of the repository."""
    return re.sub(
        r'^(?:# )?\[project\.urls\]\n(?:# )?Repository = ".*"$',
        f'[project.urls]\nRepository = "{repository}"',
        manifest,
        flags=re.MULTILINE,
    )


def bumped(root: Path, version: str, date: str) -> dict[str, str]:
    """Return the new texts of all files that contain the version, by the paths of the files.

    Args:
        root: folder of the project; the paths are relative to it.
        version: the new version, such as ``1.2.3``.
        date: date of the release, such as ``2026-01-31``.
    """
    return {name: change((root / name).read_text("utf-8"), version, date) for name, change in FILES.items()}


def main() -> None:
    """Write the version and the address that the command line names into the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="such as 1.2.3")
    parser.add_argument(
        "--repository", help="public address of the repository, such as https://example.org/elasticrs"
    )
    arguments = parser.parse_args()
    version, repository = arguments.version, arguments.repository
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        sys.exit("bump: name the version, such as 1.2.3: make bump VERSION=1.2.3")
    if repository and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
        sys.exit(f"bump: {repository!r} is not the https address of a repository, without a slash at its end")
    for name, text in bumped(ROOT, version, f"{datetime.now(timezone.utc):%Y-%m-%d}").items():
        (ROOT / name).write_text(text, encoding="utf-8")
    if repository:
        manifest = ROOT / "pyproject.toml"
        manifest.write_text(with_address(manifest.read_text("utf-8"), repository), "utf-8")
    print(f"bump: the version is {version}; read the section in CHANGELOG.md, and commit")


if __name__ == "__main__":
    main()
