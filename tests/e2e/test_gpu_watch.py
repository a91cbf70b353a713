"""The launcher watches GPUs. Its reports contain Xids (error codes of the driver), and workers restart only
after the device memory of the previous workers is free.
"""

import os
import signal

import pytest
from helpers import procs
from helpers.ended import report_of
from helpers.fake_nvml import gpus
from helpers.nodes import meeting
from helpers.said import says

__all__ = ["gpus"]

pytestmark = pytest.mark.beyond_torchrun

GIB = 1 << 30
HEAD = """
    import os, signal, sys
    FAKE, RANK = os.environ["FAKE_NVML"], int(os.environ["RANK"])
    IS_FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def write(name, text):
        with open(os.path.join(FAKE, name), "w") as file:
            file.write(text + "\\n")

    def wait_for_calls(function, count):
        # The library writes each call into this FIFO.
        with open(os.path.join(FAKE, "calls")) as calls:
            for line in calls:
                count -= line == function + "\\n"
                if count == 0:
                    return
"""
FAULT = f"""{HEAD}
    record = f"NVRM: Xid (PCI:0000:00:06): 31, pid={{os.getpid()}}, name=python3, channel 0x0000000a"
    if RANK == int(os.environ["WORLD_SIZE"]) - 1:
        write("kmsg", f"4,360,1,c;{{record}}")
        write("events", "0 31")
        # The library waits for the next event when it has reported this one.
        wait_for_calls("nvmlEventSetWait_v2", 1 + IS_FIRST)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    signal.pause()
"""
HOLDS = f"""{HEAD}
    if IS_FIRST:
        # The library has determined the memory that others use.
        wait_for_calls("nvmlDeviceGetComputeRunningProcesses_v3", 1)
        write("gpu0/memory", f"{8 * GIB} {{os.environ['QUERIES']}}")
        print("dies", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.path.join(FAKE, "gpu0/memory")) as file:
        print("found", file.read(), flush=True)
"""
FAILS = "raise SystemExit(1)"


@pytest.fixture
def run(launch, worker_script, gpus, tmp_path):
    """Return a function that starts the launcher on a script with fake GPUs. The launcher writes
    ``report.json``.
    """

    def start(script, *options, env=None, **constants):
        report = ("--report", f"file:{tmp_path / 'report.json'}")
        environment = {**gpus.environment, **(env or {})}
        argv = gpus.launcher(**constants)
        return launch(*report, *options, worker_script(script), argv=argv, env=environment)

    return start


@pytest.fixture
def report(tmp_path):
    return lambda: report_of(tmp_path / "report.json")


def test_the_lines_about_a_restart_and_the_failure_report_contain_the_xids_of_the_workers(run, report):
    launched = run(FAULT, "--nproc-per-node=2", "--max-restarts=1").exits(1)
    says(launched.stderr, "Xid 31", "attempt 1 is running")
    says(launched.stderr, "Root Cause", "rank      : 1", "note", "Xid 31", "GPU 0", "pid", "restart here")
    for attempt in report()["attempts"]:
        (xid,) = attempt["xids"]
        assert (xid["code"], xid["gpu"], xid["ranks"], xid["action"]) == (31, 0, [1], "restart")
        assert xid["count"] == 1


def test_an_xid_without_a_process_is_attributed_to_the_first_failure(run):
    launched = run(FAULT.replace("pid={os.getpid()}", "pid='<unknown>'"), "--nproc-per-node=2").exits(1)
    says(launched.stderr, "Root Cause", "rank      : 1", "note", "Xid 31 (GPU 0)")


def test_a_job_without_xids_prints_nothing_about_gpus(run, report):
    launched = run("print('fine')").exits(0)
    assert "GPU" not in launched.stderr
    assert report()["attempts"][0]["xids"] == []


def test_a_restart_waits_until_the_gpu_memory_of_dead_workers_is_free(run):
    launched = run(HOLDS, "--max-restarts=1", env={"QUERIES": "5"}).exits(0)
    assert "found 0" in launched.stdout
    says(launched.stderr, "attempt 1 is running", "freeing")


def test_a_restart_waits_only_a_limited_time_for_gpu_memory(run):
    launched = run(HOLDS, "--max-restarts=1", env={"QUERIES": "1000000"}, MEMORY_LIMIT=0.3).exits(0)
    assert f"found {8 * GIB}" in launched.stdout
    says(launched.stderr, "8.0 GiB", "GPU 0", "nevertheless")


def test_a_job_without_restarts_left_does_not_wait_for_gpu_memory(run):
    launched = run(HOLDS, env={"QUERIES": "1000000"}).exits(1)
    assert "GiB" not in launched.stderr


def test_a_signal_ends_the_wait_for_gpu_memory(run, gpus):
    launched = run(HOLDS, "--max-restarts=1", env={"QUERIES": "1000000"}, MEMORY_LIMIT=600.0)
    launched.wait_for_line("dies")
    gpus.wait_for_calls("nvmlDeviceGetMemoryInfo_v2", 3)
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert "nevertheless" not in launched.stderr
    assert "found" not in launched.stdout


def test_a_stopped_job_does_not_wait_for_gpu_memory(run, gpus):
    script = HOLDS.replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()")
    launched = run(script, "--max-restarts=1", env={"QUERIES": "1000000"}, MEMORY_LIMIT=600.0)
    launched.wait_for_line("dies")
    launched.signal(signal.SIGTERM)
    launched.exits(1)


def watcher_of(launched, gpus):
    gpus.wait_for_calls("nvmlInit_v2")
    (watcher,) = [each for each in launched.descendants() if "_engine.gpus.gpu_watch" in each.command]
    return watcher.pid


def test_a_killed_gpu_watcher_is_reported_once_and_does_not_affect_the_job(run, gpus):
    script = f"{HEAD}\n    print('started', flush=True); open(os.path.join(FAKE, 'go')).read(); sys.exit(1)"
    os.mkfifo(gpus.path("go"))
    launched = run(script, "--max-restarts=1")
    launched.wait_for_line("started", "stdout")
    watcher = watcher_of(launched, gpus)
    os.kill(watcher, signal.SIGKILL)
    assert procs.wait_gone(watcher)
    gpus.path("go").write_text("go")
    launched.wait_for_lines("started", 2, "stdout")
    gpus.path("go").write_text("go")
    launched.exits(1)
    assert launched.stderr.count("watches the GPUs") == 1


def test_the_gpu_watcher_exits_if_the_launcher_is_killed(run, gpus):
    launched = run("import signal; print('up', flush=True); signal.pause()")
    launched.wait_for_line("up")
    watcher = watcher_of(launched, gpus)
    launched.signal(signal.SIGKILL)
    launched.wait()
    assert procs.wait_gone(watcher)
    procs.reap_adopted()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_job_without_visible_gpus_has_no_gpu_watcher(run, gpus, visible):
    run(FAILS, "--max-restarts=1", env={"CUDA_VISIBLE_DEVICES": visible}).exits(1)
    assert not gpus.was_used


def test_a_job_without_the_nvidia_driver_has_no_gpu_watcher(launch, worker_script, gpus):
    argv = gpus.launcher()
    without = argv[2].replace("gpus.DEVICE = ", "gpus.DEVICE = 'no' + ")
    launch("--max-restarts=1", worker_script(FAILS), argv=(*argv[:2], without), env=gpus.environment).exits(1)
    assert not gpus.was_used


@pytest.fixture
def two_nodes(launch, worker_script, gpus):
    """Return a function that starts a job with two agents on this machine. Only the second agent sees the
    fake GPUs.
    """

    def start(script, *options):
        command = (*meeting(), *options, worker_script(script))
        environment = {**gpus.environment, "QUERIES": "5"}
        first = launch(*command, env=environment)
        return first, launch(*command, argv=gpus.launcher(), env=environment)

    return start


def on_the_node_with_gpus(script):
    """Return a script that runs only on the node with GPUs and pauses on the other. The workers look at their
    agent's command line, because ranks depend on the order in which the nodes join.
    """
    find = """
    import pathlib
    def ancestor(pid):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    agent = ancestor(os.getppid())
    if b"gpu_watcher" not in pathlib.Path(f"/proc/{agent}/cmdline").read_bytes():
        PAUSE
    """
    return script.replace(HEAD, HEAD + find)


def test_the_reports_of_all_nodes_name_the_xid(two_nodes):
    script = on_the_node_with_gpus(FAULT).replace("PAUSE", "signal.pause()")
    script = script.replace('int(os.environ["WORLD_SIZE"]) - 1', "RANK")
    for agent in two_nodes(script):
        agent.exits(1)
        says(agent.stderr, "Root Cause", "note", "Xid 31 (GPU 0, pid", "restart here")


def test_a_round_starts_after_the_gpu_memory_of_the_previous_round_is_free(two_nodes):
    script = on_the_node_with_gpus(HOLDS).replace("PAUSE", "signal.pause() if IS_FIRST else sys.exit(0)")
    _, agent = agents = two_nodes(script, "--max-restarts=1")
    for each in agents:
        each.exits(0)
    assert "found 0" in agent.stdout
