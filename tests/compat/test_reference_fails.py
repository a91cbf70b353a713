"""Cases that fail with torchrun and pass with elasticrs. Each case runs with both launchers.

So that a case is known to be one. When a later torch mends it, the test says so.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import ports, procs
from helpers.nodes import meeting
from helpers.procs import HANG

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.beyond_torchrun,
]

BOTH = ("elasticrs", "torchrun")


def test_a_restarted_worker_sees_no_store_keys_of_the_previous_attempt(start, worker_script):
    script = worker_script("""
        import os, sys
        from torch.distributed import TCPStore
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            store.set("address of rank 0", "of the first attempt")
            sys.exit(7)
        os.write(1, f"FOUND {store.check(['address of rank 0'])}\\n".encode())
    """)
    found = {}
    for launcher in BOTH:
        launched = start(launcher, "--standalone", "--max-restarts=1", script).exits(0)
        found[launcher] = launched.wait_for_line(r"FOUND (\w+)")[1]
    assert found == {"elasticrs": "False", "torchrun": "True"}


RANKS = """
    import os, signal
    shown = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    os.write(1, f"UP {' '.join(shown)} {os.getpid()}\\n".encode())
    while True:
        signal.pause()
"""
UP = r"UP (\d) (\d) (\S+) (\d+) (\d+)"


@pytest.fixture
def port():
    """Return the port of the endpoint at which the agents meet."""
    return ports.free()


@pytest.fixture
def agent(start, worker_script, port):
    """Return a function that starts one agent of a job. All agents of the job run on this machine."""
    script = worker_script(RANKS)

    def agent(launcher, address, nodes="1:2", last_call=1, keep_alive=5):
        conf = f"last_call_timeout={last_call},read_timeout=30,keep_alive_interval={keep_alive}"
        return start(
            launcher,
            *meeting(nodes, port),
            f"--rdzv-conf={conf}",
            f"--local-addr={address}",
            script,
        )

    return agent


def end(*agents):
    """Send SIGTERM to all agents that are running, wait for them, and return their exit codes."""
    for each in agents:
        if not each.has_exited:
            each.signal(signal.SIGTERM)
    return [each.wait() for each in agents]


def test_torchrun_fails_the_job_if_a_node_joins_late(agent):
    first = agent("torchrun", "127.0.0.1")
    first.wait_for_line(UP)
    # The new node sorts after the first node, which therefore keeps rank 0. It published its address in the
    # first round, and torchrun does not publish it again.
    second = agent("torchrun", "127.0.0.2")
    assert [first.wait(60), second.wait(60)] == [1, 1]
    assert "MASTER_ADDR" in first.stderr + second.stderr


def test_torchrun_splits_the_job_if_a_late_node_sorts_first(agent):
    first = agent("torchrun", "127.0.0.5")
    first.wait_for_line(UP)
    second = agent("torchrun", "127.0.0.1")
    ups = [first.wait_for_lines(UP, 2)[1], second.wait_for_line(UP)]
    assert sorted(up[1] for up in ups) == ["0", "1"]
    # The two workers of one job have different masters.
    assert len({(up[3], up[4]) for up in ups}) == 2
    end(first, second)


@pytest.mark.parametrize("launcher", BOTH)
def test_elasticrs_notices_a_lost_node_and_torchrun_does_not(agent, launcher, port):
    # Give torchrun a long last call, because two agents may start slowly. The wait ends when both have
    # joined.
    pace = {"last_call": 1 if launcher == "elasticrs" else 30, "keep_alive": 1}
    agents = [agent(launcher, address, **pace) for address in ("127.0.0.1", "127.0.0.2")]
    # The first agent to start hosts the store. Kill the other one.
    ups = [each.wait_for_line(r"UP (\d) 2 \S+ \d+ (\d+)") for each in agents]
    lost = 1 if ports.listens(agents[0].pid, port) else 0
    agents[lost].signal(signal.SIGKILL)
    assert agents[lost].wait() == -signal.SIGKILL
    survivor = agents[1 - lost]
    if launcher == "elasticrs":
        survivor.wait_for_line(r"UP 0 1 ")
    else:
        # Kill the orphaned worker, too. The surviving agent starts no new round, although five keep-alive
        # intervals pass.
        os.kill(int(ups[lost][2]), signal.SIGKILL)
        rounds = survivor.stdout.count("UP ")
        survivor.read_for(5)
        assert survivor.stdout.count("UP ") == rounds
        assert procs.process(int(ups[1 - lost][2])).state != "Z"
    end(survivor)
    if launcher == "elasticrs":
        procs.reap_adopted()


def test_leftover_processes_of_a_crashed_worker_are_killed(start, worker_script):
    script = worker_script("""
        import os, subprocess
        left = subprocess.Popen(["sleep", "1000"])
        os.write(1, f"LEFT {left.pid}\\n".encode())
        os._exit(5)
    """)
    for launcher in BOTH:
        launched = start(launcher, script).exits(1)
        left = procs.process(int(launched.wait_for_line(r"LEFT (\d+)")[1]))
        assert (left is None) == (launcher == "elasticrs")


def test_workers_do_not_outlive_a_killed_agent_that_has_not_loaded_torch(start, worker_script):
    script = worker_script(RANKS)
    for launcher in BOTH:
        launched = start(launcher, script)
        pid = int(launched.wait_for_line(UP)[5])
        maps = Path(f"/proc/{launched.pid}/maps").read_text()
        assert ("libtorch" in maps) == (launcher == "torchrun")
        launched.signal(signal.SIGKILL)
        launched.wait()
        if launcher == "elasticrs":
            procs.reap_adopted()
            assert procs.process(pid) is None
        else:
            assert procs.process(pid).state != "Z"


def test_torchrun_does_not_handle_a_signal_while_waiting_for_nodes(agent, monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "INFO")
    first = agent("torchrun", "127.0.0.1", nodes="2")
    first.wait_for_line("Rendezvous'ing worker group", "stderr")
    first.signal(signal.SIGTERM)
    assert first.wait() == -signal.SIGTERM


TIMER = """
    import json, os, signal, sys, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        sys.exit(0)
    expired = {"version": 1, "pid": int(sys.argv[1]) or os.getpid(), "scope_id": "step", "signal": 9}
    expired["expiration_time"] = time.time() - 1
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as fifo:
        fifo.write(json.dumps(expired) + "\\n")
    if sys.argv[1] != "0":
        os.write(1, b"WRITTEN\\n")
        sys.stdin.read()
    while True:
        signal.pause()
"""
TIMERS = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


def test_an_expired_timer_restarts_the_worker_without_killing_the_agent(start, worker_script):
    script = worker_script(TIMER)
    codes = {
        launcher: start(launcher, "--max-restarts=1", script, "0", env=TIMERS).wait() for launcher in BOTH
    }
    assert codes == {"elasticrs": 0, "torchrun": -signal.SIGKILL}


def test_a_timer_request_that_names_another_process_is_refused(start, worker_script):
    script = worker_script(TIMER)
    for launcher in BOTH:
        with subprocess.Popen(["sleep", "1000"]) as other:
            launched = start(launcher, script, str(other.pid), env=TIMERS)
            if launcher == "elasticrs":
                launched.wait_for_line(str(other.pid), "stderr")
                assert other.poll() is None
                launched.signal(signal.SIGTERM)
                launched.exits(1)
                other.kill()
            else:
                launched.exits(-signal.SIGKILL)
                assert other.wait(HANG) == -signal.SIGKILL


DEAF = """
    import os, signal, sys
    if os.environ["RANK"] == "1":
        # When the other one is deaf.
        sys.stdin = open(sys.argv[1])
        sys.stdin.read()
        sys.exit(7)
    def patient(*_):
        os.write(1, b"TOLD\\n")
        signal.sigtimedwait({signal.SIGUSR1}, 10)
        os.write(1, b"STILL HERE\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, patient)
    open(sys.argv[1], "w").close()
    while True:
        signal.pause()
"""


def test_the_shutdown_timeout_also_applies_after_a_failure(start, worker_script, tmp_path):
    script = worker_script(DEAF)
    stays = {}
    for launcher in BOTH:
        fifo = tmp_path / f"{launcher}.fifo"
        os.mkfifo(fifo)
        launched = start(launcher, "--nproc-per-node=2", "--shutdown-timeout=1", script, str(fifo)).exits(1)
        launched.wait_for_line("TOLD")
        stays[launcher] = "STILL HERE" in launched.stdout
    assert stays == {"elasticrs": False, "torchrun": True}


UNINTERRUPTIBLE = """
    import ctypes, os, signal
    # The parent of a vfork is in state D until the child ends, and this one only waits.
    CLONE_VFORK = 0x4000
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)
    libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, CLONE_VFORK | signal.SIGCHLD, None)
"""


def test_a_worker_that_is_stuck_in_the_kernel_fails_the_job(start, worker_script):
    script = worker_script(UNINTERRUPTIBLE)
    env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "1"}
    codes = {launcher: start(launcher, script, env=env).wait() for launcher in reversed(BOTH)}
    assert codes == {"elasticrs": 1, "torchrun": 0}
