"""Set the version of the next release: ``make bump VERSION=1.2.3``.

Writes it into ``Cargo.toml``, ``Cargo.lock`` and ``elasticrs.__version__``, and gives the changelog a section
for it, with the text that stood under "Unreleased".
"""

import re
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "## [Unreleased]\n"

Change = Callable[[str, str, str], str]
"""Returns the new text of a file, from its text, the version and the date."""


def _manifest(text: str, version: str, _date: str) -> str:
    return re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE)


def _lock(text: str, version: str, _date: str) -> str:
    # Packages of other projects have a line with their source after the version.
    ours = r'(?<=^name = "elasticrs)(.*"\nversion = )".*"$(?!\nsource)'
    return re.sub(ours, rf'\1"{version}"', text, flags=re.MULTILINE)


def _package(text: str, version: str, _date: str) -> str:
    return re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', text, flags=re.MULTILINE)


def _changelog(text: str, version: str, date: str) -> str:
    if f"## [{version}]" in text:
        return text
    return text.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {date}\n", 1)


FILES: Mapping[str, Change] = {
    "Cargo.toml": _manifest,
    "Cargo.lock": _lock,
    "python/elasticrs/__init__.py": _package,
    "CHANGELOG.md": _changelog,
}


def bumped(root: Path, version: str, date: str) -> dict[str, str]:
    """Return the new texts of the files that contain the version, by their paths.

    Args:
        root: folder of the project, below which the paths begin.
        version: such as ``1.2.3``.
        date: of the release, such as ``2026-01-31``.
    """
    return {name: change((root / name).read_text("utf-8"), version, date) for name, change in FILES.items()}


def main() -> None:
    """Write the files with the version that the command line names."""
    version = sys.argv[-1]
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        sys.exit("bump: name the version, such as 1.2.3: make bump VERSION=1.2.3")
    for name, text in bumped(ROOT, version, f"{datetime.now(timezone.utc):%Y-%m-%d}").items():
        (ROOT / name).write_text(text, encoding="utf-8")
    print(f"bump: the version is {version}; read the section in CHANGELOG.md, and commit")


if __name__ == "__main__":
    main()
