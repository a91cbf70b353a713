"""A member without a network: calls that are refused, and calls that its children may make."""

import math
import os
import socket
import sys
from contextlib import closing
from types import ModuleType

import pytest
from helpers.procs import run_program
from helpers.said import says

from elasticrs import _core
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.nodes.describe import describe
from elasticrs._engine.nodes.transport.coordination import Server
from elasticrs._engine.workers.node_page import VARIABLE, AgentPage, page_of
from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler
from elasticrs.train import AgentCoordinator, CoordinatorP2P, SimpleWorkerStats, on_change, rendezvous
from elasticrs.train.membership import Membership
from elasticrs.train.rendezvous import RendezvousParameters, parse

URL = "elasticrs://localhost:1/job?min_workers=2&max_workers=4"


def test_a_new_coordinator_has_the_fields_of_torchelastic_0_1():
    coordinator = CoordinatorP2P("gloo", URL, 3)
    assert (coordinator.rank, coordinator.world_size) == (-1, 0)
    assert (coordinator.is_worker_straggler, coordinator.stop_training) == (False, False)
    assert coordinator.max_num_trainers == 3
    assert not coordinator.should_stop_training()


@pytest.mark.parametrize(("one", "all_"), [(10000, 10000), (0, 10), (20, 10)])
def test_coordinator_pg_timeout_must_exceed_process_group_timeout(one, all_):
    with pytest.raises(ValueError, match="coordinator_pg_timeout"):
        CoordinatorP2P("gloo", URL, 4, one, all_)


def test_group_calls_before_the_first_rendezvous_are_refused():
    coordinator = CoordinatorP2P("gloo", URL, 4)
    for ask in (coordinator.init_process_group, coordinator.barrier, lambda: coordinator.exchange([1])):
        with pytest.raises(RuntimeError, match=r"rendezvous_barrier\(\) first"):
            ask()
    assert coordinator.should_rendezvous(None), "who is in no round has to ask for one"


def test_the_error_without_an_agent_names_the_on_failure_option(monkeypatch):
    monkeypatch.delenv("ELASTICRS_TRAIN", raising=False)
    for make in (lambda: AgentCoordinator("gloo"), on_change):
        with pytest.raises(RuntimeError, match=r"ELASTICRS_TRAIN.*--on-failure replace"):
            make()


def test_agent_coordinator_takes_url_and_token_from_the_environment(monkeypatch):
    monkeypatch.setenv("ELASTICRS_TRAIN", URL)
    monkeypatch.setenv("ELASTICRS_TRAIN_TOKEN", "secret")
    settings = AgentCoordinator("gloo")._member._handler.rendezvous.settings
    assert settings.token == b"secret"
    assert settings.is_host is False


def test_an_invalid_url_from_the_agent_names_its_variable(monkeypatch):
    monkeypatch.setenv("ELASTICRS_TRAIN", "elasticrs://h:1/j")
    with pytest.raises(ValueError, match="ELASTICRS_TRAIN: min_workers is missing"):
        AgentCoordinator("gloo")


def test_steps_and_their_rate_are_reported_to_the_agent():
    coordinator = CoordinatorP2P("gloo", URL, 3)
    with closing(AgentPage(1)) as page:
        coordinator._member.page = page_of({VARIABLE: page.variable, "LOCAL_RANK": "0"})
        for stats in (SimpleWorkerStats(7.5), None, SimpleWorkerStats(8.0)):
            coordinator.monitor_progress(None, stats)
        (found,) = page.standings()
        # The rate is not requested each time, because computing it may be slow.
        assert (found.steps, found.rate) == (3, 7.5)
        for rate in (math.inf, math.nan):
            coordinator._member.page._rate_due = 0
            coordinator.monitor_progress(None, SimpleWorkerStats(rate))
            assert page.standings()[0].rate is None, "JSON has no word for it"
            coordinator._member.page.tell_rate(rate)
            assert page.standings()[0].rate is None, "whatever a worker writes"
        # Break a reference cycle, which would keep the page's memory until the next garbage collection.
        coordinator._member.page = None


def test_a_forked_child_cannot_join_a_rendezvous():
    member = Membership(parse(URL, {}))
    pid = os.fork()
    if not pid:
        try:
            member.meet()
        except RuntimeError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


IN_A_ROUND = """
import logging, os, resource, socket, sys, threading
from elasticrs._engine.nodes.protocol.messages import Stop
from elasticrs.train import groups
from elasticrs.train.groups import Connections
from elasticrs.train.membership import Membership, Round
from elasticrs.train.rendezvous import parse

member = Membership(parse("elasticrs://localhost:1/job?min_workers=2&max_workers=4", {}))
listener, connections = socket.create_server(("127.0.0.1", 0)), Connections()
member.round = Round(1, 0, 2, "127.0.0.1", 1, None, connections)
member._thread = threading.Thread(target=member._watch)
member._thread.start()
"""

WITHOUT_DESCRIPTORS = """
class Waiting(logging.Handler):
    seen = threading.Event()

    def emit(self, record):
        print(record.getMessage(), flush=True)
        self.seen.set()

logging.getLogger("elasticrs.train").addHandler(waiting := Waiting())
with connections.recorded():
    one = socket.create_connection(listener.getsockname())
    # Options that gloo sets.
    one.set_inheritable(True)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
other, _ = listener.accept()

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
member._record_stop(Stop(1, "a member is lost", fenced=True))
assert waiting.seen.wait(60)
for fd in taken:
    os.close(fd)
print("ended", one.recv(1) == b"")
member.round = None
member._end_thread()
print("threads", threading.active_count())
"""


def test_the_watch_thread_survives_a_lack_of_descriptors():
    done = run_program([sys.executable, "-c", IN_A_ROUND + WITHOUT_DESCRIPTORS], timeout=120, check=True)
    told, *rest = done.stdout.splitlines()
    assert "round 1" in told
    assert rest == ["ended True", "threads 1"]


HANGING_CREATION = """
groups.LAST_RESORT = 0.2
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
with connections.recorded():
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    member._record_stop(Stop(1, "a member is lost", fenced=True))
    is_ended = one.recv(1) == b""
member.round = None
member._end_thread()
print("ended", is_ended)
print("port", listener.getsockname()[1])
"""


def test_a_hanging_group_creation_over_unknown_connections_is_aborted():
    done = run_program([sys.executable, "-c", IN_A_ROUND + HANGING_CREATION], timeout=120, check=True)
    warning, ended, port = done.stdout.splitlines()
    assert warning.startswith("WARNING rank 0: ")
    assert f"127.0.0.1 port {port.split()[1]}" in warning
    assert ended == "ended True"


def test_an_elasticrs_url_is_parsed():
    parsed = parse(
        "elasticrs://node7:29500/a%2Fb?min_workers=2&max_workers=4&last_call_timeout=3&stuck_timeout=20", {}
    )
    found = parsed.rendezvous
    assert (found.host, found.port, found.run_id) == ("node7", 29500, "a/b")
    assert (found.min_nodes, found.max_nodes) == (2, 4)
    assert found.settings.last_call_timeout == 3
    assert parsed.stuck_timeout == 20
    assert found.settings.settle > 20, "a worker that hangs has ended itself before the others go on"
    assert found.settings.max_short_losses == 2**31 - 1, "lost rounds in a row do not end the job"


def test_an_etcd_url_in_torchelastic_0_1_format_is_parsed():
    url = "etcd://etcd7:2379/job7?min_workers=2&timeout=60&last_call_timeout=5&etcd_prefix=/x&protocol=http"
    found = parse(url, {}).rendezvous
    assert found.etcd is not None
    assert found.etcd.endpoints == (("etcd7", 2379),)
    assert (found.min_nodes, found.max_nodes) == (2, 2), "max_workers is min_workers by default"
    assert found.settings.join_timeout == 60


def test_parse_limits_a_url_to_what_its_caller_allows():
    url = "elasticrs://localhost:1/j?min_workers=1&max_workers=8&is_host=1"
    found = parse(url, {"ELASTICRS_TOKEN": "secret"}, 4, may_host=False).rendezvous
    assert (found.max_nodes, found.settings.token, found.settings.is_host) == (4, b"secret", False)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "expected elasticrs://"),
        ("zeus://h:1/j?min_workers=1", "expected elasticrs://"),
        ("elasticrs:///j?min_workers=1", "expected elasticrs://"),
        ("elasticrs://h:1/j", "min_workers is missing"),
        ("elasticrs://h:1/j?min_workers=0", "min_workers: got '0'"),
        ("elasticrs://h:1/j?min_workers=x", "min_workers: got 'x'"),
        ("elasticrs://h:1/j?min_workers=3&max_workers=2", "got min_workers=3"),
        ("elasticrs://h:1/?min_workers=2", "the job: got ''"),
        ("elasticrs://h:x/j?min_workers=2", "the address: got 'h:x'"),
        ("elasticrs://h:0/j?min_workers=2", " port "),
        ("elasticrs://[::1/j?min_workers=2", "Invalid IPv6"),
        ("elasticrs://h:1/j?min_workers=2&min_workers=3", "once"),
        ("elasticrs://h:1/j?min_workers", "expected KEY=VALUE"),
        ("elasticrs://h:1/j?min_workers=2&last_cal_timeout=3", "last_call_timeout"),
        ("elasticrs://h:1/j?min_workers=2&stuck_timeout=0", "stuck_timeout: got '0'"),
        ("etcd://h:1/j?min_workers=2&protocol=ftp", "protocol: got 'ftp'"),
    ],
)
def test_an_invalid_url_is_refused_in_one_line(url, said):
    with pytest.raises(UsageError) as raised:
        parse(url, {})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_job_name_may_contain_any_characters():
    name = "a#b?c/d e%20"
    made = RendezvousParameters("elasticrs", "localhost:1234", name, 2, 4)
    assert parse(made.url, {}).rendezvous.run_id == name
    with pytest.raises(UsageError, match="with a '#', expected '%23'"):
        parse("elasticrs://localhost:1234/a#b?min_workers=2", {})


@pytest.fixture
def handler():
    """Return a function that makes members of a job with one worker. All of them use the same store."""
    server = Server([("127.0.0.1", 0)], run_id="job")
    made = []

    def make(**names):
        config = {"is_host": "0", "join_timeout": "20", "close_timeout": "1"}
        described, _ = describe("c10d", f"127.0.0.1:{server.port}", "job", (1, 1), config, {})
        made.append(ElasticRendezvousHandler(described.replaced(**names), "c10d"))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
    server.close()


def test_a_replacement_gets_the_rank_of_its_predecessor_at_once(handler):
    before, after = handler(member="a"), handler(member="b", replaces="a")
    first, second = before.next_rendezvous(), after.next_rendezvous()
    assert (first.rank, second.rank, second.world_size) == (0, 0, 1)


PROGRAM = """
from elasticrs._engine.nodes.transport.coordination import Server
from elasticrs.train import CoordinatorP2P, NonRetryableException

server = Server([("127.0.0.1", 0)], run_id="job")
conf = "is_host=0&join_timeout=0.3&close_timeout=1"
url = f"elasticrs://127.0.0.1:{server.port}/job?min_workers=2&max_workers=2&{conf}"
for _ in range(2):
    worker = CoordinatorP2P("gloo", url, 2)
    try:
        worker.rendezvous_barrier()
    except NonRetryableException as error:
        print(worker.should_stop_training(), error)
"""


def test_a_worker_that_joins_a_timed_out_job_fails_with_the_reason():
    done = run_program([sys.executable, "-c", PROGRAM], check=True)
    first, late = done.stdout.splitlines()
    says(first, "False", "1", "2", "join_timeout")
    says(late, "False", "job job", "closed", "timeout")


class EnvStore(dict):
    def set(self, key, value):
        self[key] = value.encode()


def test_no_other_process_gets_the_port_before_it_is_used(monkeypatch):
    store = EnvStore()
    torch = ModuleType("torch")
    torch.distributed = ModuleType("torch.distributed")
    torch.distributed.rendezvous = lambda _url: iter([(store, 0, 2)])
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    monkeypatch.setattr(rendezvous, "_held", [])
    for name in rendezvous._OF_EVERY_WORKER:
        monkeypatch.setenv(name, "127.0.0.1" if name == "MASTER_ADDR" else "0")
    port = rendezvous._rendezvous_at_rank_0.__wrapped__().rendezvous.port
    assert store[rendezvous._ADDRESS_KEY].startswith(str(port).encode())
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for host in ("127.0.0.1", "0.0.0.0", "::"):
        server = _core.CoordinationServer([(host, port)], run_id="job")
        assert server.port == port
        server.close()
    for held in rendezvous._held[:-1]:
        held.close()
