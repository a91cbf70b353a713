"""Agent subclasses whose hooks are called, and user-defined rendezvous handlers, with real workers."""

import signal

import pytest
from helpers import ports
from helpers.host_programs import told
from helpers.schema import schemas

HOST = '''
from elasticrs.agent.server import LocalElasticAgent, RunResult, WorkerSpec, WorkerState
from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException
from elasticrs.rendezvous import RendezvousHandler, RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler

CALLS = []

def told(name):
    def hook(self, *args, **kwargs):
        CALLS.append(name.strip("_"))
        return getattr(LocalElasticAgent, name)(self, *args, **kwargs)
    return hook

class Hooked(LocalElasticAgent):
    """Sees every hook of torch's being called."""

for each in (
    "_rendezvous", "_assign_worker_ranks", "_initialize_workers", "_start_workers", "_stop_workers",
    "_restart_workers", "_shutdown", "_exit_barrier", "_invoke_run",
):
    setattr(Hooked, each, told(each))

class Own(RendezvousHandler):
    """The user's own, of which our agent knows nothing."""

    def __init__(self, inner):
        self.inner = inner

    def get_backend(self): return "own"
    @property
    def use_agent_store(self): return self.inner.use_agent_store
    def next_rendezvous(self): return self.inner.next_rendezvous()
    def is_closed(self): return self.inner.is_closed()
    def set_closed(self): self.inner.set_closed()
    def num_nodes_waiting(self): return self.inner.num_nodes_waiting()
    def get_run_id(self): return self.inner.get_run_id()
    def shutdown(self): return self.inner.shutdown()

def handler(nodes=1, **settings):
    endpoint = sys.argv[2] if nodes > 1 else ""
    return get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "job", nodes, nodes, **settings))

def spec(handler, entrypoint, *args, nproc=2, restarts=0, interval=30):
    # Seldom: what happens to the workers is seen at once.
    return WorkerSpec(
        "trainer", nproc, handler, entrypoint=entrypoint, args=args, max_restarts=restarts,
        monitor_interval=interval,
    )

def agent(made, kind=LocalElasticAgent, **how):
    return kind(made, DefaultLogsSpecs(os.environ["TMPDIR"] + "/logs"), **how)
'''


@pytest.fixture
def host(host_program):
    """Return a function that starts a program with an agent."""
    endpoint = f"127.0.0.1:{ports.free()}"

    def start(functions, main, node=0, more=()):
        return host_program(HOST + functions, main, str(node), endpoint, *more, name=f"host{node}.py")

    return start


FAILS_ONCE = """
def work(code):
    if own("TORCHELASTIC_RESTART_COUNT") == 0:
        if own("RANK") == 1:
            os._exit(code)
        signal.pause()
    return own("RANK") * 10, os.environ["MASTER_PORT"] != "0", own("ELASTICRS_ROUND")
"""


def test_agent_hooks_are_called_in_the_order_of_torch(host):
    main = """
made = agent(spec(handler(), work, 3, restarts=1), Hooked)
result = made.run()
tell(result.state.value, result.return_values, CALLS, made._remaining_restarts)
"""
    state, values, calls, left = told(host(FAILS_ONCE, main))
    assert (state, left) == ("SUCCEEDED", 0)
    # Rounds are numbered from 1, as in an agent with the event loop.
    assert values == {"0": [0, True, 2], "1": [10, True, 2]}
    begin = ["initialize_workers", "rendezvous", "assign_worker_ranks", "start_workers"]
    again = ["restart_workers", "stop_workers", "shutdown", *begin]
    assert calls == ["invoke_run", *begin, *again, "exit_barrier", "shutdown"]


def test_a_failure_is_reported_by_global_rank(host):
    functions = """
class Impatient(LocalElasticAgent):
    def _monitor_workers(self, group):
        CALLS.append(sorted(self._pcontext.pids()))
        return super()._monitor_workers(group)

def work():
    if own("RANK") == 1:
        raise ValueError("first")
    signal.pause()
"""
    main = """
result = agent(spec(handler(), work), Impatient).run()
first = result.failures[1]
tell(result.is_failed(), sorted(result.failures), first.exitcode, first.message["message"], CALLS[0])
"""
    assert told(host(functions, main)) == [True, [0, 1], 1, "ValueError: first", [0, 1]]


def test_a_hook_may_be_replaced_on_an_instance_or_a_class(host):
    main = """
from unittest.mock import patch
made = agent(spec(handler(), "true", nproc=1))
made._monitor_workers = lambda group: RunResult(WorkerState.SUCCEEDED, {0: "mine"})
found = [made.run().return_values]
with patch.object(LocalElasticAgent, "_start_workers", side_effect=RuntimeError("not today")):
    try:
        agent(spec(handler(), "true")).run()
    except RuntimeError as error:
        found.append(str(error))
found.append(agent(spec(handler(), "true")).run().return_values)
tell(*found)
"""
    assert told(host("", main)) == [{"0": "mine"}, "not today", {"0": None, "1": None}]


CONFUSED = """
class Confused(Hooked):
    def _start_workers(self, group):
        return {rank: pid + 1 for rank, pid in super(Confused, self)._start_workers(group).items()}
"""


@pytest.mark.parametrize(
    ("work", "kinds", "said"),
    [
        ('"/no/such"', {"FileNotFoundError", "RuntimeError"}, "`/no/such`"),
        ("lambda: 1", {"PicklingError"}, "lambda"),
        ('"sleep", "60", interval=0.05', {"RuntimeError"}, "UNKNOWN"),
    ],
    ids=["missing program", "unpicklable function", "unknown process ids"],
)
def test_a_start_that_fails_ends_the_agent_with_the_error(host, work, kinds, said):
    agent = "Confused" if said == "UNKNOWN" else "Hooked"
    main = f"""
try:
    agent(spec(handler(), {work}), {agent}).run()
except Exception as error:
    tell([each.__name__ for each in type(error).__mro__], str(error), CALLS[-1])
"""
    classes, text, last = told(host(CONFUSED, main))
    assert last == "shutdown"
    assert kinds <= {*classes}
    assert said in text


def test_a_signal_reaches_the_workers_and_ends_the_agent(host):
    functions = """
def work():
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"PASSED ON\\n"), os._exit(0)))
    print("READY", flush=True)
    while True:
        signal.sigtimedwait([], 0.05)
"""
    main = """
try:
    agent(spec(handler(), work, nproc=1), Hooked).run()
except SignalException as error:
    tell(error.sigval.name, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, CALLS[-1])
"""
    started = host(functions, main)
    started.wait_for_line("READY")
    started.signal(signal.SIGTERM)
    assert told(started) == ["SIGTERM", True, "shutdown"]
    assert "PASSED ON" in started.stdout


def test_a_single_node_agent_also_has_a_store(host):
    functions = """
class Sharing(LocalElasticAgent):
    def _initialize_workers(self, group):
        super(Sharing, self)._initialize_workers(group)
        self._store.set("told", group.store.timeout.total_seconds() and "here")
"""
    main = """
mine = agent(spec(handler(), "true"), Sharing)
mine.run()
found = [mine._store.get("told").decode(), mine.get_worker_group().store.get("told").decode()]
mine._worker_group.spec.rdzv_handler.shutdown()
# Nobody looks at it while this one runs.
other = agent(spec(handler(), "true"))
other.run()
other._store.set("told", "later")
found.append(other.get_worker_group().store.get("told").decode())
other._worker_group.spec.rdzv_handler.shutdown()
tell(*found)
"""
    assert told(host(functions, main)) == ["here", "here", "later"]


def test_two_nodes_rendezvous_through_a_user_defined_handler(host):
    functions = """
def work():
    # Of both nodes; told by the rank exchange over the handler's store.
    return [own(name) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")]
"""
    main = """
mine = Own(handler(2, order_hint=int(sys.argv[1]), is_host=sys.argv[1] == "0"))
result = agent(spec(mine, work, nproc=1 + int(sys.argv[1])), exit_barrier_timeout=20).run()
tell(result.return_values, mine.shutdown())
"""
    first, second = (host(functions, main, node) for node in (0, 1))
    assert told(first) == [{"0": [0, 3, 0, 0]}, True]
    assert told(second) == [{"1": [1, 3, 1, 1], "2": [2, 3, 1, 2]}, True]


def test_policy_and_errors_of_a_user_defined_handler_reach_the_program(host):
    main = """
from elasticrs.rendezvous import RendezvousClosedError
found = []
fatal = spec(Own(handler()), "sh", "-c", "exit 3", restarts=3)
fatal.fatal_exit_codes = "3"
made = agent(fatal)
result = made.run()
found += [result.verdict, result.failures[0].exitcode, made._remaining_restarts]
closed, replaced = spec(Own(handler()), "true"), spec(Own(handler()), "true")
closed.rdzv_handler.set_closed()
replaced.on_failure = "replace"
for wrong in (closed, replaced):
    try:
        agent(wrong).run()
    except (RendezvousClosedError, ValueError) as error:
        found += [type(error).__name__, "rdzv_backend own" in str(error)]
tell(*found)
"""
    assert told(host("", main)) == [
        *("permanent", 3, 3),
        *("RendezvousClosedError", False, "ValueError", True),
    ]


def test_a_signal_during_the_rendezvous_ends_the_agent_and_the_rendezvous(host):
    functions = """
import threading
ENDED = threading.Event()

class Waiting(Own):
    def next_rendezvous(self):
        print("MEETING", flush=True)
        try:
            while True:
                signal.sigtimedwait([], 0.01)
        finally:
            ENDED.set()
"""
    main = """
try:
    agent(spec(Waiting(handler()), "true")).run()
except SignalException as error:
    tell(error.sigval.name, ENDED.wait(60))
"""
    started = host(functions, main)
    started.wait_for_line("MEETING")
    started.signal(signal.SIGINT)
    assert told(started) == ["SIGINT", True]


def test_the_health_server_reports_an_agent_with_hooks(host):
    functions = '''
import http.client, time
from elasticrs.agent.server.health_check_server import HealthCheckServer

def ask(path):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content

class Asked(LocalElasticAgent):
    """Asks in a hook, once all of its workers run."""
    def _monitor_workers(self, group):
        if not CALLS:
            while ask("/readyz")[0] != 200:
                self._pcontext.wait_for_news(0.01)
            CALLS.append([ask("/healthz")[0], ask("/readyz"), ask("/status")[1]])
            # The other one is stopped for it.
            os.kill(CALLS[0][2]["workers"][0]["pid"], signal.SIGKILL)
        return super()._monitor_workers(group)
'''
    main = """
server = HealthCheckServer(time.time, 0, 60)
made = agent(spec(handler(), "sleep", "1000", interval=0.05), Asked, health_check_server=server)
made.run()
tell(*CALLS[0])
"""
    alive, ready, status = told(host(functions, main))
    assert (alive, ready) == (200, [200, {"ready": True, "state": "HEALTHY"}])
    schemas("metrics.md")[0].validate(status)
    assert [worker["state"] for worker in status["workers"]] == ["RUNNING", "RUNNING"]


@pytest.mark.parametrize(
    ("code", "restarts", "last"), [("0", "0", "SUCCEEDED"), ("3", "0", "FAILED"), ("3", "1", "SUCCEEDED")]
)
def test_the_last_health_state_is_the_outcome_of_the_job(host, code, restarts, last):
    functions = """
from elasticrs._engine.supervise.observe.job_health import HealthObserver
from elasticrs.agent.server.health_check_server import HealthCheckServer

STATES = []
publish = HealthObserver._publish
def keep(self, *what):
    # Nobody can ask any more when the last word is said.
    STATES.append(self._state)
    publish(self, *what)
HealthObserver._publish = keep
"""
    main = """
code, restarts = sys.argv[3:]
command = "sh", "-c", "exit $(($0 * (1 - $TORCHELASTIC_RESTART_COUNT)))", code
server = HealthCheckServer(lambda: 0.0, 0, 60)
agent(spec(handler(), *command, nproc=1, restarts=int(restarts)), Hooked, health_check_server=server).run()
tell(STATES[0], STATES[-1])
"""
    assert told(host(functions, main, more=[code, restarts])) == ["INIT", last]


def test_watchdog_events_are_recorded_with_the_events_of_torch(host):
    functions = """
def work():
    from elasticrs import timer
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.01, scope="epoch"):
        while True:
            signal.pause()
"""
    main = """
os.environ["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
made = spec(handler(), work, nproc=1)
made.event_log_handler = "file:" + os.path.abspath("events.jsonl")
agent(made, Hooked).run()
with open("events.jsonl") as file:
    tell(*[json.loads(line)["name"].rpartition(".")[2] for line in file])
"""
    names = told(host(functions, main))
    watchdog = ["watchdog started", "timer expired", "kill worker process", "watchdog stopped"]
    assert [name for name in names if name in watchdog] == watchdog
    assert names[-2:] == ["watchdog stopped", "FAILED"]


FAILS_TO_START = """
class Specs(DefaultLogsSpecs):
    def reify(self, envs):
        if envs[0]["TORCHELASTIC_RESTART_COUNT"] == sys.argv[3]:
            if sys.argv[4] == "signalled":
                signal.raise_signal(signal.SIGTERM)
            raise KeyError("mine")
        return super().reify(envs)
"""

RUN_AND_FAIL_TO_START = """
made = Hooked(spec(handler(), "false", nproc=1, restarts=1), Specs(os.environ["TMPDIR"] + "/logs"))
try:
    made.run()
except (KeyError, SignalException) as error:
    tell(type(error).__name__, type(error.__context__).__name__, CALLS[-1])
"""


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_an_error_of_the_logs_specs_before_a_start_ends_the_agent(host, attempt):
    started = host(FAILS_TO_START, RUN_AND_FAIL_TO_START, more=[attempt, "left alone"])
    assert told(started) == ["KeyError", "NoneType", "shutdown"]


def test_a_signal_before_a_failed_start_is_raised(host):
    started = host(FAILS_TO_START, RUN_AND_FAIL_TO_START, more=["0", "signalled"])
    assert told(started) == ["SignalException", "KeyError", "shutdown"]
