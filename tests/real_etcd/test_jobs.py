"""Whole jobs that use etcd for their rendezvous: the agents run on loopback, and the workers report their
ranks.
"""

import os
import signal
from datetime import datetime, timedelta

import pytest
from helpers.etcd_fixtures import serving
from helpers.nodes import FAIL, RANKS, READY, SUCCEED, Worker, finish, rdzv
from helpers.procs import assert_gone, reap_adopted, wait_until
from helpers.said import says

from elasticrs._engine.nodes.transport.coordination import Server
from elasticrs.utils.distributed import get_socket_with_port

pytestmark = [pytest.mark.beyond_torchrun, pytest.mark.timeout(120)]

LONG = 600
"""Seconds of a lease. What follows within a test does not follow from the end of such a lease."""
FOR_GOOD = {"job", "head"}


@pytest.fixture
def agent(launch, etcd):
    """Return a function that starts an agent of the test's job, optionally with other settings."""

    def agent(*options, prefix=etcd.prefix, endpoint=etcd.endpoint, nnodes="2", **conf):
        where = rdzv("etcd", endpoint, "a/job", **{"etcd_prefix": prefix, "lease_ttl": LONG, **conf})
        return launch(*where, f"--nnodes={nnodes}", "--max-restarts=2", *options, RANKS)

    return agent


def seen(agent, number):
    """Return the ``number``-th worker that this agent has started."""
    return Worker.parse(agent.wait_for_lines(READY.pattern, number, "stdout")[-1][1])


def formed(agents, number=1):
    """Return each agent's ``number``-th worker, sorted by rank. Check that they belong to one round."""
    numbers = number if isinstance(number, list) else [number] * len(agents)
    workers = sorted((seen(*each) for each in zip(agents, numbers, strict=True)), key=lambda each: each.rank)
    assert [each.rank for each in workers] == list(range(len(agents)))
    assert {(each.world, each.master, each.port, each.round) for each in workers} == {
        (len(agents), workers[0].master, workers[0].port, workers[0].round)
    }
    return workers


def kill(workers, signum):
    for worker in workers:
        os.kill(worker.pid, signum)


def left(etcd):
    """Return the job's keys that are left in etcd, shortened to their first component."""
    found = etcd.keys()
    return {key.removeprefix("/elasticrs/a%2Fjob/").partition("/")[0] for key in found}


# --- a job ---


def test_agents_form_and_restart_together_and_leave_only_job_and_head_keys(agent, etcd):
    agents = [agent(), agent()]
    workers = formed(agents)
    assert {each.run for each in workers} == {"a/job"}
    kill(workers[1:], FAIL)
    again = formed(agents, 2)
    assert {(each.restart, each.round) for each in again} == {(1, "2")}
    finish(agents, again)
    assert left(etcd) == FOR_GOOD


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_other_agent_starts_a_new_round_at_once_when_an_agent_ends(agent, etcd, signum):
    agents = [agent(nnodes="1:2"), agent(nnodes="1:2")]
    formed(agents)
    wait_until(lambda: etcd.are_linked("elasticrs/a%2Fjob", 2, is_held=True))
    agents[0].signal(signum)
    agents[0].exits(1 if signum == signal.SIGTERM else -signum)
    (alone,) = formed(agents[1:], 2)
    assert (alone.world, alone.restart) == (1, 0)
    finish(agents[1:], [alone])
    reap_adopted()


def test_the_other_agent_starts_a_new_round_when_a_lease_expires(agent):
    # Choose a lease long enough that the other agent keeps its own on a loaded machine.
    agents = [agent(nnodes="1:2", lease_ttl=8, store_lost_timeout=60) for _ in range(2)]
    formed(agents)
    # A stopped agent is silent on all of its connections, as after a cut cable.
    agents[0].signal(signal.SIGSTOP)
    (alone,) = formed(agents[1:], 2)
    assert (alone.world, alone.restart) == (1, 0)
    agents[0].signal(signal.SIGCONT)
    both = formed(agents, [2, 3])
    assert {each.restart for each in both} == {0}
    finish(agents, both)


# --- another job with the same id ---


def test_an_agent_with_different_settings_is_refused_while_the_job_runs(agent):
    agents = [agent(), agent()]
    workers = formed(agents)
    stranger = agent("--max-restarts=9").exits(1)
    assert "max_restarts=9, but node" in stranger.stderr
    finish(agents, workers)


def test_a_used_job_id_is_refused_unless_a_node_sets_fresh(agent):
    (first,) = formed([one := agent(nnodes="1")])
    finish([one], [first])
    late = agent(nnodes="1").exits(1)
    assert "job a/job is closed: succeeded at " in late.stderr
    assert "fresh=1" in late.stderr
    anew = agent(nnodes="1", fresh=1)
    finish([anew], formed([anew]))


def test_jobs_with_different_prefixes_are_separate(agent, etcd):
    (first,) = formed([one := agent(nnodes="1")])
    other = agent(nnodes="1", prefix=f"{etcd.prefix}2")
    (second,) = formed([other])
    assert first.round == second.round == "1"
    finish([one, other], [first, second])


# --- the way to etcd ---


@pytest.fixture
def refused(launch, worker_script):
    """Check that an agent fails with a single line that contains all of these texts, and starts no
    workers.
    """

    def refused(endpoint, *says, **conf):
        where = rdzv("etcd", endpoint, **{"join_timeout": 20, **conf})
        ended = launch(*where, "--nnodes=1", worker_script("print('STARTED')")).exits(1)
        assert ended.stdout == ""
        lines = [line for line in ended.stderr.splitlines() if says[0] in line]
        assert len(lines) == 1, ended.stderr
        for each in says:
            assert each in lines[0], ended.stderr

    return refused


def test_an_endpoint_without_etcd_is_named_in_the_error(refused):
    with get_socket_with_port() as dead:
        endpoint = f"127.0.0.1:{dead.getsockname()[1]}"
        refused(endpoint, endpoint, "5 s", "refused", join_timeout=5)


def test_an_elasticrs_store_is_not_accepted_as_etcd(refused, tmp_path):
    server = Server([("127.0.0.1", 0)], run_id="job")
    try:
        refused(f"127.0.0.1:{server.port}", "elasticrs' own", "--rdzv-endpoint")
    finally:
        server.close()


TLS = "ssl_cert_key in --rdzv-conf"


def test_a_wrong_scheme_or_missing_certificate_names_the_settings(refused, etcd, etcd_tls, authority):
    refused(f"https://{etcd.endpoint}", TLS, " TLS")
    refused(etcd_tls.endpoint, TLS)
    secure, files = f"https://{etcd_tls.endpoint}", etcd_tls.server.files
    refused(secure, TLS, ssl_cert=files.cert, ssl_cert_key=files.key)
    # The connection may close before the server's TLS alert arrives, so do not check for the alert.
    refused(secure, "in --rdzv-conf", ca_cert=authority.ca, join_timeout=5)


def test_an_expired_etcd_certificate_ends_the_job_only_after_a_reconnect(agent, refused, authority, tmp_path):
    (tmp_path / "etcd").mkdir()
    files = authority.issue("etcd")
    for server in serving(tmp_path / "etcd", 1, files, "--client-cert-auth"):
        endpoint = f"https://{server.endpoint}"
        ca, cert, key = authority.issue("node")
        conf = {"ca_cert": ca, "ssl_cert": cert, "ssl_cert_key": key}
        one = agent(nnodes="1", endpoint=endpoint, lease_ttl=3, store_lost_timeout=3, **conf)
        (worker,) = formed([one])
        # etcd reads its certificate anew for each connection.
        authority.issue("etcd", not_after=datetime.now() - timedelta(days=1))
        refused(endpoint, "expired", join_timeout=1, **conf)
        # Wait until the lease would have expired if the connection had been lost.
        one.read_for(3)
        assert (one.has_exited, one.stderr) == (False, "")
        server.kill(0)
        server.bring_back(0)
        one.exits(1)
        killed, ended, last = [line for line in one.stderr.splitlines() if "lost etcd at" in line]
        assert "failed after" in last
        # The client or its user may be the first to notice that the lease has expired. Check only what their
        # messages have in common.
        says(killed, "network", "killing the workers")
        says(ended, "3 s", "expired")
        assert len(one.stdout.splitlines()) == 1
    assert_gone([worker.pid])


def test_a_job_survives_an_expired_node_certificate_that_is_renewed(agent, etcd_tls, authority, relay_to):
    ca, cert, key = authority.issue("node")
    relay = relay_to(etcd_tls.server.endpoints[0])
    conf = {"ca_cert": ca, "ssl_cert": cert, "ssl_cert_key": key}
    endpoint = f"https://127.0.0.1:{relay.endpoint[1]}"
    one = agent(nnodes="1", endpoint=endpoint, prefix=etcd_tls.prefix, **conf)
    workers = formed([one])
    authority.issue("node", not_after=datetime.now() - timedelta(days=1))
    relay.reset()
    one.wait_for_line(rf"refused .*certificate {cert} .*expired", "stderr")
    authority.issue("node")
    one.wait_for_line("again after .*", "stderr")
    finish([one], workers)
    assert len(one.stdout.splitlines()) == 1


@pytest.fixture
def password(tmp_path):
    """Return a function that writes a password to a file."""

    def password(text):
        path = tmp_path / "password"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return password


def test_an_etcd_user_needs_a_password_and_can_use_only_its_own_prefix(agent, refused, etcd_auth, password):
    user, endpoint = etcd_auth.server.user, etcd_auth.endpoint
    todo = "user and password_file in --rdzv-conf"
    refused(endpoint, todo, etcd_prefix=etcd_auth.prefix)
    wrong = {"user": user.name, "password_file": password("wrong")}
    refused(endpoint, todo, etcd_prefix=etcd_auth.prefix, **wrong)
    right = {"user": user.name, "password_file": password(user.password)}
    refused(endpoint, todo, "'/elsewhere' (etcd_prefix)", etcd_prefix="/elsewhere", **right)
    one = agent(nnodes="1", endpoint=endpoint, prefix=etcd_auth.prefix, **right)
    finish([one], formed([one]))
    assert left(etcd_auth) == FOR_GOOD


def test_a_revoked_etcd_permission_fails_the_job_and_names_the_settings(agent, etcd_auth, password):
    server, user = etcd_auth.server, etcd_auth.server.user
    conf = {"store_lost_timeout": 1, "user": user.name, "password_file": password(user.password)}
    one = agent(nnodes="1", endpoint=etcd_auth.endpoint, prefix=etcd_auth.prefix, **conf)
    (worker,) = formed([one])
    server.ask("auth/user/revoke", name=user.name, role="trainer")
    try:
        kill([worker], SUCCEED)
        one.exits(1)
    finally:
        server.ask("auth/user/grant", user=user.name, role="trainer")
    line, last = [line for line in one.stderr.splitlines() if "within 1 s" in line]
    assert "failed after" in last
    says(line, "permission denied", "user and password_file", "--rdzv-conf")
