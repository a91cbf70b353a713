"""Agents join, are refused, are fenced, or leave."""

import pytest
from helpers.said import says

from elasticrs._engine.job.phrases import local_time
from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.machine import Phase, step
from elasticrs._engine.nodes.protocol.records import decode, encode
from elasticrs._engine.nodes.transport.coordination import (
    Connected,
    ConnectionLost,
    Delete,
    DeletePrefix,
    Put,
    Txn,
)
from rendezvous import agents
from rendezvous.cluster import Cluster, end_all, ends, joined, running

NOT_OURS = "port 29400: another program"
SIGNAL = "SIGTERM on node a"


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("max_restarts", 3, 0),
        ("min_nodes", 1, 2),
        ("max_nodes", 9, 2),
        ("backend", "etcd", "c10d"),
        ("scale_up", False, True),
    ],
)
def test_a_node_whose_settings_differ_is_refused(name, theirs, ours):
    cluster, _ = joined(1, needs=2)
    b = cluster.add("b", **{name: theirs})
    text = f"node b (10.0.0.2): {name}={theirs}, but node a (10.0.0.1) started this job with {name}={ours}"
    assert b.outcome == m.Outcome("refused", text)
    assert not cluster.store.under(cluster.keys.nodes + b.member.agent.agent)


FIRST, OTHER = agents.command("train.py", "--lr=1"), agents.command("train.py", "--lr=2")


def test_a_node_whose_command_differs_is_refused():
    cluster, _ = joined(1, needs=2, command=FIRST)
    b = cluster.add("b", command=OTHER)
    ends(
        b.outcome, "refused", "node b (10.0.0.2)", "'--lr=2'", "node a (10.0.0.1)", "'--lr=1'", "same_command"
    )
    assert not cluster.store.under(cluster.keys.nodes + b.member.agent.agent)
    assert cluster.add("c").starts


def test_commands_may_differ_if_all_nodes_allow_it():
    cluster, _ = joined(1, needs=2, command=FIRST, same_command=False)
    ends(cluster.add("b", command=OTHER, same_command=True).outcome, "refused", "same_command=True")
    assert cluster.add("c", command=OTHER).starts


def test_a_job_of_another_release_is_refused():
    cluster, _ = joined(1, needs=2, command=FIRST)
    (entry,) = cluster.store.under(cluster.keys.job)
    fields = ("command", "same_command", "is_hosted", "host")
    old = {name: each for name, each in decode(entry.value).items() if name not in fields}
    old_store = Cluster(min_nodes=2, max_nodes=2, command=OTHER)
    old_store.store.apply([Put(cluster.keys.job, encode({**old, "protocol": 1}), False)], None)
    ends(old_store.add("b").outcome, "refused", "protocol=2", "protocol=1")


def test_a_second_agent_of_a_job_of_one_node_is_refused():
    cluster = Cluster(command=FIRST)
    a = cluster.add("a", hosts_store=True)
    ends(cluster.add("b").outcome, "refused", "node b (10.0.0.2)", "a (10.0.0.1)", "--rdzv-endpoint")
    a.send(m.WorkersDone())
    assert a.outcome == m.Outcome("succeeded")


def test_a_second_agent_of_a_job_of_one_node_waits_if_the_store_outlives_the_first():
    cluster = Cluster(command=FIRST)
    a = cluster.add("a")
    b = cluster.add("b")
    assert b.outcome is None
    a.kill()
    assert b.starts


def test_a_node_that_waits_learns_at_once_that_another_one_was_refused():
    cluster, (a,) = joined(1, needs=3, command=FIRST)
    cluster.add("b", command=OTHER)
    (text,) = a.texts
    says(text, "refused", "node b (10.0.0.2)", "'--lr=2'", "'--lr=1'", "--rdzv-id", "same_command=0")
    cluster.add("c", command=OTHER)
    assert a.texts == [text]
    for name in "de":
        cluster.add(name)
    assert a.starts
    assert cluster.store.get(cluster.keys.refusal) is None


def test_a_new_leader_does_not_tell_of_nodes_that_were_refused_before_the_round():
    cluster, (a, b, c) = running(3, command=FIRST)
    a.kill()
    end_all([b, c])
    assert not any("refused" in text for text in b.texts)
    cluster.add("d", command=OTHER)
    assert [text for text in b.texts if "refused" in text]


@pytest.mark.parametrize("end", ["timer", "loss", "signal"])
def test_a_refused_node_exits_if_the_store_does_not_take_its_reason(end):
    cluster, _ = joined(1, needs=2, command=FIRST)
    cluster._running = True
    b = cluster.add("b", command=OTHER)
    while "refused" not in b.timers:
        assert cluster._turn()
    assert b.outcome is None
    if end == "timer":
        b.fire("refused")
    elif end == "loss":
        b.lose()
    else:
        b.send(m.Leave("SIGTERM"))
    assert b.outcome.kind == ("left" if end == "signal" else "refused")


def launched(cluster, name, machine, launch):
    return cluster.add(name, machine=machine, launch=launch)


def started_twice(cluster):
    """Start the same command twice on the same two machines. Return the four agents."""
    return [launched(cluster, node, node, launch) for launch in ("one", "two") for node in "ab"]


def test_a_second_run_of_the_same_command_does_not_succeed_without_having_run():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    first, second = (agents := started_twice(cluster))[:2], agents[2:]
    for agent in second:
        says(
            "; ".join(agent.texts[:2]),
            "already runs",
            "round 1",
            "another launch on this machine",
            "--rdzv-endpoint",
        )
    for agent in first:
        agent.send(m.WorkersDone())
    for agent in second:
        ends(agent.outcome, "spare", "without this node", "another launch", "--rdzv-id")
        assert agent.outcome.has_failed


@pytest.mark.parametrize(("machine", "launch", "most"), [("c", "two", 2), ("a", "one", 2), ("a", "two", 3)])
def test_a_spare_succeeds(machine, launch, most):
    """A spare succeeds in three cases: it runs on another machine, it belongs to the same launch as the
    others, or the job may still grow.
    """
    cluster = Cluster(min_nodes=2, max_nodes=most, scale_up=False)
    first = [launched(cluster, node, node, "one") for node in "ab"]
    if most == 3:
        first[0].fire("last_call/0")
    spare = launched(cluster, "c", machine, launch)
    for agent in first:
        agent.send(m.WorkersDone())
    assert not spare.outcome.has_failed
    ends(spare.outcome, "spare", "without this node")


def test_a_run_that_joins_another_run_of_its_machine_is_told_so():
    cluster = Cluster(min_nodes=1, max_nodes=2)
    first = launched(cluster, "a", "a", "one")
    first.fire("last_call/0")
    second = launched(cluster, "a", "a", "two")
    says("; ".join(second.texts[:2]), "job job", "already runs", "another launch")
    lone = launched(cluster, "b", "b", "two")
    assert not any("another launch" in text for text in lone.texts)


def test_the_nodes_of_a_job_may_be_started_in_several_sessions_of_one_machine():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    agents = [launched(cluster, "a", "a", launch) for launch in ("one", "two")]
    assert [agent.texts for agent in agents] == [[], []]
    third = launched(cluster, "a", "a", "three")
    says(third.texts[1], "another launch")
    agents[0].lose()
    agents[0].send(m.GroupEnded())
    assert agents[0].member.registered is not None
    assert not agents[0].member.joining.has_twin


@pytest.mark.parametrize("value", [b"", b"{}", b"7", b"[", b'"' + b"x" * 2000 + b'"'])
def test_a_damaged_record_of_a_launch_or_a_refusal_is_ignored(value):
    cluster = Cluster(min_nodes=3, max_nodes=3)
    a = launched(cluster, "a", "a", "one")
    cluster.store.apply([Put(cluster.keys.host("b") + "x", value, False)], None)
    cluster.store.apply([Put(cluster.keys.refusal, value, False)], None)
    b = launched(cluster, "b", "b", "two")
    assert b.outcome is None
    assert not b.member.joining.has_twin
    assert not any("was refused" in text for text in a.texts)


HOSTS = {"why_hosts": "told to host the store", "hosts_store": True}


@pytest.mark.parametrize(
    ("given", "word"),
    [({"is_host": True}, "is_host=1"), ({"port": 0}, "port"), ({"host": "node1"}, "on all nodes")],
)
def test_a_host_of_the_store_that_waits_alone_names_the_likely_mistake(given, word):
    cluster = Cluster(min_nodes=2, max_nodes=2)
    a = cluster.add("a", **{**HOSTS, **given})
    a.fire("mistake/0")
    says(a.texts[-1], "store", "told to host", word)


@pytest.mark.parametrize(
    ("given", "joined"), [({"why_hosts": None}, ""), ({"host": "localhost"}, ""), ({}, "b")]
)
def test_no_mistake_is_named_if_there_may_be_none_or_another_machine_has_joined(given, joined):
    cluster = Cluster(min_nodes=3, max_nodes=3)
    a = cluster.add("a", **{**HOSTS, **given})
    for name in joined:
        cluster.add(name)
    said = list(a.texts)
    a.fire("mistake/0")
    assert a.texts == said


def test_a_node_that_waits_because_another_one_takes_part_twice_is_named():
    cluster = Cluster(min_nodes=2, max_nodes=2, scale_up=False)
    a = cluster.add("a", machine="one")
    cluster.add("a", machine="one")
    assert a.starts
    said = list(a.texts)
    cluster.add("a", machine="one")
    assert a.texts == said, "the third agent of the same machine is an ordinary spare"
    cluster.add("b", machine="two")
    says(a.texts[-1], "node a", "node b", "one launcher")
    said = list(a.texts)
    cluster.add("c", machine="three")
    assert a.texts == said


def test_a_refused_node_is_named_by_an_address_that_other_nodes_know():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    cluster.add("a", local_addr="a.test")
    for name, local in (("b", "127.0.0.1"), ("c", "::1")):
        refused = cluster.add(name, local_address=local, fallback_addr="head.test", max_restarts=3)
        ends(refused.outcome, "refused", f"node {name} (head.test)", "max_restarts=3", "node a (a.test)")


@pytest.mark.parametrize("homogeneous", [False, True])
def test_a_node_with_a_different_nproc_is_refused_only_if_homogeneous_is_set(homogeneous):
    cluster = Cluster(min_nodes=2, max_nodes=2, homogeneous=homogeneous)
    cluster.add("a", nproc=2)
    b = cluster.add("b", nproc=4)
    if homogeneous:
        ends(b.outcome, "refused", "nproc=4", "node a (10.0.0.1)", "nproc=2")
    else:
        assert b.starts


def test_a_node_that_joins_a_closed_job_is_refused():
    cluster, (a,) = running(1)
    a.send(m.WorkersDone())
    late = cluster.add("late")
    text = f"job job is closed: succeeded at {local_time(1_700_000_000 * 10**9)} in round 1;"
    text += " use a different id for another job, or fresh=1"
    assert late.outcome == m.Outcome("closed", text)


def test_the_fresh_setting_replaces_a_closed_job():
    cluster, (a,) = running(1)
    a.send(m.WorkersDone())
    late = cluster.add("late", fresh=True)
    assert late.starts[0].round == 1


def test_the_fresh_setting_discards_the_settings_of_dead_agents():
    cluster = Cluster(min_nodes=2, max_nodes=2)
    cluster.add("a").kill()
    ends(cluster.add("b", max_restarts=5).outcome, "refused", "max_restarts=0", "fresh=1")
    c = cluster.add("c", max_restarts=5, fresh=True)
    assert c.outcome is None
    assert cluster.add("d", max_restarts=5).starts


def test_an_agent_registers_again_if_the_job_was_replaced():
    cluster, (a,) = joined(1, needs=2)
    keys, store = cluster.keys, cluster.store
    job = store.get(keys.job).value.replace(b'"uuid":"', b'"uuid":"other')
    store.apply([DeletePrefix(keys.prefix), Put(keys.job, job, False)], None)
    cluster.run()
    a.fire("reconnect")
    assert a.all(m.Connect) == [m.Connect(1), m.Connect(2)]
    b = cluster.add("b")
    assert (a.starts[0].round, b.starts[0].round) == (1, 1)


def test_the_fresh_setting_does_not_affect_a_job_with_nodes():
    cluster, (a,) = running(1)
    late = cluster.add("late", fresh=True)
    assert late.outcome is None
    assert not late.starts
    assert len(a.starts) == 1


def test_a_job_continues_with_new_agents_after_all_of_its_agents_died():
    cluster, (a,) = running(1, max_restarts=2)
    a.fail()
    a.kill()
    b = cluster.add("b")
    assert (b.starts[0].round, b.starts[0].restarts) == (3, 1)


@pytest.mark.parametrize("removed", ["head", "job"])
def test_a_removed_head_or_job_record_ends_the_job(removed):
    cluster, (a, b) = running(2)
    cluster.store.apply([Delete(getattr(cluster.keys, removed))], None)
    cluster.run()
    end_all([a, b])
    for agent in (a, b):
        assert agent.all(m.Stop)[-1].fenced
        says(agent.all(m.Stop)[-1].why, "removed")
        assert agent.outcome.kind == "lost"


def test_connecting_is_retried_with_growing_delays():
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
    ends(end, "timeout", "head:29400", "5 s", "connection refused")
    assert cluster.head is None


@pytest.mark.parametrize("kind", ["version", "token", "not_ours", "run"])
def test_a_permanent_connection_error_is_not_retried(kind):
    member = agents.member("01", "a")
    step(member, m.Begin())
    _, actions = step(member, ConnectionLost(kind, NOT_OURS))
    assert m.Exit(m.Outcome("refused", NOT_OURS)) in actions


def test_a_fenced_agent_stops_its_workers_before_it_reconnects():
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


def test_an_agent_without_its_store_exits_after_store_lost_timeout():
    _, (a,) = running(1)
    a.refuses = ("refused", "connection refused")
    a.lose("closed", "connection reset")
    assert a.timers["store_lost"] == 10
    a.send(m.GroupEnded())
    assert a.outcome is None
    a.fire("store_lost")
    ends(a.outcome, "lost", "head:29400", "round 1", "10 s", "elasticrs.store")


def test_an_agent_exits_if_the_store_no_longer_has_the_job():
    cluster, (a,) = running(1)
    a.disconnect()
    cluster.store.entries.clear()
    a.send(ConnectionLost("closed", "connection reset"))
    a.send(m.GroupEnded())
    ends(a.outcome, "lost", "no longer")


def test_an_agent_gives_up_by_itself_after_its_own_time_limit():
    _, (a,) = joined(1, needs=2, join_timeout=3)
    # The limit includes the 30 s of the last call, which starts once there are enough nodes.
    assert a.timers["give_up"] == 2 * 3 + 30
    a.fire("give_up")
    assert a.outcome.kind == "timeout"


def test_the_last_call_may_be_longer_than_the_join_timeout():
    cluster, (a,) = joined(1, needs=(1, 2), join_timeout=3, last_call_timeout=10)
    assert "join/0" not in a.timers
    assert a.timers["give_up"] > a.timers["last_call/0"] == 10
    a.fire("last_call/0")
    assert (cluster.head.state, cluster.head.size) == ("RUNNING", 1)


def test_draining_a_node_ends_the_round_and_other_nodes_continue():
    cluster, (a, b) = running(2, min_nodes=1)
    b.send(m.Leave("SIGTERM"))
    assert (cluster.head.end["kind"], cluster.head.end["message"]) == ("left", "SIGTERM")
    assert b.outcome is None
    end_all([a, b])
    assert b.outcome == m.Outcome("left", "SIGTERM")
    assert (cluster.head.state, cluster.head.size, cluster.head.losses) == ("RUNNING", 1, 0)
    (stop,) = a.all(m.Stop)
    says(stop.why, "node b", "SIGTERM")
    says(a.texts[-1], "round 2", "1 node")


def test_a_drained_leader_does_not_count_as_lost():
    cluster, (a, b) = running(2, min_nodes=1, max_node_losses=0, max_restarts=1)
    b.fail(end=False)
    a.send(m.Leave("SIGTERM"))
    a.send(m.GroupEnded())
    assert a.outcome.kind == "left"
    b.send(m.GroupEnded())
    assert (cluster.head.state, cluster.head.losses) == ("RUNNING", 0)


def test_an_agent_that_cannot_connect_reports_the_cause_and_the_limit():
    member = agents.member("01", "a", host="b", join_timeout=60)
    step(member, m.Begin(), 1_700_000_000 * 10**9)
    step(member, ConnectionLost("refused", "connection refused"), 1_700_000_001 * 10**9)
    _, actions = step(member, m.TimerFired("connect_news"), 1_700_000_005 * 10**9)
    begun, end = (local_time(seconds * 10**9) for seconds in (1_700_000_000, 1_700_000_060))
    times = f"since {begun}; trying until {end} (join_timeout=60)"
    text = f"cannot reach the rendezvous store b:29400 {times}: connection refused"
    assert actions == [m.Announce(text)]


def test_connection_attempts_are_not_reported_while_connected():
    _, (a,) = running(1)
    assert "connect_news" not in a.timers
    _, actions = step(a.member, m.TimerFired("connect_news"))
    assert actions == []


def test_a_lost_connection_is_reported_with_and_without_workers():
    cluster, (a, b) = running(2)
    spare = cluster.add("z")
    b.refuses = spare.refuses = ("refused", "connection refused")
    b.lose(message="reset")
    says(b.all(m.Stop)[-1].why, "head:29400: reset")
    spare.lose(message="reset")
    says(spare.texts[-1], b.all(m.Stop)[-1].why, "again")
    says(a.all(m.Stop)[-1].why, "node b", "lost")


def test_a_member_of_an_ending_round_is_not_called_a_spare():
    _, lost = running(3)
    for agent in lost:
        agent.disconnect()
    for agent in lost:
        agent.send(ConnectionLost("closed", "reset"))
    for agent in lost:
        agent.send(m.GroupEnded())
    waiting, starts = lost[0].texts
    says(waiting, "round 1")
    assert "spare" not in waiting
    says(starts, "node a", "round 2", "3 nodes")


def test_leaving_does_not_wait_for_a_silent_store():
    _, (a,) = running(1)
    member = a.member
    _, actions = step(member, m.Leave("SIGTERM"))
    assert m.Arm("leave", 30.0) in actions
    step(member, m.GroupEnded())
    _, actions = step(member, m.TimerFired("leave"))
    assert m.Exit(m.Outcome("left", "SIGTERM")) in actions


@pytest.mark.parametrize("connected", [False, True])
def test_an_agent_can_leave_before_it_has_registered(connected):
    member = agents.member("01", "a")
    step(member, m.Begin())
    if connected:
        step(member, Connected(1, "10.0.0.1"))
    _, actions = step(member, m.Leave("SIGINT"))
    assert actions[-1] == m.Exit(m.Outcome("left", "SIGINT"))


def test_closing_ends_the_job_for_all_nodes():
    cluster, (a, b) = running(2)
    spare = cluster.add("z")
    a.send(m.Leave(SIGNAL, close=True))
    assert (cluster.head.state, cluster.head.outcome) == ("CLOSED", "aborted")
    ends(spare.outcome, "aborted", SIGNAL)
    end_all([a, b])
    assert a.outcome == b.outcome == spare.outcome


def test_a_node_that_leaves_can_close_the_job_and_waits_until_it_is_closed():
    _, (_, b) = running(2, min_nodes=1)
    b.send(m.Leave("SIGTERM"))
    b.fire("leave")
    step(b.member, m.Leave(SIGNAL, close=True))
    _, actions = step(b.member, m.GroupEnded())
    assert not any(isinstance(action, m.Exit) for action in actions)
    _, actions = step(b.member, m.TimerFired("leave"))
    ends(actions[-1].outcome, "aborted", SIGNAL)


def test_a_closed_job_stays_closed_if_the_store_exits_before_the_workers():
    _, (a, b) = running(2)
    a.send(m.Leave(SIGNAL, close=True))
    b.refuses = ("refused", "connection refused")
    b.lose(message="reset")
    assert b.outcome is None
    b.send(m.GroupEnded())
    ends(b.outcome, "aborted", SIGNAL)


def test_a_node_that_finds_no_free_port_leaves_the_job():
    member = agents.member("01", "a")
    step(member, m.Begin())
    _, actions = step(member, m.StorePortFailed("all of 29500-29510 are used"))
    ends(actions[-1].outcome, "failed", "node a", "no port", "29500-29510")


def test_an_unknown_event_raises_an_error():
    with pytest.raises(KeyError):
        step(agents.member("01", "a"), "hello")


# --- a late registration ---


def is_registration(request):
    return isinstance(request, Txn) and any(isinstance(op, Put) and op.leased for op in request.then)


def test_a_late_registration_does_not_delete_a_newer_registration():
    cluster, (agent,) = running(1)
    cluster._running = True  # disables `run`, because the test makes each turn itself
    agent.lose()
    agent.send(m.GroupEnded())
    while agent.conn is None or not any(map(is_registration, agent.conn.requests)):
        if not cluster._turn():
            agent.fire("reconnect")
    # The client has dropped the connection with its second registration. The store has not noticed, so the
    # session is still open.
    late, agent.conn = agent.conn, None
    late.open = False
    agent.send(ConnectionLost("closed", "reset"))
    agent.fire("reconnect")
    while cluster._turn():
        pass
    newest = agent.member.link.member
    assert newest.endswith("/3")
    own = [cluster.keys.node(newest), cluster.keys.slot(newest)]
    before = [cluster.store.get(key) for key in own]
    assert None not in before
    while late.requests:
        cluster.store.serve(late)
    assert [cluster.store.get(key) for key in own] == before
