"""Rendezvous backends from installed packages, and rendezvous through a file, on the command line."""

import json
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import procs
from helpers.packages import install
from helpers.said import says

PLUGIN = """
import os
from {api} import (
    RendezvousConnectionError, RendezvousGracefulExitError, RendezvousHandler, RendezvousInfo,
    RendezvousStoreInfo,
)
{store}

class Handler(RendezvousHandler):
    '''Nodes count themselves in a file.'''

    def __init__(self, params):
        self.params, self.closed, self.rounds = params, False, 0
        if params.get("trouble") == "settings":
            raise ValueError("trouble is no setting")
        if params.get("trouble") == "creator":
            raise TypeError("no room")
        if params.get("trouble") == "service":
            raise ConnectionRefusedError(111, "nobody listens")
        self.store = FileStore(params.endpoint{more})

    def get_backend(self):
        return "mine"

    def next_rendezvous(self):
        if self.params.get("trouble") == "connection":
            raise RendezvousConnectionError("nobody is there")
        if self.params.get("trouble") == "spare":
            raise RendezvousGracefulExitError("not needed")
        if self.params.get("trouble") == "wait":
            import signal
            print("WAITS", flush=True)
            signal.pause()
        if self.params.get("trouble") == "late" and self.rounds == 1:
            raise RendezvousConnectionError("nobody is there")
        self.rounds += 1
        nodes = self.params.max_nodes
        number = self.store.add("nodes", 1)
        if number == self.rounds * nodes:
            self.store.set(f"round {{self.rounds}}", "1")
        self.store.wait([f"round {{self.rounds}}"])
        rank = (number - 1) % nodes
        return RendezvousInfo(self.store, rank, nodes, RendezvousStoreInfo("127.0.0.1", 23456))

    def is_closed(self):
        return self.closed

    def set_closed(self):
        self.closed = True

    def num_nodes_waiting(self):
        return 0

    def get_run_id(self):
        return self.params.run_id

    def shutdown(self):
        config = sorted(self.params.config.items())
        print(f"SHUT {{self.params.min_nodes}}:{{self.params.max_nodes}} {{config}}", flush=True)
        return True

def entry():
    return Handler

def broken():
    raise OSError("no luck")
"""

# Use a store that does not need torch, because importing torch would take most of the time of these tests.
FILE_STORE = """
import fcntl, json, select

class FileStore:
    def __init__(self, path):
        self.path = path

    def _locked(self, change):
        with open(self.path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            values = json.loads(file.read() or "{}")
            result = change(values)
            file.truncate(0)
            file.write(json.dumps(values))
        return result

    def set(self, key, value):
        value = value.decode() if isinstance(value, bytes) else value
        self._locked(lambda values: values.update({key: value}))

    def get(self, key):
        self.wait([key])
        return self._locked(lambda values: values[key]).encode()

    def add(self, key, number):
        def change(values):
            values[key] = str(int(values.get(key, 0)) + number)
            return int(values[key])
        return self._locked(change)

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def multi_set(self, keys, values):
        for key, value in zip(keys, values):
            self.set(key, value)

    def check(self, keys):
        return self._locked(lambda values: all(key in values for key in keys))

    def wait(self, keys, timeout=None):
        while not self.check(keys):
            select.select([], [], [], 0.01)
"""

OURS = ("elasticrs.rendezvous", FILE_STORE, "", "elasticrs.rendezvous_handlers")
TORCHS = (
    "torch.distributed.elastic.rendezvous",
    "from torch.distributed import FileStore",
    ", -1",
    "torchrun.handlers",
)

SHOW = """
    import os
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
"""
PAUSE = "import os, signal; os.write(1, f'RUNS {os.getpid()}\\n'.encode()); signal.pause()"


@pytest.fixture
def backend(launch, tmp_path):
    """Return a function that starts a job with the backend ``mine`` of an installed package."""

    def start(*arguments, kind=OURS, conf="", name="mine"):
        api, store, more, group = kind
        source = PLUGIN.format(api=api, store=store, more=more)
        site = Path(tempfile.mkdtemp(dir=tmp_path))
        env = install(site, "my_rdzv", source, group, mine="entry", broken="broken")
        more = (f"--rdzv-conf={conf}",) if conf else ()
        meeting = (f"--rdzv-backend={name}", f"--rdzv-endpoint={tmp_path / 'nodes'}", "--rdzv-id=job")
        return launch(*meeting, *more, *arguments, env=env)

    return start


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(OURS, id="ours", marks=pytest.mark.beyond_torchrun),
        pytest.param(TORCHS, id="torchs", marks=[pytest.mark.torch, pytest.mark.slow]),
    ],
)
def test_nodes_rendezvous_through_a_backend_from_a_package(backend, worker_script, kind):
    script = worker_script(SHOW)
    nodes = [backend("--nnodes=2", "--nproc-per-node=2", script, kind=kind, conf="a=b") for _ in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].stderr
    lines = sorted(line for node in nodes for line in node.stdout.splitlines())
    assert lines[:4] == ["0 4 0 0", "1 4 0 0", "2 4 1 0", "3 4 1 0"]
    # torch's launcher passes the same settings to each handler.
    assert lines[4:] == ["SHUT 2:2 [('a', 'b'), ('timeout', 900)]"] * 2


@pytest.mark.beyond_torchrun  # torchrun prints a different report
def test_a_failure_with_a_custom_backend_is_reported_after_the_restarts(backend, worker_script, tmp_path):
    script = worker_script(SHOW + "    raise SystemExit(int(os.environ['RANK']) * 3)")
    launched = backend(
        "--nproc-per-node=2", "--max-restarts=1", f"--log-dir={tmp_path / 'logs'}", "--tee=3", script
    ).exits(1)
    # Rank 0 may be stopped before it prints anything.
    shown = [line for line in launched.stdout.splitlines() if line.startswith("[default1]")]
    assert shown == [f"[default1]:1 2 0 {count}" for count in (0, 1)]
    launched.wait_for_line(r"exitcode\s*: 3", "stderr")
    assert re.search(
        r"rank 1 \(pid \d+\).* exit(ed|s)? .*3.*; restarting \(restart 1 of 1\)", launched.stderr
    )
    assert "Traceback" not in launched.stderr
    folders = {path.parent.name for path in (tmp_path / "logs").glob("*/attempt_*/1")}
    assert folders == {"attempt_0", "attempt_1"}


@pytest.mark.beyond_torchrun  # torchrun prints a traceback
def test_a_rendezvous_that_fails_at_a_restart_is_the_reason_of_the_end(backend, worker_script, tmp_path):
    report, log = tmp_path / "report.json", tmp_path / "events"
    options = ("--max-restarts=3", f"--report={report}", f"--event-log-handler=file:{log}")
    launched = backend(*options, worker_script("raise SystemExit(3)"), conf="trouble=late").exits(1)
    reason = "RendezvousConnectionError: nobody is there"
    (verdict,) = [line for line in launched.stderr.splitlines() if line.startswith("verdict:")]
    last = launched.stderr.splitlines()[-1]
    says(last, "failed after", reason, "rank 0", "exit", "code 3", "1 of 3 restarts")
    says(verdict, "transient", reason, "start the job again")
    assert "--max-restarts" not in launched.stderr
    told = json.loads(report.read_text(encoding="utf-8"))
    says(told["reason"], reason)
    ends = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    (agent,) = [end for end in ends if end["name"].endswith("status.FAILED") and end["source"] == "AGENT"]
    says(agent["metadata"]["raw_error"], reason)


@pytest.mark.beyond_torchrun  # torchrun has none of these options
def test_the_restart_policy_and_the_report_work_with_a_custom_backend(backend, worker_script, tmp_path):
    script, report = worker_script(SHOW + "    raise SystemExit(3)"), tmp_path / "report.json"
    policy = ("--max-restarts=3/1h", "--fatal-exit-codes=3", "--exit-codes=verdict")
    launched = backend(*policy, f"--report={report}", script).exits(93)
    told = json.loads(report.read_text(encoding="utf-8"))
    assert (told["verdict"], told["restarts"]) == ("permanent", {"charged": 0, "max": 3, "window": 3600})
    assert launched.stdout.splitlines()[0] == "0 1 0 0"
    assert "no effect" not in launched.stderr


@pytest.mark.beyond_torchrun  # torchrun prints tracebacks
@pytest.mark.parametrize(
    ("trouble", "told"), [("", "SIGTERM received"), ("wait", "stopped by SIGTERM before any worker")]
)
def test_a_signal_stops_workers_and_ends_a_pending_rendezvous(backend, worker_script, trouble, told):
    launched = backend(worker_script(PAUSE), conf=f"trouble={trouble}" if trouble else "")
    started = launched.wait_for_line(r"WAITS|RUNS (\d+)")
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    assert told in launched.stderr
    assert len(launched.stderr.splitlines()) <= 2
    # The rendezvous stays open, because the other nodes continue.
    assert "SHUT" not in launched.stdout
    procs.assert_gone([int(started[1])] if started[1] else [])


@pytest.mark.beyond_torchrun
def test_a_signal_ends_the_wait_for_nodes_that_have_not_finished(backend, worker_script, tmp_path):
    source = """
        import os, select, signal, sys
        if os.environ["RANK"] == "1":
            while "terminal_state" not in open(sys.argv[1]).read():
                select.select([], [], [], 0.01)
            os.write(1, b"MET\\n")
            signal.pause()
        os.write(1, b"DONE\\n")
    """
    nodes = [backend("--nnodes=2", worker_script(source), tmp_path / "nodes") for _ in range(2)]
    done, running = sorted(nodes, key=lambda node: node.wait_for_line("DONE|MET")[0])
    for node in (done, running):
        node.signal(signal.SIGTERM)
        node.exits(1)
        assert "SHUT" not in node.stdout


@pytest.mark.beyond_torchrun
def test_sigusr1_is_forwarded_to_workers_with_a_custom_backend(backend, worker_script):
    source = """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        os.write(1, b"RUNS\\n")
        signal.sigwait([signal.SIGUSR1])
    """
    launched = backend(worker_script(source))
    launched.wait_for_line("RUNS")
    launched.signal(signal.SIGUSR1)
    launched.exits(0)


@pytest.mark.beyond_torchrun
def test_ctrl_z_also_pauses_the_workers_with_a_custom_backend(backend, worker_script):
    launched = backend(worker_script(PAUSE))
    pid = int(launched.wait_for_line(r"RUNS (\d+)")[1])
    launched.signal(signal.SIGTSTP)
    launched.wait_stopped()
    procs.wait_state(pid, "T")
    launched.signal(signal.SIGCONT)
    procs.wait_state(pid, "S")
    launched.signal(signal.SIGTERM)
    launched.exits(1)


@pytest.mark.beyond_torchrun  # torchrun prints tracebacks
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ({"conf": "trouble=settings"}, 2, "--rdzv-backend mine: trouble is no setting"),
        ({"conf": "trouble=creator"}, 2, "--rdzv-backend: 'mine' .*TypeError: no room"),
        ({"conf": "trouble=service"}, 1, "rendezvous failed: ConnectionRefusedError: .*nobody listens"),
        ({"name": "broken"}, 2, "--rdzv-backend: 'broken' .*my_rdzv:broken: OSError: no luck"),
        ({"name": "nothing"}, 2, "--rdzv-backend: got 'nothing'.*, broken, mine$"),
        ({"conf": "trouble=connection"}, 1, "rendezvous failed: RendezvousConnectionError: nobody is there"),
    ],
)
def test_a_custom_backend_error_is_reported_in_one_line(backend, worker_script, how, code, line):
    launched = backend(worker_script(SHOW), **how).exits(code)
    (told,) = launched.stderr.splitlines()
    assert re.match(rf"elasticrs\S*: .*{line}", told)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.beyond_torchrun  # torchrun fails with a different error
@pytest.mark.parametrize(("trouble", "code"), [("spare", 0), ("connection", 1)])
def test_rendezvous_errors_of_torch_print_no_traceback(backend, worker_script, trouble, code):
    launched = backend(worker_script(SHOW), kind=TORCHS, conf=f"trouble={trouble}").exits(code)
    failed = "rendezvous failed: RendezvousConnectionError: nobody is there"
    lines = launched.stderr.splitlines()
    assert any(line.endswith(failed) for line in lines) == bool(code)
    # Only check the start of each line, because torch logs a traceback of a package that imports it.
    assert not [line for line in lines if line.startswith("Traceback")]


@pytest.mark.beyond_torchrun  # torchrun words the message differently
def test_options_without_effect_on_a_custom_backend_are_named(backend, worker_script):
    launched = backend("--master-port=1", "--node-rank=1", "--drain=job", worker_script(SHOW)).exits(0)
    assert [line.split()[1] for line in launched.stderr.splitlines()] == [
        *("--master-port", "--node-rank", "--drain"),
        "succeeded",
    ]


@pytest.mark.beyond_torchrun
def test_run_path_works_with_a_custom_backend(backend, worker_script):
    launched = backend("--run-path", "--nproc-per-node=2", worker_script(SHOW)).exits(0)
    assert sorted(launched.stdout.splitlines())[:2] == ["0 2 0 0", "1 2 0 0"]


# The nodes use torch's own rendezvous.
@pytest.fixture
def in_file(launch_with_torch, tmp_path):
    """Return a function that starts two nodes that meet in a file."""

    def start(script):
        meeting = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-id=job")
        endpoint = f"--rdzv-endpoint={tmp_path / 'meeting'}"
        options = ("--nnodes=2", "--nproc-per-node=1", *meeting, endpoint)
        return [launch_with_torch(*options, script) for _ in range(2)]

    return start


def test_nodes_rendezvous_through_a_file(in_file, worker_script):
    nodes = in_file(worker_script(SHOW))
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].stderr
    assert sorted(node.stdout for node in nodes) == ["0 2 0 0\n", "1 2 1 0\n"]


@pytest.mark.beyond_torchrun  # torchrun has other names for its modules
def test_the_documented_handler_works_in_a_package_and_in_a_program(
    launch_with_torch, worker_script, tmp_path
):
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    _, module, program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ((group, name, function),) = re.findall(
        r'\[project.entry-points."(.*)"\]\n(.*) = "my_rendezvous:(.*)"', page
    )
    env = install(tmp_path / "site", "my_rendezvous", module, group, **{name: function})
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    meeting = ("--nnodes=2", f"--rdzv-backend={name}", f"--rdzv-endpoint={tmp_path}", "--rdzv-id=job")
    script = worker_script("""
        import os, signal, sys
        if os.environ["ELASTICRS_ROUND"] == "1":
            signal.pause() if os.environ["RANK"] == "1" else sys.exit(3)
        os.write(1, f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
    """)
    options, program = (*meeting, "--max-restarts=1", script), [sys.executable, tmp_path / "program.py"]
    nodes = [launch_with_torch(*options, env=env, **how) for how in ({"argv": program}, {})]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
    assert sorted(node.stdout for node in nodes) == ["0 of 2\n", "1 of 2\n"]


def test_standalone_with_store_type_file_needs_no_file(launch, worker_script):
    launched = launch("--standalone", "--rdzv-conf=store_type=file", worker_script(SHOW)).exits(0)
    assert launched.stdout == "0 1 0 0\n"
