"""Jobs whose agents host the etcd cluster of their rendezvous, on loopback and with one member for each
agent.
"""

import errno
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from helpers import nodes, ports
from helpers.etcd import binary
from helpers.nodes import RANKS, finish
from helpers.procs import descendants, reap_adopted, wait_until
from helpers.said import has, line_with, says

from elasticrs.rendezvous.elastic.etcd_gateway import Gateway, GatewayError
from elasticrs.rendezvous.elastic.etcd_membership import Seat, password_of

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(180)]

BACK = "member of etcd .* back with its data"
PREFIX = "/torchelastic/p2p"


def _order(files):
    """Return the paths in the order that :class:`Gateway` expects."""
    return () if files is None else (files.ca, files.cert, files.key)


class Job:
    """Three seats (port pairs for etcd members) on this machine, and the agents of one job."""

    def __init__(self, launch, folder, files=None):
        if binary() is None:
            pytest.skip("needs etcd, which `make setup` gets where Debian's packages are at hand")
        self._launch, self._folder, self._gateway = launch, folder, Gateway(_order(files))
        self._scheme = "http" if files is None else "https"
        self._agents = []
        # Agents try the ports in this order.
        self.ports = ports.pairs(3)

    def agent(self, *options, env=None, conf="", nnodes="1:3", last=(), ttl=30):
        endpoint = ",".join((*(f"127.0.0.1:{port}" for port in self.ports[: 3 - len(last)]), *last))
        # The default lease lasts longer than any election on a loaded machine.
        conf = f"host=1,lease_ttl={ttl},last_call_timeout=60,restart_call_timeout=0{conf}"
        agent = self._launch(
            *("--rdzv-backend=etcd", f"--rdzv-endpoint={endpoint}", "--rdzv-id=a/job"),
            *(f"--rdzv-conf={conf}", f"--nnodes={nnodes}", "--max-restarts=0", *options, RANKS),
            env={"TORCHELASTIC_ETCD_BINARY_PATH": binary(), **(env or {})},
        )
        self._agents.append(agent)
        return agent

    def start(self, *options, **how):
        """Start an agent on each seat. Return the agents and the workers of the first round once all members
        are up.
        """
        agents = [self.agent(*options, **how) for _ in range(3)]
        workers = round_of(agents, [1, 1, 1])
        self.wait_until_up()
        return agents, workers

    def ends(self, agents, workers):
        """Let these workers succeed. Check that their agents succeed and leave nothing behind."""
        finish(agents, workers)
        reap_adopted()
        self.is_gone()

    def is_gone(self):
        """Check that the job no longer uses anything on this machine."""
        assert self.left() == ([], [], [])

    def stop(self, *agents):
        """Stop these agents, and check that they leave nothing behind."""
        for agent in agents:
            agent.signal(signal.SIGTERM)
            agent.exits(1)
        self.is_gone()

    def listed(self, index):
        """Return the members by seat, as listed by the member of this seat. Empty if it does not respond."""
        port = self.ports[index]
        try:
            entries = self._gateway.members_at(Seat("127.0.0.1", port, port + 1, self._scheme), 5)
        except (OSError, GatewayError):
            return {}
        urls = [f"{self._scheme}://127.0.0.1:{each + 1}" for each in self.ports]
        return {urls.index(each.peer_urls[0]): each for each in entries}

    def are_up(self, *seats):
        """Return true if the members of these seats list each other as the three joined members of one
        cluster.
        """
        found = [self.listed(seat) for seat in seats]
        return all(
            listed == found[0] and len(listed) == 3 and all(listed[seat].has_joined for seat in seats)
            for listed in found
        )

    def wait_until_up(self):
        """Wait until all members are up."""
        try:
            wait_until(lambda: self.are_up(0, 1, 2))
        except AssertionError as error:
            listed = [self.listed(seat) for seat in range(3)]
            told = "\n".join(agent.read_for(0) or agent.stderr for agent in self._agents)
            raise AssertionError(f"{error}: {listed}\n{told}") from None

    def names(self):
        """Return the members' names, which differ in each new cluster."""
        return {each.name for each in self.listed(0).values()}

    def programs(self):
        """Return the pids of the job's etcd processes."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            is_etcd = words[0].endswith(b"/etcd")
            if is_etcd and any(word.startswith(os.fsencode(self._folder)) for word in words):
                found.append(int(path.parent.name))
        return found

    def folders(self):
        """Return the data folders of the members."""
        return sorted(self._folder.glob("elasticrs_etcd_*"))

    def left(self):
        """Return the ports, etcd processes and data folders that the job still uses on this machine."""
        listening = [port for each in self.ports for port in (each, each + 1) if not ports.is_free(port)]
        return listening, self.programs(), self.folders()

    def lose(self, agent):
        """Kill an agent, and wait until its etcd process is gone."""
        before = len(self.programs())
        agent.signal(signal.SIGKILL)
        agent.wait()
        wait_until(lambda: len(self.programs()) < before)


@pytest.fixture
def job(launch, tmp_path, etcd_program):
    return Job(launch, tmp_path)


def round_of(agents, numbers):
    """Return the workers of a round. Check that it has one worker per agent, and that it used no restart."""
    found = nodes.round_of(agents, numbers)
    told = "\n".join(agent.stderr for agent in agents)
    assert {(each.world, each.restart) for each in found} == {(len(agents), 0)}, told
    return found


def test_a_job_starts_with_two_of_three_members_and_a_late_member_joins(job):
    agents = [job.agent(nnodes="2") for _ in range(2)]
    round_of(agents, [1, 1])
    assert len(job.programs()) == 2
    agents.append(job.agent(nnodes="2"))
    job.wait_until_up()
    job.lose(agents.pop(0))
    # The late member is needed for a majority. Its node replaces the lost node in the job.
    workers = round_of(agents, [2, 1])
    finish(agents, workers)
    reap_adopted()
    listening, programs, folders = job.left()
    assert (listening, programs, len(folders)) == ([], [], 1)


def test_agents_killed_in_turn_rejoin_as_the_same_members(job):
    (agents, workers), numbers = job.start(), [1, 1, 1]
    before = job.names()
    for turn in range(3):
        # In the first iteration, kill the agent with rank 0. After that, kill the oldest agent.
        lost = next(i for i, each in enumerate(workers) if each.rank == 0) if turn == 0 else 0
        numbers.pop(lost)
        job.lose(agents.pop(lost))
        numbers = [number + 1 for number in numbers]
        round_of(agents, numbers)
        agents, numbers = [*agents, job.agent()], [*(number + 1 for number in numbers), 1]
        workers = round_of(agents, numbers)
        agents[-1].wait_for_line(BACK)
        job.wait_until_up()
    assert job.names() == before
    job.ends(agents, workers)


def test_an_agent_that_left_on_sigterm_rejoins_as_the_same_member(job):
    agents, _ = job.start()
    leaver = agents.pop(0)
    leaver.signal(signal.SIGTERM)
    leaver.exits(1)
    round_of(agents, [2, 2])
    assert len(job.programs()) == 2
    assert len(job.folders()) == 3
    agents.append(job.agent())
    workers = round_of(agents, [3, 3, 1])
    agents[-1].wait_for_line(BACK)
    job.ends(agents, workers)


def test_a_job_that_loses_the_etcd_majority_fails_with_that_reason(job):
    agents, _ = job.start(conf=",store_lost_timeout=3", ttl=4)
    for agent in agents[:2]:
        job.lose(agent)
    agents[2].exits(1)
    says(agents[2].stderr, "2 of its 3")
    # The data of all members are kept, because the job may be started again when the nodes are back.
    assert len(job.folders()) == 3
    reap_adopted()


def test_a_job_restarted_after_all_agents_were_killed_keeps_its_cluster(job):
    agents, _ = job.start(nnodes="3", ttl=4)
    before = job.names()
    for agent in agents:
        job.lose(agent)
    agents, workers = job.start(nnodes="3", ttl=4)
    assert job.names() == before
    job.ends(agents, workers)


def test_a_killed_etcd_member_is_restarted_without_restarting_workers(job):
    agents, workers = job.start(nnodes="3")
    assert {folder.stat().st_mode & 0o777 for folder in job.folders()} == {0o700}
    before = job.names()
    killed = job.programs()[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in (found := job.programs()) and len(found) == 3)
    job.wait_until_up()
    assert job.names() == before
    finish(agents, workers)
    line_with("".join(agent.stderr for agent in agents), "member", "exit code -9", "2 of 3")
    job.is_gone()


def host_program(agent):
    """Return the pid of the program that runs the agent's etcd member."""
    found = wait_until(
        lambda: [each for each in descendants(agent.pid) if "etcd_host_program" in each.command]
    )
    return found[0].pid


def kill_program(agent):
    """Kill the program that runs the agent's etcd member. The kernel then kills the member, too."""
    killed = host_program(agent)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not any(each.pid == killed for each in descendants(agent.pid)))


def test_a_killed_etcd_host_program_is_restarted_without_restarting_workers(job):
    agents, workers = job.start()
    before = job.names()
    kill_program(agents[0])
    agents[0].wait_for_line("exit code -9.*again")
    agents[0].wait_for_line(BACK)
    job.wait_until_up()
    assert job.names() == before
    job.ends(agents, workers)


def test_an_etcd_host_program_killed_repeatedly_is_not_restarted(job):
    agents, workers = job.start()
    for _ in range(3):
        kill_program(agents[0])
    agents[0].wait_for_line("exit code -9.*no longer")
    finish(agents, workers)
    reap_adopted()
    # The data of the abandoned member are kept until the next job.
    assert len(job.folders()) == 1


def test_a_new_agent_takes_over_from_the_etcd_host_program_of_a_killed_agent(job):
    agents, _ = job.start()
    before = job.names()
    lost = agents.pop(0)
    program = host_program(lost)
    os.kill(program, signal.SIGSTOP)
    lost.signal(signal.SIGKILL)
    lost.wait()
    round_of(agents, [2, 2])
    agents.append(job.agent())
    workers = round_of(agents, [3, 3, 1])
    os.kill(program, signal.SIGCONT)
    agents[-1].wait_for_line(BACK)
    job.wait_until_up()
    assert job.names() == before
    job.ends(agents, workers)


# --- lost data, and data of other runs ---


def test_a_member_without_its_data_does_not_rejoin(job):
    agents, _ = job.start()
    before = set(job.folders())
    job.lose(agents.pop(0))
    round_of(agents, [2, 2])
    running = {each for pid in job.programs() for each in before if str(each) in command_of(pid)}
    (gone,) = before - running
    shutil.rmtree(gone)
    agents.append(job.agent())
    agents[-1].wait_for_line("2 of 3 members.* 2 ")
    workers = round_of(agents, [3, 3, 1])
    assert len(job.programs()) == 2
    job.ends(agents, workers)


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_old_data_of_a_node_that_missed_the_end_of_its_job_are_discarded(job):
    agents, _ = job.start()
    before = job.names()
    job.lose(agents.pop(0))
    finish(agents, round_of(agents, [2, 2]))
    assert len(job.folders()) == 1
    # Start the node that has the old data first.
    agents = [job.agent(nnodes="3")]
    wait_until(lambda: any(job.listed(seat) for seat in range(3)))
    agents += [job.agent(nnodes="3") for _ in range(2)]
    workers = round_of(agents, [1, 1, 1])
    job.wait_until_up()
    assert not job.names() & before
    wait_until(lambda: any(agent.read_for(0) or has(agent.stderr, "discarded", "data") for agent in agents))
    job.ends(agents, workers)


def test_the_next_job_removes_the_data_folders_of_a_killed_job(job):
    agents, _ = job.start(nnodes="3")
    old = job.folders()
    for agent in agents:
        job.lose(agent)
    agents, workers = job.start("--rdzv-id=another", nnodes="3")
    wait_until(lambda: not set(old) & set(job.folders()))
    job.ends(agents, workers)


def test_a_second_job_at_the_same_endpoint_is_refused(job):
    first = [job.agent() for _ in range(3)]
    workers = round_of(first, [1, 1, 1])
    refused(job.agent("--rdzv-id=another"), "not of this job", "127.0.0.1:")
    job.ends(first, workers)


def test_a_data_folder_that_other_users_may_access_is_refused(job, tmp_path):
    first = job.agent()
    (made,) = wait_until(job.folders)
    first.signal(signal.SIGKILL)
    first.wait()
    wait_until(lambda: not job.folders())
    made.mkdir()
    made.chmod(0o755)
    refused(job.agent(), str(made))
    reap_adopted()


# --- before there is a quorum ---


def test_a_signal_ends_an_agent_that_waits_for_a_quorum(job):
    agent = job.agent()
    wait_until(lambda: any(job.listed(index) for index in range(3)))
    job.stop(agent)


def test_a_lone_agent_reports_the_missing_majority(job):
    agent = job.agent(conf=",join_timeout=3")
    agent.exits(1)
    assert "2 of 3" in agent.stderr
    job.is_gone()


# --- with certificates ---


def secured(files):
    return f",protocol=https,ca_cert={files.ca},ssl_cert={files.cert},ssl_cert_key={files.key}"


def test_members_and_agents_authenticate_by_certificate(launch, tmp_path, authority):
    files = authority.issue("node")
    job = Job(launch, tmp_path, files)
    agents, _ = job.start(conf=secured(files))
    stranger = Gateway()
    for index, port in enumerate(job.ports):
        assert job.listed(index)
        with pytest.raises((OSError, GatewayError)):
            stranger.members_at(Seat("127.0.0.1", port, port + 1), 5)
    job.lose(agents.pop(0))
    round_of(agents, [2, 2])
    agents.append(job.agent(conf=secured(files)))
    workers = round_of(agents, [3, 3, 1])
    job.wait_until_up()
    job.ends(agents, workers)


NO_CONNECTION = r"127\.0\.0\.1:\d+: (.*certificate.*);.* ca_cert and ssl_cert"


def test_certificates_from_different_authorities_are_reported(launch, tmp_path, authority, other_authority):
    files = authority.issue("node")
    job = Job(launch, tmp_path, files)
    first = job.agent(conf=secured(files))
    wait_until(lambda: any(job.listed(index) for index in range(3)))
    # This agent trusts the first one's certificate, but its own is from an authority that the first one does
    # not trust.
    second = job.agent(conf=secured(other_authority.issue("other")._replace(ca=files.ca)))
    assert "issuer" in first.wait_for_line(NO_CONNECTION)[1]
    assert "rejected this node" in second.wait_for_line(NO_CONNECTION)[1]
    job.stop(first, second)


def test_a_certificate_for_another_host_is_reported(launch, tmp_path, authority):
    files = authority.issue("node", "elsewhere.example")
    job = Job(launch, tmp_path, files)
    agents = [job.agent(conf=secured(files)) for _ in range(2)]
    assert "'127.0.0.1'" in agents[1].wait_for_line(NO_CONNECTION)[1]
    job.stop(*agents)


# --- with a token ---


def test_a_token_set_on_only_some_agents_is_refused(job):
    agents, workers = job.start()
    late = job.agent(env={"ELASTICRS_TOKEN": "secret"}).exits(1)
    line_with(late.stderr, "--rdzv-id and token")
    job.ends(agents, workers)


def test_members_serve_only_clients_with_the_token(job):
    env = {"ELASTICRS_TOKEN": "secret"}
    agents, _ = job.start(env=env)

    def is_refused(gateway):
        seat = Seat("127.0.0.1", job.ports[0], job.ports[0] + 1)
        try:
            gateway.ask(seat, "kv/range", {"key": "YQ=="}, 5)
        except GatewayError:
            return True
        return False

    def refuses_other_tokens():
        # The agent fails either because its member finds members of another job, or because etcd refuses its
        # session.
        assert "token" in job.agent(env={"ELASTICRS_TOKEN": "other"}).exits(1).stderr

    assert is_refused(Gateway())
    assert is_refused(Gateway((), "wrong"))
    assert not is_refused(Gateway((), password_of("a/job", PREFIX, b"secret")))
    job.lose(agents.pop(0))
    round_of(agents, [2, 2])
    # Try a wrong token while a seat is free, and again when no seat is free.
    refuses_other_tokens()
    agents.append(job.agent(env=env))
    workers = round_of(agents, [3, 3, 1])
    job.wait_until_up()
    refuses_other_tokens()
    job.ends(agents, workers)


# --- what cannot be ---


def test_files_without_certificates_are_refused(job, tmp_path):
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


def test_an_agent_without_an_etcd_binary_names_the_package(job):
    agent = job.agent(env={"TORCHELASTIC_ETCD_BINARY_PATH": "/no/etcd"})
    refused(agent, "'/no/etcd'", "etcd-server")


@pytest.mark.parametrize("which", [0, 1], ids=["for clients", "for members"])
def test_a_port_taken_by_another_program_is_named_in_the_error(job, which):
    with socket.create_server(("127.0.0.1", job.ports[0] + which)) as other:
        agent = job.agent()
        port = other.getsockname()[1]
        refused(agent, f"127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}")
        other.close()
    job.is_gone()


def test_an_etcd_that_is_not_of_this_job_is_refused(job, etcd):
    # The agent expects an etcd member of its own job at this address.
    port = etcd.server.members[0].peers
    agent = job.agent(last=[f"localhost:{port - 1}"])
    refused(agent, "not of this job", f"localhost:{port}")
