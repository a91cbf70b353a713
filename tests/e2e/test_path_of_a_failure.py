"""``docs/design/path-of-a-failure.md`` lists the source files whose code handles a failed worker, until the
restart. Compare the Python files in it with those that run in a real job.
"""

import re
import sys
from pathlib import Path

from helpers.procs import run_program

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/design/path-of-a-failure.md").read_text(encoding="utf-8")
PROGRAM = """
import sys
from elasticrs import launch
package = launch.__file__.rpartition("/")[0] + "/"
files, window, starts, fetcher = set(), False, 0, None

def profile(frame, kind, function):
    global window, starts, fetcher
    fetched = [] if fetcher is None else [type(value).__name__ for value in fetcher.f_locals.values()]
    if "WorkerExited" in fetched:
        window = starts == 1
        files.add(fetcher.f_code.co_filename)
    fetcher = None
    if kind == "call" and window:
        files.add(frame.f_code.co_filename)
    called = type(getattr(function, "__self__", None)).__name__, getattr(function, "__name__", None)
    if kind == "c_return" and called == ("Supervisor", "next_event") and not window:
        fetcher = frame  # it has the event in a variable only after this
    if kind == "c_call" and called == ("Supervisor", "start"):
        window, starts = False, starts + 1

# The other rank never fails by itself, so all runs pass the same files.
script = "test $RANK = 0 || exec sleep 60; exit 3"
sys.argv[1:] = ["--nproc-per-node=2", "--max-restarts=1", "--no-python", "sh", "-c", script]
sys.setprofile(profile)
try:
    launch.main()
finally:
    sys.setprofile(None)
    print(starts, *(file.removeprefix(package) for file in files if file.startswith(package)))
"""


def listed(suffix):
    """Return the source files in the page's tables, with the functions that the page names for each file."""
    found = {}
    for line in PAGE.splitlines():
        if row := re.match(rf"\| `([\w/]+\.{suffix})` \|", line):
            found[row[1]] = re.findall(r"`(\w+)`", line[row.end() :])
    return found


def test_the_page_lists_the_python_files_that_a_failure_passes():
    ended = run_program([sys.executable, "-c", PROGRAM])
    starts, *files = ended.stdout.splitlines()[-1].split()
    assert (ended.returncode, starts) == (1, "2")
    assert sorted(files) == sorted(listed("py"))


def test_the_rust_files_on_the_page_define_the_functions_that_it_names():
    for file, functions in listed("rs").items():
        source = (ROOT / "crates" / file).read_text(encoding="utf-8")
        assert functions, file
        for name in functions:
            assert re.search(rf"\b(fn|enum|struct) {name}\b", source), (file, name)
