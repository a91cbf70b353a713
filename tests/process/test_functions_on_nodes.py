"""Function workers on several nodes. Each node is a host program on this machine with an agent of the same
job.
"""

import signal

import pytest
from helpers import ports
from helpers.host_programs import told

from elasticrs._engine.job.phrases import SILENT
from elasticrs.store import connect

HOST = '''
import contextlib, threading, time
from elasticrs import ChildFailedError, LaunchConfig, elastic_launch
from elasticrs.agent.server import LocalElasticAgent, WorkerGroup, WorkerSpec
from elasticrs.multiprocessing import DefaultLogsSpecs, SignalException, Std
from elasticrs.rendezvous import RendezvousClosedError, RendezvousError, RendezvousParameters
from elasticrs.rendezvous.registry import get_rendezvous_handler

NODE, ENDPOINT = int(sys.argv[1]), sys.argv[2]
CONFIG = {"last_call_timeout": 0.3, "join_timeout": 60, "order_hint": NODE, "is_host": NODE == 0}

def launch(function, *args, nodes=(2, 2), nproc=2, **how):
    config = LaunchConfig(
        *nodes, nproc, rdzv_backend=how.pop("backend", "c10d"), rdzv_endpoint=ENDPOINT, run_id="job",
        rdzv_configs={**CONFIG, **how.pop("conf", {})}, max_restarts=how.pop("restarts", 0),
        logs_specs=DefaultLogsSpecs(os.environ["TMPDIR"] + "/logs%d" % NODE),
        start_method=how.pop("start_method", "fork"), **how,
    )
    return elastic_launch(config, function)(*args)

def meeting_store(prefix=""):
    from elasticrs.store import connect
    host, _, port = ENDPOINT.rpartition(":")
    return contextlib.closing(connect(host, int(port), "job", prefix=prefix))

def meet():
    """All workers of the round are there."""
    with meeting_store("test/%d/" % own("ELASTICRS_ROUND")) as store:
        if store.add("here", 1) == own("WORLD_SIZE"):
            store.set("all", "1")
        store.wait(["all"])

def wait_for_the_test():
    tell(runs=own("RANK"))
    with meeting_store() as store:
        store.get("go on")
'''


@pytest.fixture
def port():
    """Port of the store in which the nodes meet."""
    return ports.free()


@pytest.fixture
def nodes(host_program, port):
    """Return a function that starts the program once for each rank."""

    def start(functions, main, *ranks):
        return [host_program(HOST + functions, main, str(rank), f"127.0.0.1:{port}") for rank in ranks]

    return start


def all_told(started):
    """Check that all nodes exit successfully, and return the values that each of them told last."""
    codes = [each.wait() for each in started]
    assert not any(codes), "\n".join(each.stderr for each in started)
    return [told(each) for each in started]


def let_workers_go_on(port):
    """End the wait of workers in ``wait_for_the_test``."""
    store = connect("127.0.0.1", port, "job")
    store.set("go on", "1")
    store.close()


def test_each_node_returns_new_values_by_global_rank_after_a_restart(nodes):
    functions = """
def work(base):
    meet()
    if own("TORCHELASTIC_RESTART_COUNT") == 0:
        if own("RANK") == 0:
            sys.exit(3)
        signal.pause()
    store = os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    names = ("WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    return [base + own("RANK"), *map(own, names), store]
"""
    main = """
tell(**{str(rank): value for rank, value in launch(work, 100, nodes=(3, 3), restarts=1).items()})
"""
    assert all_told(nodes(functions, main, 0, 1, 2)) == [
        {str(rank): [100 + rank, 6, rank // 2, 1, "True"] for rank in (2 * node, 2 * node + 1)}
        for node in range(3)
    ]


def test_programs_return_none_for_each_global_rank(nodes):
    main = """
config = LaunchConfig(
    2, 2, 2, rdzv_backend="elasticrs", rdzv_endpoint=ENDPOINT, run_id="job", rdzv_configs=CONFIG
)
tell(values=list(elastic_launch(config, "/bin/true")().items()))
"""
    assert all_told(nodes("", main, 0, 1)) == [
        {"values": [[0, None], [1, None]]},
        {"values": [[2, None], [3, None]]},
    ]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("raise ValueError('the very first')", 1, "ValueError: the very first"), ("os._exit(0)", 0, SILENT)],
    ids=["exception", "exit without a value"],
)
def test_every_node_reports_the_same_first_failure(nodes, end, code, said):
    functions = f"""
def work():
    meet()
    if own("RANK") == 3:
        {end}
"""
    main = """
try:
    launch(work, restarts=1)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    tell(rank, failure.exitcode, f"{error} {failure.message}")
"""
    started = nodes(functions, main, 0, 1)
    for rank, exitcode, text in all_told(started):
        assert (rank, exitcode, said in text) == (3, code, True)
    for each in started:
        each.wait_for_line(rf"rank 3 .*on node .* {said}")


def test_a_spare_node_returns_no_values(nodes, port):
    functions = """
def work():
    wait_for_the_test()
    return 7
"""
    main = "tell(values=list(launch(work, nodes=(2, 2), nproc=1).items()))"
    members = nodes(functions, main, 0, 1)
    for each in members:
        each.wait_for_line("TOLD .*runs")
    # Start the same program on a third node, although the job allows only two nodes.
    third = nodes(functions, main, 2)
    third[0].wait_for_line("spare")
    let_workers_go_on(port)
    values = [told["values"] for told in all_told(members + third)]
    assert sorted(values) == [[], [[0, 7]], [[1, 7]]]


def test_a_signal_to_one_host_program_raises_signal_exception_only_there(nodes):
    functions = """
def work():
    meet()
    if own("LOCAL_RANK") == 0:
        tell(runs=own("RANK"))
    signal.pause()
"""
    main = """
try:
    launch(work, conf={"join_timeout": 6})
except SignalException as error:
    tell(signal=error.sigval.name)
except RendezvousError as error:
    tell(error=type(error).__name__)
"""
    started = nodes(functions, main, 0, 1)
    for each in started:
        each.wait_for_line("TOLD .*runs")
    started[1].signal(signal.SIGTERM)
    assert all_told(started) == [{"error": "RendezvousTimeoutError"}, {"signal": "SIGTERM"}]


def test_an_agent_can_run_again_and_its_worker_group_is_up_to_date(nodes):
    functions = """
def work():
    return own("RANK")

STORES = []

def take_plan(group, plan, open_store):
    TAKEN(group, plan, open_store)
    # Each node tells the other one its rank, in each round anew.
    group.store.set(str(group.group_rank), str(len(STORES)))
    STORES.append(group.store.get(str(1 - group.group_rank)).decode())

TAKEN, WorkerGroup.take_plan = WorkerGroup.take_plan, take_plan

def group_of(agent):
    group = agent.get_worker_group()
    return [
        group.group_rank, group.group_world_size, [worker.global_rank for worker in group.workers],
        group.master_addr, group.master_port > 0, group.state.value, STORES,
    ]
"""
    main = """
parameters = RendezvousParameters("c10d", ENDPOINT, "job", 2, 2, **CONFIG)
handler = get_rendezvous_handler(parameters)
spec = WorkerSpec("trainer", 1, handler, entrypoint=work, max_restarts=0, monitor_interval=0.1)
agent = LocalElasticAgent(spec, DefaultLogsSpecs(os.environ["TMPDIR"] + "/logs%d" % NODE))
values = [list(agent.run().return_values.items()) for _ in range(3)]
group = group_of(agent)
handler.shutdown()
try:
    agent.run()
except RendezvousClosedError:
    tell(values=values, group=group)
"""
    assert all_told(nodes(functions, main, 0, 1)) == [
        {
            "values": [[[rank, rank]]] * 3,
            "group": [rank, 2, [rank], "127.0.0.1", True, "SUCCEEDED", ["0", "1", "2"]],
        }
        for rank in (0, 1)
    ]


def test_a_finished_node_exits_after_the_exit_barrier_timeout(nodes, port):
    functions = """
def work():
    meet()
    if own("GROUP_RANK") == 0:
        wait_for_the_test()
    return own("RANK")
"""
    main = "tell(values=list(launch(work, nproc=1, exit_barrier_timeout=0.2).items()))"
    first, second = nodes(functions, main, 0, 1)
    # The second node exits although the first one, which hosts the store, is still running.
    first.wait_for_line("TOLD .*runs")
    assert second.wait() == 0
    assert not first.has_exited
    let_workers_go_on(port)
    assert all_told([first, second]) == [{"values": [[0, 0]]}, {"values": [[1, 1]]}]


def test_static_nodes_have_their_given_ranks(nodes):
    functions = """
def work():
    return [own("RANK"), own("GROUP_RANK"), os.environ["TORCHELASTIC_USE_AGENT_STORE"], own("MASTER_PORT")]
"""
    main = """
import warnings
warnings.simplefilter("ignore")
values = launch(work, backend="static", conf={"rank": 1 - NODE, "is_host": NODE == 1}, nproc=1)
tell(values=list(values.items()), port=int(ENDPOINT.rpartition(":")[2]))
"""
    first, second = all_told(nodes(functions, main, 0, 1))
    port = first["port"]
    assert (first["values"], second["values"]) == ([[1, [1, 1, "False", port]]], [[0, [0, 0, "False", port]]])


RAISING_SPECS = """
class RaisingSpecs(DefaultLogsSpecs):
    def reify(self, envs):
        raise ValueError("no folder for the logs of round " + envs[0]["ELASTICRS_ROUND"])

def work():
    pass
"""

PLAIN = """
class RaisingSpecs(DefaultLogsSpecs):
    pass

def work(*args):
    pass
"""


@pytest.mark.parametrize(
    ("functions", "argument", "kind", "said"),
    [
        (RAISING_SPECS, "", "ValueError", "no folder for the logs of round 1"),
        (PLAIN, "threading.Lock()", "PicklingError", "cannot pickle '_thread.lock' object"),
    ],
    ids=["logs-specs", "pickle"],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_user_code_at_the_start_ends_the_job_on_all_nodes(
    nodes, functions, argument, kind, said, failing
):
    main = f"""
FAILING = {failing}
specs = RaisingSpecs() if NODE == FAILING else DefaultLogsSpecs()
config = LaunchConfig(
    2, 2, 1, rdzv_endpoint=ENDPOINT, run_id="job", max_restarts=3, start_method="spawn", logs_specs=specs,
    rdzv_backend="c10d", rdzv_configs={{**CONFIG, "join_timeout": 600}},
)
arguments = [{argument}] if NODE == FAILING else []
try:
    elastic_launch(config, work)(*arguments)
    tell(kind="none", text="")
except Exception as error:
    tell(kind=type(error).__name__, text=str(error))
"""
    ends = all_told(nodes(functions, main, 0, 1))
    assert ends[failing]["kind"] == kind
    assert said in ends[failing]["text"]
    other = ends[1 - failing]
    assert other["kind"] not in ("none", kind)
    assert f"{kind}: {said}" in other["text"]
