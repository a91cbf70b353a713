"""Build the files of a release again, from a clone in another folder, and compare their checksums.

The clone has other paths, another ``CARGO_HOME``, time zone and umask. Run this
after ``make release`` of a commit.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from tools import wheel


def checksums(text: str) -> dict[str, str]:
    """Return the checksums by file name, from the text of a file written by ``make release``."""
    return {name: digest for digest, name in (line.split() for line in text.splitlines())}


def main() -> None:
    first = wheel.DIST / "SHA256SUMS"
    if not first.is_file():
        sys.exit(f"rebuild: there is no {first.relative_to(wheel.ROOT)}: run 'make release' first")
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name, "another folder")
        wheel.run("git", "clone", "--quiet", wheel.ROOT, clone)
        # Use the same sources of the crates, but through another path.
        cargo_home = Path(name, "cargo-home")
        cargo_home.mkdir()
        used = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
        for shared in ("registry", "config.toml"):
            if (used / shared).exists():
                (cargo_home / shared).symlink_to((used / shared).resolve())
        variables = {
            "CARGO_HOME": str(cargo_home),
            "CARGO_TARGET_DIR": str(clone / "target"),
            "TZ": "Pacific/Kiritimati",
        }
        umask = os.umask(0o077)
        wheel.run(sys.executable, "-m", "tools.release", "--only", "build", cwd=clone, variables=variables)
        os.umask(umask)
        second = clone / "dist" / "SHA256SUMS"
        one, other = (checksums(path.read_text(encoding="utf-8")) for path in (first, second))
        if different := sorted(file for file in one | other if one.get(file) != other.get(file)):
            kept = wheel.ROOT / "target" / "rebuilt"
            shutil.copytree(second.parent, kept, dirs_exist_ok=True)
            sys.exit(f"rebuild: {', '.join(different)} differ; the second build is in {kept}")
    print(f"rebuild: {len(one)} files have the same bytes when they are built in another folder")


if __name__ == "__main__":
    main()
