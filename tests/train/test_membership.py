"""A member without a network: calls that are refused, and calls that its children may make."""

import math
import os
import sys
from contextlib import closing

import pytest
from helpers.procs import run_program

from elasticrs._engine.workers.node_page import VARIABLE, AgentPage, page_of
from elasticrs.train import SimpleWorkerStats
from elasticrs.train.agent import AgentCoordinator
from elasticrs.train.custom_loop import on_change
from elasticrs.train.meeting_url import parse
from elasticrs.train.membership import Membership
from elasticrs.train.p2p import CoordinatorP2P

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
    place = parse(URL, {})
    member = Membership(place.rendezvous, place.backend)
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
from elasticrs.train.groups import Connections
from elasticrs.train.meeting_url import parse
from elasticrs.train.membership import Membership, Round

place = parse("elasticrs://localhost:1/job?min_workers=2&max_workers=4", {})
member = Membership(place.rendezvous, place.backend)
listener, connections = socket.create_server(("127.0.0.1", 0)), Connections()
member._round = Round(1, 0, 2, "127.0.0.1", 1, None, connections)
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
member._told(Stop(1, "a member is lost", fenced=True))
assert waiting.seen.wait(60)
for fd in taken:
    os.close(fd)
print("ended", one.recv(1) == b"")
member._round = None
member._end_thread()
print("threads", threading.active_count())
"""


def test_the_watch_thread_survives_a_lack_of_descriptors():
    done = run_program([sys.executable, "-c", IN_A_ROUND + WITHOUT_DESCRIPTORS], timeout=120, check=True)
    told, *rest = done.stdout.splitlines()
    assert "round 1" in told
    assert rest == ["ended True", "threads 1"]


HANGING_CREATION = """
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
with connections.recorded():
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    member._told(Stop(1, "a member is lost", fenced=True))
    is_ended = one.recv(1) == b""
member._round = None
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
