"""Compare what the pages about the architecture show with real jobs: the source files whose code handles a
failed worker, in ``docs/design/path-of-a-failure.md``, and the processes and threads in the pictures.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.procs import run_program
from tools.pictures import FOLDER
from tools.processes import JOBS, Facts, facts_of

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


@pytest.fixture(params=JOBS)
def picture(request):
    """The name of a picture of processes, and what it shows."""
    shown = json.loads((FOLDER / "processes.json").read_text(encoding="utf-8"))[request.param]
    return request.param, Facts(shown["processes"], [tuple(link) for link in shown["links"]])


@pytest.mark.slow
def test_a_job_has_the_processes_threads_and_connections_of_its_picture(picture):
    name, shown = picture
    assert facts_of(name) == shown


def test_a_job_without_torch_has_those_that_are_not_of_torch(picture):
    name, shown = picture
    seen = facts_of(name, "import signal\nprint('ready', flush=True)\nsignal.pause()\n")
    assert seen.processes == {
        # The thread that serves the workers' store starts with the first connection.
        process: ["python"] if "rank" in process else [name for name in threads if name != "elasticrs-ranks"]
        for process, threads in shown.processes.items()
    }
    of_torch = {link for link in shown.links if "rank" in link[1] and link[2] in {"TCP", "kept state"}}
    assert set(seen.links) == {*shown.links} - of_torch
