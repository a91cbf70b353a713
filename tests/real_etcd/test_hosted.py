"""Jobs whose agents host the etcd in which they meet: on loopback, one member for each agent."""

import os
import signal
import socket
from pathlib import Path

import pytest
from helpers import nodes, ports
from helpers.etcd import binary
from helpers.nodes import RANKS, finish
from helpers.procs import descendants, reap_adopted, wait_until

from elasticrs.rendezvous.elastic.etcd_gateway import Gateway, GatewayError
from elasticrs.rendezvous.elastic.etcd_membership import Seat, password_of

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(180)]

PREFIX = "/torchelastic/p2p"


def _order(files):
    """As :class:`Gateway` takes them."""
    return () if files is None else (files.ca, files.cert, files.key)


class Job:
    """Three seats on this machine, and the agents of one job."""

    def __init__(self, launch, folder, files=None):
        if binary() is None:
            pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
        self._launch, self._folder, self._gateway = launch, folder, Gateway(_order(files))
        self._scheme = "http" if files is None else "https"
        # In the order in which agents look for a free one.
        self.ports = ports.pairs(3)

    def agent(self, *options, env=None, conf="", nnodes="1:3", last=()):
        endpoint = ",".join((*(f"127.0.0.1:{port}" for port in self.ports[: 3 - len(last)]), *last))
        # A lease that no election on a loaded machine ends.
        conf = f"host=1,lease_ttl=30,last_call_timeout=60,restart_call_timeout=0{conf}"
        return self._launch(
            *("--rdzv-backend=etcd", f"--rdzv-endpoint={endpoint}", "--rdzv-id=a/job"),
            *(f"--rdzv-conf={conf}", f"--nnodes={nnodes}", "--max-restarts=0", *options, RANKS),
            env={"TORCHELASTIC_ETCD_BINARY_PATH": binary(), **(env or {})},
        )

    def listed(self, index):
        """What the member at a seat says of all, by seat; nothing if it does not answer."""
        port = self.ports[index]
        try:
            entries = self._gateway.members_at(Seat("127.0.0.1", port, port + 1, self._scheme), 5)
        except (OSError, GatewayError):
            return {}
        urls = [f"{self._scheme}://127.0.0.1:{each + 1}" for each in self.ports]
        return {urls.index(each.peer_urls[0]): each for each in entries}

    def are_members(self, *seats):
        """True if these seats, and no others, have members that all agree so."""
        return all(
            set(listed) == set(seats)
            and all(each.has_published and not each.is_learner for each in listed.values())
            for listed in (self.listed(seat) for seat in seats)
        )

    def programs(self):
        """The etcds of the job, by pid."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.startswith(os.fsencode(self._folder / "elasticrs_etcd_")) for word in words):
                found.append(int(path.parent.name))
        return found

    def left(self):
        """What the job has left on this machine."""
        listening = [port for each in self.ports for port in (each, each + 1) if not ports.is_free(port)]
        return listening, self.programs(), list(self._folder.glob("elasticrs_etcd_*"))


@pytest.fixture
def job(launch, tmp_path, etcd_program):
    return Job(launch, tmp_path)


def round_of(agents, numbers):
    """The workers of a round, in which no restart was charged: each agent's so many-th."""
    found = nodes.round_of(agents, numbers)
    told = "\n".join(agent.stderr for agent in agents)
    assert {(each.world, each.restart) for each in found} == {(len(agents), 0)}, told
    return found


def test_agents_meet_in_an_etcd_of_their_own_and_leave_nothing(job):
    agents = [job.agent(nnodes="3") for _ in range(3)]
    workers = round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    finish(agents, workers)
    assert job.left() == ([], [], [])


def test_a_job_may_lose_all_its_nodes_one_after_the_other(job):
    agents, numbers = [job.agent() for _ in range(3)], [1, 1, 1]
    workers = round_of(agents, numbers)
    for turn in range(3):
        wait_until(lambda: job.are_members(0, 1, 2))
        # The one with rank 0 first, then those that have been there from the start.
        lost = next(i for i, each in enumerate(workers) if each.rank == 0) if turn == 0 else 0
        killed, _ = agents.pop(lost), numbers.pop(lost)
        killed.signal(signal.SIGKILL)
        killed.wait()
        numbers = [number + 1 for number in numbers]
        round_of(agents, numbers)
        agents, numbers = [*agents, job.agent()], [*(number + 1 for number in numbers), 1]
        workers = round_of(agents, numbers)
    wait_until(lambda: job.are_members(0, 1, 2))
    finish(agents, workers)
    reap_adopted()
    assert job.left() == ([], [], [])


def test_a_node_that_leaves_takes_its_member_out(job):
    agents = [job.agent() for _ in range(3)]
    round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    # One after the other: with its member still counted, the last one would have no quorum.
    for number in (2, 3):
        leaver = agents.pop(0)
        leaver.signal(signal.SIGTERM)
        leaver.exits(1)
        workers = round_of(agents, [number] * len(agents))
    finish(agents, workers)
    assert job.left() == ([], [], [])


def test_a_member_that_ends_is_started_again_and_no_worker_is(job):
    agents = [job.agent(nnodes="3") for _ in range(3)]
    workers = round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    killed = job.programs()[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in (found := job.programs()) and len(found) == 3)
    wait_until(lambda: job.are_members(0, 1, 2))
    finish(agents, workers)
    assert "this node's member of etcd has ended: " in "".join(agent.stderr for agent in agents)


def kill_program(agent):
    """The program under which the agent's member runs, which the kernel then kills as well."""
    below = wait_until(
        lambda: [each for each in descendants(agent.pid) if "etcd_host_program" in each.command]
    )
    os.kill(below[0].pid, signal.SIGKILL)
    wait_until(lambda: not any(each.pid == below[0].pid for each in descendants(agent.pid)))


def test_a_node_whose_members_program_is_killed_has_another_one_soon(job):
    agents = [job.agent() for _ in range(3)]
    round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    before = {each.id for each in job.listed(0).values()}
    kill_program(agents[0])
    agents[0].wait_for_lines("exit code -9; it is started again", 1)
    agents[0].wait_for_lines("belongs to the cluster", 1)
    wait_until(lambda: job.are_members(0, 1, 2))
    assert len(before & {each.id for each in job.listed(0).values()}) == 2
    # It counts: without it the two that are left would be one of three.
    lost = agents.pop()
    lost.signal(signal.SIGKILL)
    lost.wait()
    finish(agents, round_of(agents, [2, 2]))
    reap_adopted()
    assert job.left() == ([], [], [])


def test_a_node_that_gives_up_hosting_is_not_counted_on(job):
    agents = [job.agent() for _ in range(3)]
    workers = round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    for _ in range(3):
        kill_program(agents[0])
    agents[0].wait_for_lines("this node has none any more", 1)
    wait_until(lambda: any(job.are_members(*rest) for rest in ((0, 1), (0, 2), (1, 2))))
    finish(agents, workers)
    reap_adopted()
    assert job.left() == ([], [], [])


def test_who_leaves_after_a_loss_leaves_the_others_a_quorum(job):
    agents = [job.agent() for _ in range(3)]
    round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    lost = agents.pop(0)
    lost.signal(signal.SIGKILL)
    lost.wait()
    round_of(agents, [2, 2])
    leaver = agents.pop(0)
    leaver.signal(signal.SIGTERM)
    leaver.exits(1)
    # With the member of the first one counted, this one would be one of two.
    finish(agents, round_of(agents, [3]))
    reap_adopted()
    assert job.left() == ([], [], [])


def test_a_signal_before_there_is_a_quorum(job):
    agent = job.agent()
    wait_until(lambda: any(job.listed(index) for index in range(3)))
    agent.signal(signal.SIGTERM)
    agent.exits(1)
    assert job.left() == ([], [], [])


def test_an_agent_that_is_alone_says_how_many_have_to_be_up(job):
    agent = job.agent(conf=",join_timeout=3")
    agent.exits(1)
    assert "have to be up: 2 of 3" in agent.stderr
    assert job.left() == ([], [], [])


# --- with certificates ---


def secured(files):
    return f",protocol=https,ca_cert={files.ca},ssl_cert={files.cert},ssl_cert_key={files.key}"


def test_members_and_agents_know_each_other_by_certificates(launch, tmp_path, authority):
    files = authority.issue("node")
    job = Job(launch, tmp_path, files)
    agents = [job.agent(conf=secured(files)) for _ in range(3)]
    round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    stranger = Gateway()
    for index, port in enumerate(job.ports):
        assert job.listed(index)
        with pytest.raises((OSError, GatewayError)):
            stranger.members_at(Seat("127.0.0.1", port, port + 1), 5)
    killed = agents.pop(0)
    killed.signal(signal.SIGKILL)
    killed.wait()
    round_of(agents, [2, 2])
    agents.append(job.agent(conf=secured(files)))
    workers = round_of(agents, [3, 3, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    finish(agents, workers)
    reap_adopted()
    assert job.left() == ([], [], [])


NO_CONNECTION = (
    r"no connection with the member of etcd at 127\.0\.0\.1:\d+: (.*); on all nodes ca_cert and ssl_cert"
)


def test_certificates_of_two_authorities_are_told_of(launch, tmp_path, authority, other_authority):
    files = authority.issue("node")
    job = Job(launch, tmp_path, files)
    first = job.agent(conf=secured(files))
    wait_until(lambda: any(job.listed(index) for index in range(3)))
    # It has a certificate that the first one does not know, and knows that of the first one.
    second = job.agent(conf=secured(other_authority.issue("other")._replace(ca=files.ca)))
    found = first.wait_for_lines(NO_CONNECTION, 1)[0]
    assert found[1] == "its certificate does not fit: unable to get local issuer certificate"
    assert "it refuses this node's certificate" in second.wait_for_lines(NO_CONNECTION, 1)[0][1]
    for agent in (first, second):
        agent.signal(signal.SIGTERM)
        agent.exits(1)
    assert job.left() == ([], [], [])


def test_a_certificate_for_another_host_is_told_of(launch, tmp_path, authority):
    files = authority.issue("node", "elsewhere.example")
    job = Job(launch, tmp_path, files)
    agents = [job.agent(conf=secured(files)) for _ in range(2)]
    found = agents[1].wait_for_lines(NO_CONNECTION, 1)[0]
    assert "certificate is not valid for '127.0.0.1'" in found[1]
    for agent in agents:
        agent.signal(signal.SIGTERM)
        agent.exits(1)
    assert job.left() == ([], [], [])


# --- with a token ---


def test_a_token_on_some_agents_only(job):
    agents = [job.agent() for _ in range(3)]
    round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    # All seats are taken: it is a client.
    late = job.agent(env={"ELASTICRS_TOKEN": "secret"}, conf=",join_timeout=3").exits(1)
    assert "serves those without a token (yet); give all nodes the same token" in late.stderr
    lost = agents.pop()
    lost.signal(signal.SIGKILL)
    lost.wait()
    # It has a seat.
    late = job.agent(env={"ELASTICRS_TOKEN": "secret"}).exits(1)
    assert "and all nodes the same --rdzv-id and token" in late.stderr
    finish(agents, round_of(agents, [2, 2]))
    reap_adopted()
    assert job.left() == ([], [], [])


def test_members_serve_only_those_who_have_the_token(job):
    env = {"ELASTICRS_TOKEN": "secret"}
    agents = [job.agent(env=env) for _ in range(3)]
    round_of(agents, [1, 1, 1])
    wait_until(lambda: job.are_members(0, 1, 2))

    def is_refused(gateway):
        seat = Seat("127.0.0.1", job.ports[0], job.ports[0] + 1)
        try:
            gateway.ask(seat, "kv/range", {"key": "YQ=="}, 5)
        except GatewayError:
            return True
        return False

    def refuses_other_tokens():
        # Its member finds others that are not of this job, or its session is refused.
        assert "token" in job.agent(env={"ELASTICRS_TOKEN": "other"}).exits(1).stderr

    assert is_refused(Gateway())
    assert is_refused(Gateway((), "wrong"))
    assert not is_refused(Gateway((), password_of("a/job", PREFIX, b"secret")))
    killed = agents.pop(0)
    killed.signal(signal.SIGKILL)
    killed.wait()
    round_of(agents, [2, 2])
    # With a seat, and then without.
    refuses_other_tokens()
    agents.append(job.agent(env=env))
    workers = round_of(agents, [3, 3, 1])
    wait_until(lambda: job.are_members(0, 1, 2))
    refuses_other_tokens()
    finish(agents, workers)
    reap_adopted()
    assert job.left() == ([], [], [])


# --- what cannot be ---


def test_files_that_hold_no_certificates(job, tmp_path):
    file = tmp_path / "nothing"
    file.write_text("nothing")
    agent = job.agent(conf=f",protocol=https,ca_cert={file},ssl_cert={file}")
    agent.exits(1)
    assert "certificate" in agent.stderr


def refused(agent, *says):
    agent.exits(1)
    lines = [line for line in agent.stderr.splitlines() if says[0] in line]
    assert len(lines) == 1, agent.stderr
    for each in says:
        assert each in lines[0]


def test_a_machine_without_etcd_is_told_where_to_get_it(job):
    agent = job.agent(env={"TORCHELASTIC_ETCD_BINARY_PATH": "/no/etcd"})
    refused(agent, "this node cannot host a member of etcd: '/no/etcd'", "is no program: install it (Debian")


@pytest.mark.parametrize("which", [0, 1], ids=["for clients", "for members"])
def test_a_port_that_another_program_has(job, which):
    with socket.create_server(("127.0.0.1", job.ports[0] + which)) as other:
        agent = job.agent()
        port = other.getsockname()[1]
        refused(agent, f"this node cannot host a member of etcd at 127.0.0.1:{port}: Address already in use")
        other.close()
    assert job.left() == ([], [], [])


def test_an_etcd_of_somebody_else(job, etcd):
    # Where this job looks for a member of its own.
    port = etcd.server.members[0].peers
    agent = job.agent(last=[f"localhost:{port - 1}"])
    refused(agent, f"an etcd that is not of this job answers at localhost:{port}")
