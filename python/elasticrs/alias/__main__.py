"""``python -m elasticrs.alias install|uninstall|status``: manages the hook that reads ``ELASTICRS_ALIAS``.

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

# Python runs `.pth` files in order of their names. This one must come after `elasticrs.pth`, which may put
# elasticrs on the path.
FILE = "elasticrs_alias.pth"
_ACTIVATE = """
try:
    from elasticrs.alias import activate
except ModuleNotFoundError:
    # The interpreter may run this file again, when more folders are known, so report it only at the end.
    if not hasattr(sys, "elasticrs_alias_is_missing"):
        sys.elasticrs_alias_is_missing = True
        import atexit
        atexit.register(lambda: sys.elasticrs_alias_is_missing and sys.stderr.write(
            "elasticrs.alias: ELASTICRS_ALIAS=1 had no effect, because this interpreter did not find "
            "elasticrs at its start: run python -m elasticrs.alias install again\\n"))
else:
    sys.elasticrs_alias_is_missing = False
    activate()
"""
# Write a single line that starts with `import`, because Python runs only such lines of a `.pth` file.
LINE = f'import os, sys; os.environ.get("ELASTICRS_ALIAS") == "1" and exec({_ACTIVATE!r}, {{"sys": sys}})\n'
_PROBE = "import sys; from elasticrs.alias import is_active; sys.exit(not is_active())"


def main(args: Sequence[str] | None = None) -> int:
    """Run an action. Return 0; 1 if it failed or ``status`` found no ``.pth`` file; 2 for wrong arguments."""
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
    """Install the hook in the first writable folder, and check that it redirects imports."""
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
    if not _works():
        os.unlink(path)
        print(
            f"elasticrs.alias: {path} had no effect in a new interpreter, so it was removed: elasticrs is "
            f"not in {folder}, and its own folder is added later; install elasticrs into this environment",
            file=sys.stderr,
        )
        return 1
    print(f"installed {path}; it takes effect in interpreters with ELASTICRS_ALIAS=1")
    return 0


def uninstall() -> int:
    """Remove the hook from all folders into which :func:`install` may have written it."""
    found = _installed()
    for path in found:
        os.unlink(path)
        print(f"removed {path}")
    if not found:
        print("not installed")
    return 0


def status() -> int:
    """Print where the hook is installed and whether it is active in this interpreter."""
    found = _installed()
    for path in found:
        print(f"installed {path}")
    if not found:
        print("not installed")
    print("on" if is_active() else "off: ELASTICRS_ALIAS is not 1" if found else "off")
    return 0 if found else 1


def _works() -> bool:
    import subprocess

    environ = {**os.environ, "ELASTICRS_ALIAS": "1"}
    done = subprocess.run([sys.executable, "-c", _PROBE], env=environ, capture_output=True, check=False)
    return done.returncode == 0


def _folders() -> list[str]:
    folders = [sysconfig.get_path("purelib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return folders


def _installed() -> list[str]:
    return [path for folder in _folders() if os.path.exists(path := os.path.join(folder, FILE))]


if __name__ == "__main__":
    sys.exit(main())
