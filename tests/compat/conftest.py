"""Both launchers, each in a folder of its own, with what the reference leaves behind."""

import pytest
from helpers import procs
from helpers.launcher import LAUNCHERS


@pytest.fixture
def start(launch, tmp_path):
    """Starts ``"torchrun"`` or ``"elasticrs"``; see :class:`helpers.launcher.Launched`."""
    before = {(child.pid, child.started) for child in procs.children()}
    started, told = [], []

    def start(launcher, *args, env=None):
        home = tmp_path / launcher
        home.mkdir(exist_ok=True)
        told.append(launcher)
        started.append(
            launch(*args, argv=LAUNCHERS[launcher], env={"TMPDIR": str(home), **(env or {})}, cwd=home)
        )
        return started[-1]

    yield start
    if "torchrun" not in told:
        return
    # Multiprocessing's resource tracker outlives torchrun, and so does what its workers leave.
    kept = {each.pid for each in started}
    while left := [
        child
        for child in procs.children()
        if (child.pid, child.started) not in before and child.pid not in kept
    ]:
        for child in left:
            procs.kill_and_reap(child)
