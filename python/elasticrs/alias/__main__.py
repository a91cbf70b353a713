"""``python -m elasticrs.alias install|uninstall|status``: the hook that reads ``ELASTICRS_ALIAS``.

The hook is one line in a ``.pth`` file beside the installed packages, which every interpreter of this
environment runs at its start. Without the variable it imports nothing.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig

from elasticrs.alias import is_active

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Files of this kind run in the order of their names, and one called elasticrs.pth may say where elasticrs is.
FILE = "elasticrs_alias.pth"
LINE = (
    'import os; os.environ.get("ELASTICRS_ALIAS") == "1" and __import__("elasticrs.alias").alias.activate()\n'
)


def main(args: Sequence[str] | None = None) -> int:
    """Do what the command line says (the interpreter's own when ``None``); return the exit code.

    0; 1 when it could not be done, or ``status`` finds no hook; 2 for a mistake in the command line.
    """
    args = sys.argv[1:] if args is None else args
    actions: dict[str, Callable[[], int]] = {"install": install, "uninstall": uninstall, "status": status}
    if list(args) in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(args) != 1 or args[0] not in actions:
        got = " ".join(args) or "nothing"
        print(f"elasticrs.alias: got {got}, expected install, uninstall or status", file=sys.stderr)
        return 2
    try:
        return actions[args[0]]()
    except OSError as error:
        print(f"elasticrs.alias: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def install() -> int:
    """Put the hook in place, in the first folder that can be written to."""
    folder = next((each for each in _folders() if os.access(each, os.W_OK)), None)
    if folder is None:
        print(
            f"elasticrs.alias: cannot write to {' or '.join(_folders())}; use a virtual environment",
            file=sys.stderr,
        )
        return 1
    path = os.path.join(folder, FILE)
    with open(path, "w", encoding="utf-8") as file:
        file.write(LINE)
    print(f"installed {path}; it acts in interpreters with ELASTICRS_ALIAS=1")
    return 0


def uninstall() -> int:
    """Remove the hook from all places where :func:`install` may have put it."""
    found = _installed()
    for path in found:
        os.unlink(path)
        print(f"removed {path}")
    if not found:
        print("not installed")
    return 0


def status() -> int:
    """Say where the hook is, and whether it acts in this interpreter."""
    found = _installed()
    for path in found:
        print(f"installed {path}")
    if not found:
        print("not installed")
    print("on" if is_active() else "off: ELASTICRS_ALIAS is not 1" if found else "off")
    return 0 if found else 1


def _folders() -> list[str]:
    """Where an interpreter looks for such files."""
    folders = [sysconfig.get_path("purelib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return folders


def _installed() -> list[str]:
    return [path for folder in _folders() if os.path.exists(path := os.path.join(folder, FILE))]


if __name__ == "__main__":
    sys.exit(main())
