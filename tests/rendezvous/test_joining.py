"""Joining, being refused, being fenced, leaving."""

import pytest

from elasticrs.rendezvous.elastic import messages as m
from elasticrs.rendezvous.elastic.machine import Phase, step
from elasticrs.store.coordination import Connected, ConnectionLost, Delete, DeletePrefix, Put
from rendezvous import agents
from rendezvous.cluster import Cluster, end_all, running


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ({"max_restarts": 3}, "max_restarts=3, but node a (10.0.0.1) started this job with max_restarts=0"),
        ({"min_nodes": 1}, "min_nodes=1, but node a (10.0.0.1) started this job with min_nodes=2"),
        ({"max_nodes": 9}, "max_nodes=9, but node a (10.0.0.1) started this job with max_nodes=2"),
        ({"backend": "etcd"}, "backend=etcd, but node a (10.0.0.1) started this job with backend=c10d"),
        ({"scale_up": False}, "scale_up=False, but node a (10.0.0.1) started this job with scale_up=True"),
    ],
)
def test_settings_that_differ_are_refused_by_name(differs, text):
    cluster = Cluster(min_nodes=2, max_nodes=2)
    cluster.add("a")
    b = cluster.add("b", **differs)
    assert b.outcome == m.Outcome("refused", f"node b (10.0.0.2): {text}")
    assert not cluster.store.under(cluster.keys.nodes + b.member.agent.agent)


def test_whose_settings_differ_is_named_as_others_know_it():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    cluster.add("a", local_addr="a.test")
    for name, local in (("b", "127.0.0.1"), ("c", "::1")):
        refused = cluster.add(name, local_address=local, fallback_addr="head.test", max_restarts=3)
        expected = f"node {name} (head.test): max_restarts=3, but node a (a.test) started this job with"
        assert refused.outcome.message.startswith(expected)


@pytest.mark.parametrize("homogeneous", [False, True])
def test_different_nodes_are_refused_only_when_asked_for(homogeneous):
    cluster = Cluster(min_nodes=2, max_nodes=2, homogeneous=homogeneous)
    cluster.add("a", nproc=2)
    b = cluster.add("b", nproc=4)
    if homogeneous:
        assert "nproc=4, but node a (10.0.0.1) started this job with nproc=2" in b.outcome.message
    else:
        assert b.starts


def test_a_closed_job_says_so():
    cluster, (a,) = running(1)
    a.send(m.WorkersDone())
    late = cluster.add("late")
    text = "job job is closed: succeeded at 2023-11-14 22:13:20 UTC in round 1;"
    text += " use a different id for another job, or fresh=1"
    assert late.outcome == m.Outcome("closed", text)


def test_a_fresh_job_forgets_the_closed_one():
    cluster, (a,) = running(1)
    a.send(m.WorkersDone())
    late = cluster.add("late", fresh=True)
    assert late.starts[0].round == 1


def test_a_fresh_job_forgets_settings_that_nobody_has_any_more():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    cluster.add("a").kill()
    refused = cluster.add("b", max_restarts=5).outcome
    assert refused.kind == "refused"
    assert refused.message.endswith(
        "max_restarts=0; no agent of that job is there: if it is over, use a different id, or fresh=1"
    )
    c = cluster.add("c", max_restarts=5, fresh=True)
    assert c.outcome is None
    assert cluster.add("d", max_restarts=5).starts


def test_who_registered_while_the_job_was_started_anew_comes_again():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    a = cluster.add("a")
    keys, store = cluster.keys, cluster.store
    job = store.get(keys.job).value.replace(b'"uuid":"', b'"uuid":"other')
    store.apply([DeletePrefix(keys.prefix), Put(keys.job, job, False)], None)
    cluster.run()
    a.fire("reconnect")
    assert a.all(m.Connect) == [m.Connect(1), m.Connect(2)]
    b = cluster.add("b")
    assert (a.starts[0].round, b.starts[0].round) == (1, 1)


def test_fresh_does_not_touch_a_job_with_nodes():
    cluster, (a,) = running(1)
    late = cluster.add("late", fresh=True)
    assert late.outcome is None
    assert not late.starts
    assert len(a.starts) == 1


def test_a_job_whose_agents_have_died_goes_on():
    cluster, (a,) = running(1, max_restarts=2)
    a.fail()
    a.kill()
    b = cluster.add("b")
    assert (b.starts[0].round, b.starts[0].restarts) == (3, 1)


@pytest.mark.parametrize("removed", ["head", "job"])
def test_a_record_that_somebody_removes_ends_the_job(removed):
    cluster, (a, b) = running(2)
    cluster.store.apply([Delete(getattr(cluster.keys, removed))], None)
    cluster.run()
    end_all([a, b])
    for agent in (a, b):
        assert agent.all(m.Stop)[-1].fenced
        assert agent.all(m.Stop)[-1].why.endswith("of this job was removed")
        assert agent.outcome.kind == "lost"


def test_connecting_is_tried_again_with_growing_delays():
    cluster = Cluster()
    member = agents.member("01", "a", join_timeout=5)
    delays = []
    step(member, m.Begin())
    for _ in range(7):
        _, actions = step(member, ConnectionLost("refused", "connection refused"))
        (arm,) = [each for each in actions if isinstance(each, m.Arm)]
        delays.append(arm.seconds)
        assert m.Connect(1) in step(member, m.TimerFired("reconnect"))[1]
    assert delays == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]
    _, actions = step(member, m.TimerFired("connect"))
    (end,) = [each.outcome for each in actions if isinstance(each, m.Exit)]
    assert end == m.Outcome(
        "timeout", "could not join the rendezvous at head:29400 within 5 s: connection refused"
    )
    assert cluster.head is None


@pytest.mark.parametrize("kind", ["version", "token", "not_ours", "run"])
def test_what_waiting_does_not_cure_is_final(kind):
    member = agents.member("01", "a")
    step(member, m.Begin())
    _, actions = step(member, ConnectionLost(kind, "port 29400 is used by another program"))
    assert m.Exit(m.Outcome("refused", "port 29400 is used by another program")) in actions


def test_a_fenced_agent_kills_its_workers_before_it_comes_back():
    cluster, (a, b) = running(2, min_nodes=1)
    b.lose()
    assert b.member.phase is Phase.FENCED
    assert b.all(m.Stop)[-1].fenced
    assert b.all(m.Connect) == [m.Connect(1)]
    a.send(m.GroupEnded())
    assert cluster.head.size == 1
    b.send(m.GroupEnded())
    assert b.all(m.Connect) == [m.Connect(1), m.Connect(2)]
    assert b.member.registered
    a.fire("scale/2")
    a.send(m.GroupEnded())
    assert (a.starts[-1].group_rank, b.starts[-1].group_rank) == (0, 1)


def test_who_comes_back_keeps_its_place():
    _, (a, b, c) = running(3)
    b.lose()
    for agent in (a, c, b):
        agent.send(m.GroupEnded())
    assert [agent.starts[-1].group_rank for agent in (a, b, c)] == [0, 1, 2]


def test_a_lost_store_ends_the_agent_after_a_while():
    _, (a,) = running(1)
    a.refuses = ("refused", "connection refused")
    a.lose("closed", "connection reset")
    assert a.timers["store_lost"] == 10
    a.send(m.GroupEnded())
    assert a.outcome is None
    a.fire("store_lost")
    assert a.outcome.kind == "lost"
    assert a.outcome.message.startswith(
        "lost the rendezvous store head:29400 in round 1 and could not reach it again within 10 s"
    )
    assert "python -m elasticrs.store" in a.outcome.message


def test_a_store_that_was_started_anew_is_not_ours():
    cluster, (a,) = running(1)
    a.disconnect()
    cluster.store.entries.clear()
    a.send(ConnectionLost("closed", "connection reset"))
    a.send(m.GroupEnded())
    assert a.outcome.kind == "lost"
    assert "no longer knows this job" in a.outcome.message


def test_an_agent_gives_up_alone():
    cluster = Cluster(min_nodes=2, max_nodes=2, join_timeout=3)
    a = cluster.add("a")
    assert a.timers["give_up"] == 2 * 3 + 30, "the last call comes after the time for enough nodes"
    a.fire("give_up")
    assert a.outcome.kind == "timeout"


def test_a_last_call_may_be_longer_than_the_time_to_join():
    cluster = Cluster(min_nodes=1, max_nodes=2, join_timeout=3, last_call_timeout=10)
    a = cluster.add("a")
    assert "join/0" not in a.timers, "enough nodes are there"
    assert a.timers["give_up"] > a.timers["last_call/0"] == 10
    a.fire("last_call/0")
    assert (cluster.head.state, cluster.head.size) == ("RUNNING", 1)


def test_draining_one_node_ends_the_round_at_once_and_the_others_go_on():
    cluster, (a, b) = running(2, min_nodes=1)
    b.send(m.Leave("SIGTERM"))
    assert (cluster.head.end["kind"], cluster.head.end["message"]) == ("left", "SIGTERM")
    assert b.outcome is None
    a.send(m.GroupEnded())
    b.send(m.GroupEnded())
    assert b.outcome == m.Outcome("left", "SIGTERM")
    assert (cluster.head.state, cluster.head.size, cluster.head.losses) == ("RUNNING", 1, 0)
    assert [stop.why for stop in a.all(m.Stop)] == ["node b left (SIGTERM)"]
    assert a.texts[-1].startswith("round 2 starts with 1 node (no restart charged")


def test_a_drained_node_is_not_lost_whoever_leads():
    cluster, (a, b) = running(2, min_nodes=1, max_node_losses=0, max_restarts=1)
    b.fail(end=False)
    a.send(m.Leave("SIGTERM"))
    a.send(m.GroupEnded())
    assert a.outcome.kind == "left"
    b.send(m.GroupEnded())
    assert (cluster.head.state, cluster.head.losses) == ("RUNNING", 0)


def test_who_cannot_connect_is_told_why_and_that_it_is_tried_again():
    member = agents.member("01", "a", host="b", join_timeout=60)
    step(member, m.Begin(), 1_700_000_000 * 10**9)
    step(member, ConnectionLost("refused", "connection refused"), 1_700_000_001 * 10**9)
    _, actions = step(member, m.TimerFired("connect_news"), 1_700_000_005 * 10**9)
    times = "since 2023-11-14 22:13:20 UTC; trying until 2023-11-14 22:14:20 UTC (join_timeout=60)"
    text = f"cannot reach the rendezvous store b:29400 {times}: connection refused"
    assert actions == [m.Announce(text)]


def test_no_news_of_connecting_when_there_is_a_connection():
    _, (a,) = running(1)
    assert "connect_news" not in a.timers
    _, actions = step(a.member, m.TimerFired("connect_news"))
    assert actions == []


def test_a_lost_connection_is_told_of_with_and_without_workers():
    cluster, (a, b) = running(2)
    spare = cluster.add("z")
    b.refuses = spare.refuses = ("refused", "connection refused")
    b.lose(message="reset")
    assert b.all(m.Stop)[-1].why == "lost the rendezvous store head:29400: reset"
    spare.lose(message="reset")
    assert spare.texts[-1] == "lost the rendezvous store head:29400: reset; trying to join again"
    assert a.all(m.Stop)[-1].why == "node b was lost"


def test_who_was_in_the_round_that_is_about_to_end_is_no_spare():
    _, lost = running(3)
    for agent in lost:
        agent.disconnect()
    for agent in lost:
        agent.send(ConnectionLost("closed", "reset"))
    for agent in lost:
        agent.send(m.GroupEnded())
    assert lost[0].texts == [
        "waiting for the end of round 1, of which this node was before it was lost",
        "node a was lost; round 2 starts with 3 nodes (no restart charged, 0 of 0 used)",
    ]


def test_leaving_does_not_wait_for_a_silent_store():
    _, (a,) = running(1)
    member = a.member
    _, actions = step(member, m.Leave("SIGTERM"))
    assert m.Arm("leave", 30.0) in actions
    step(member, m.GroupEnded())
    _, actions = step(member, m.TimerFired("leave"))
    assert m.Exit(m.Outcome("left", "SIGTERM")) in actions


@pytest.mark.parametrize("connected", [False, True])
def test_leaving_before_there_is_anything(connected):
    member = agents.member("01", "a")
    step(member, m.Begin())
    if connected:
        step(member, Connected(1, "10.0.0.1"))
    _, actions = step(member, m.Leave("SIGINT"))
    assert actions[-1] == m.Exit(m.Outcome("left", "SIGINT"))


def test_closing_ends_the_job_for_all():
    cluster, (a, b) = running(2)
    spare = cluster.add("z")
    a.send(m.Leave("SIGTERM on the host of the store", close=True))
    assert (cluster.head.state, cluster.head.outcome) == ("CLOSED", "aborted")
    assert spare.outcome == m.Outcome("aborted", "the job was ended: SIGTERM on the host of the store")
    a.send(m.GroupEnded())
    b.send(m.GroupEnded())
    assert a.outcome == b.outcome == spare.outcome


def test_a_closed_job_stays_closed_when_the_store_goes_before_the_workers_have_stopped():
    _, (a, b) = running(2)
    a.send(m.Leave("SIGTERM on the host of the store", close=True))
    b.refuses = ("refused", "connection refused")
    b.lose(message="reset")
    assert b.outcome is None
    b.send(m.GroupEnded())
    assert b.outcome == m.Outcome("aborted", "the job was ended: SIGTERM on the host of the store")


def test_a_node_without_a_port_leaves():
    member = agents.member("01", "a")
    step(member, m.Begin())
    _, actions = step(member, m.StorePortFailed("all of 29500-29510 are used"))
    text = "node a: no port for the workers' store: all of 29500-29510 are used"
    assert actions[-1] == m.Exit(m.Outcome("failed", text))


def test_an_unknown_event_is_an_error():
    with pytest.raises(TypeError):
        step(agents.member("01", "a"), "hello")
