"""A browser for tests of pages (a chromium without a window)."""

import os
import runpy
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import procs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BROWSER = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "browser.py")))
in_browser = pytest.mark.skipif(
    BROWSER.find_browser() is None, reason="needs a browser (Debian: apt-get install chromium)"
)


@pytest.fixture
def browser() -> Iterator[Any]:
    with closing(BROWSER.Browser(BROWSER.find_browser())) as browser:
        yield browser
    # Wait for the processes that the browser has started and left, because the test process adopts them.
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if name.startswith("chrom") and int(rest.split()[1]) == os.getpid():
                pidfd = os.pidfd_open(int(path.parent.name))
                procs.wait_readable(pidfd, procs.HANG)
                procs.reap(pidfd)
                os.close(pidfd)
