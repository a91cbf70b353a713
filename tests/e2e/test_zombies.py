"""A worker with many zombie children is reported in one line."""

import signal

import pytest

pytestmark = pytest.mark.beyond_torchrun


def test_a_worker_with_unreaped_zombie_children_is_reported_once(launch, worker_script):
    # With --on-failure replace a worker is a child subreaper, so it adopts the orphans of its descendants.
    script = worker_script("""
        import os, signal
        if os.environ["RANK"] == "1":
            reader, writer = os.pipe()
            middle = os.fork()
            if middle == 0:
                os.close(writer)
                for _ in range(300):
                    if os.fork() == 0:
                        os.read(reader, 1)
                        os._exit(0)
                os._exit(0)
            os.waitpid(middle, 0)
            os.close(writer)
        os.write(1, b"HERE %d\\n" % os.getpid())
        signal.pause()
    """)
    launched = launch("--nproc-per-node=2", "--on-failure=replace", script)
    launched.wait_for_lines("HERE", 2)
    line = launched.wait_for_line(r"local rank 1: process (\d+) \(.*\) has \d+ zombie children", "stderr")
    assert f"HERE {line[1]}\n" in launched.stdout
    launched.signal(signal.SIGTERM)
    launched.wait()
    assert launched.stderr.count("zombie children") == 1
