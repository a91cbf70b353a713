"""Rounds: which workers start, what the end of a round costs, and how the job ends."""

import pytest
from helpers.said import says

from elasticrs._engine.job.restart_policy import RestartSettings
from elasticrs._engine.nodes.protocol import messages as m
from elasticrs._engine.nodes.protocol.formation import waits_for
from elasticrs._engine.nodes.protocol.records import Head
from elasticrs._engine.nodes.transport.coordination import Txn
from rendezvous.cluster import Cluster, end_all, ends, joined, running


def test_the_first_round_starts_when_max_nodes_have_joined():
    cluster, (a, b) = running(2)
    assert cluster.head.state == "RUNNING"
    (start_a,), (start_b,) = a.starts, b.starts
    assert (start_a.group_rank, start_b.group_rank) == (0, 1)
    assert (start_a.serves_store, start_b.serves_store) == (True, False)
    assert start_a.master_addr == start_b.master_addr == "10.0.0.1"
    assert start_a.master_port == start_b.master_port == a.member.listener.port
    assert (start_b.ranks.first_rank, start_b.ranks.world_size) == (1, 2)
    assert (start_b.round, start_b.restarts) == (1, 0)


def test_nodes_with_different_roles_and_sizes_get_correct_ranks():
    cluster = Cluster(min_nodes=3, max_nodes=3)
    agents = [
        cluster.add("a", role="reader", nproc=2),
        cluster.add("b", role="trainer", nproc=4),
        cluster.add("c", role="reader", nproc=1),
    ]
    ranks = [agent.starts[0].ranks for agent in agents]
    assert [each.first_rank for each in ranks] == [0, 2, 6]
    assert [each.first_role_rank for each in ranks] == [0, 0, 2]
    assert [each.role_world_size for each in ranks] == [3, 4, 3]
    assert {each.world_size for each in ranks} == {7}


def test_the_first_round_waits_for_last_call_timeout():
    _, (a, b) = joined(2, needs=(2, 4), last_call_timeout=7)
    assert not a.starts
    assert a.timers["last_call/0"] == 7
    a.fire("last_call/0")
    assert (len(a.starts), len(b.starts)) == (1, 1)


def test_a_restart_does_not_wait_for_last_call_timeout():
    _, (a,) = joined(1, needs=(1, 4), max_restarts=1)
    a.fire("last_call/0")
    a.fail()
    assert [start.restarts for start in a.starts] == [0, 1]


def test_a_failure_is_reported_before_the_workers_are_stopped():
    cluster, (a, b) = running(2, max_restarts=1)
    b.actions.clear()
    b.fail(end=False)
    assert [type(action) for action in b.actions[:2]] == [Txn, m.Stop]
    assert cluster.head.end["kind"] == "failure"
    assert a.all(m.Stop)[0].fenced is False


def test_a_failure_uses_a_restart_after_all_nodes_have_stopped():
    cluster, (a, b) = running(2, max_restarts=1)
    b.fail()
    assert cluster.head.state == "ENDED"
    a.send(m.GroupEnded())
    assert (cluster.head.state, cluster.head.used) == ("RUNNING", 1)
    assert [start.restarts for start in a.starts + b.starts] == [0, 1, 0, 1]
    for agent in (a, b):
        (line,) = agent.texts
        says(line, "round 2", "2 nodes", "1 of 1")
        says(agent.all(m.Stop)[0].why, "node b")


def test_the_exception_of_a_failure_is_reported_with_the_next_round():
    _, (a, b) = running(2, max_restarts=1)
    cause = {"node": "b", "rank": 1, "pid": 7, "exitcode": 1, "time_ns": 9}
    b.send(m.WorkerFailed(cause))
    told = {"message": "Traceback:\n  line\nValueError: boom\n", "how": ": ValueError: boom"}
    b.send(m.GroupEnded({**cause, **told}))
    a.send(m.GroupEnded())
    starts = "round 2 starts with 2 nodes (restart 1 of 1)"
    for agent in (a, b):
        says(agent.all(m.Stop)[0].why, "rank 1 (pid 7)", "node b", "code 1")
        assert agent.texts == [f"rank 1 (pid 7) on node b: ValueError: boom; {starts}"]


def test_a_node_that_reported_a_failure_is_notified_of_the_first_failure():
    _, (a, b) = running(2, max_restarts=1)
    early = {"node": "a", "rank": 0, "exitcode": 1, "time_ns": 4}
    b.send(m.WorkerFailed({"node": "b", "rank": 1, "exitcode": 1, "time_ns": 9}))
    a.send(m.GroupEnded(early))
    b.send(m.GroupEnded())
    for agent in (a, b):
        (line,) = agent.texts
        says(line, "rank 0 on node a", "round 2")


def test_a_failure_beyond_the_restart_budget_fails_the_job_with_one_cause():
    cluster, (a, b) = running(2, max_restarts=0)
    b.fail(time_ns=5)
    a.send(m.GroupEnded())
    assert a.outcome == b.outcome
    ends(a.outcome, "failed", "round 1", "max_restarts=0")
    assert a.outcome.cause == {"node": "b", "time_ns": 5, "message": "boom"}
    assert cluster.head.outcome == "failed"


def in_step_7(ground, time_ns):
    return {"time_ns": time_ns, "step": 7, "ground": ground}


@pytest.mark.parametrize(
    ("reported_by_b", "reported_by_a", "first"),
    [
        # The earliest one counts, even when its report lost the race.
        ({"time_ns": 9}, {"time_ns": 4, "message": "first"}, "a"),
        ({"time_ns": 9}, {"time_ns": 10}, "b"),
        # Of hung ranks, that of the earliest step.
        ({"time_ns": 4, "step": 8, "ground": "behind"}, in_step_7("oldest", 9), "a"),
        # In one step, that with the better ground.
        (in_step_7("oldest", 4), in_step_7("elsewhere", 9), "a"),
        (in_step_7("elsewhere", 4), in_step_7("behind", 9), "a"),
        (in_step_7("behind", 4), in_step_7("stopped", 9), "a"),
        (in_step_7("elsewhere", 4), in_step_7("oldest", 9), "b"),
        (in_step_7("oldest", 4), in_step_7("apart", 9), "a"),
        (in_step_7("oldest", 4), in_step_7("oldest", 9), "b"),
        # The same cases without step numbers.
        ({"time_ns": 4, "ground": "oldest"}, {"time_ns": 9, "ground": "elsewhere"}, "a"),
        # A step does not move the blame from an earlier failure.
        ({"time_ns": 4}, in_step_7("behind", 9), "b"),
    ],
)
def test_all_nodes_report_the_same_first_failure_cause(reported_by_b, reported_by_a, first):
    _, (a, b) = running(2, max_restarts=0)
    b.fail(**reported_by_b)
    a.send(m.GroupEnded({"node": "a", **reported_by_a}))
    assert a.outcome.cause["node"] == b.outcome.cause["node"] == first


def test_a_node_stopped_for_a_hang_elsewhere_gets_the_hang_duration():
    _, (a, b) = running(2, max_restarts=1)
    hung = {"node": "b", "rank": 1, "pid": 7, "exitcode": -9, **in_step_7("oldest", 9), "silence": 61.5}
    told = "hung: no heartbeat for 61.5 s (limit 60 s)"
    b.send(m.WorkerFailed({**hung, "message": told, "how": f": {told}"}))
    (stop,) = a.all(m.Stop)
    assert (stop.hung["silence"], stop.hung["step"]) == (61.5, 7)
    assert stop.why == "rank 1 (pid 7) on node b: hung: no heartbeat for 61.5 s (limit 60 s)"
    # The hung worker's node gets the same data, because it must keep running until the other nodes have
    # collected their evidence.
    assert b.all(m.Stop)[0].hung["silence"] == 61.5


def test_a_crash_starts_no_search_for_hung_workers():
    _, (a, b) = running(2, max_restarts=1)
    b.send(m.WorkerFailed({"node": "b", "rank": 1, "exitcode": 1, "time_ns": 9, "silence": 5.0}))
    assert a.all(m.Stop)[0].hung is None


def test_failure_details_that_arrive_later_are_reported():
    _, (a, b) = running(2, max_restarts=0)
    b.fail(time_ns=9, end=False)
    a.send(m.GroupEnded())
    b.send(m.GroupEnded({"node": "b", "time_ns": 9, "message": "RuntimeError", "lines": ["last"]}))
    assert a.outcome.cause["lines"] == ["last"]


def test_a_node_loss_uses_no_restart_even_if_a_failure_is_reported_first():
    cluster, (a, b) = running(2, min_nodes=1, max_restarts=0)
    a.fail()
    b.kill()
    assert (cluster.head.state, cluster.head.used, cluster.head.size) == ("RUNNING", 0, 1)


def test_a_failure_after_a_finished_node_has_left_uses_a_restart():
    cluster, (a, b) = running(2, min_nodes=1, max_restarts=1)
    b.send(m.WorkersDone())
    b.fire("barrier")
    a.fail()
    assert b.outcome.kind == "succeeded"
    assert (cluster.head.round, cluster.head.used) == (2, 1)


def test_the_next_node_becomes_leader_if_the_leader_is_lost():
    cluster, (a, b, c) = running(3, min_nodes=2)
    a.kill()
    end_all([b, c])
    assert (cluster.head.round, cluster.head.size) == (2, 2)
    assert [b.starts[-1].group_rank, c.starts[-1].group_rank] == [0, 1]
    assert b.starts[-1].serves_store


def test_a_spare_replaces_a_lost_node_and_other_nodes_keep_their_ranks():
    cluster, (a, b, c) = running(3)
    spare = cluster.add("z")
    assert not spare.starts
    assert spare.outcome is None
    assert any("spare" in text for text in spare.texts)
    b.kill()
    end_all([a, c])
    assert [agent.starts[-1].group_rank for agent in (a, spare, c)] == [0, 1, 2]


def test_a_waiting_node_ends_the_round_after_scale_up_delay():
    cluster, (a,) = joined(1, needs=(1, 2), scale_up_delay=3)
    a.fire("last_call/0")
    b = cluster.add("b")
    assert a.timers["scale/1"] == 3
    a.fire("scale/1")
    assert cluster.head.end["kind"] == "scale"
    a.send(m.GroupEnded())
    assert (len(b.starts), a.starts[-1].ranks.group_world_size) == (1, 2)


def test_a_requested_round_uses_no_restart_and_includes_all_nodes():
    cluster, (a, b) = running(2, min_nodes=1, max_short_losses=1)
    b.send(m.AskForRound("a checkpoint"))
    b.send(m.AskForRound("a checkpoint"))
    assert (cluster.head.end["kind"], cluster.head.end["node"]) == ("asked", "b")
    for agent in (a, b):
        (stop,) = agent.all(m.Stop)
        assert stop.planned
        says(stop.why, "node b", "a checkpoint")
        agent.send(m.GroupEnded())
    assert (cluster.head.state, cluster.head.round, cluster.head.used) == ("RUNNING", 2, 0)
    assert [agent.starts[-1].group_rank for agent in (a, b)] == [0, 1]


def test_a_round_request_is_ignored_while_no_round_runs():
    cluster, (a, _) = running(2)
    a.fail()
    before = cluster.head
    a.send(m.AskForRound("a checkpoint"))
    assert cluster.head == before


def test_scale_up_does_not_happen_if_disabled_or_if_a_node_has_finished():
    cluster, (a,) = joined(1, needs=(1, 2), scale_up=False)
    a.fire("last_call/0")
    cluster.add("b")
    assert "scale/1" not in a.timers
    cluster, (a, b) = running(2, max_nodes=3)
    a.fire("last_call/0")
    b.send(m.WorkersDone())
    cluster.add("c")
    assert "scale/1" not in a.timers


def test_a_restart_waits_restart_call_timeout_for_a_replacement_node():
    cluster, (a, b) = running(2, min_nodes=1, restart_call_timeout=9)
    b.kill()
    a.send(m.GroupEnded())
    assert a.timers["restart_call/1"] == 9
    c = cluster.add("c")
    assert c.starts[-1].ranks.group_world_size == 2


def test_a_restart_waits_for_a_slow_node_until_the_settle_timeout():
    cluster, (a, b) = running(2, min_nodes=1, max_restarts=1)
    a.fail()
    assert cluster.head.state == "ENDED"
    a.fire("settle/1")
    assert (cluster.head.round, cluster.head.size, cluster.head.used) == (2, 1, 1)
    b.send(m.GroupEnded())
    assert "scale/2" in a.timers


def test_a_failure_on_another_node_restarts_a_finished_node():
    _, (a, b) = running(2, max_restarts=1)
    a.send(m.WorkersDone())
    b.fail()
    assert [start.round for start in a.starts] == [1, 2]


def test_a_finished_node_that_dies_does_not_count_as_lost():
    cluster, (a, b) = running(2)
    b.send(m.WorkersDone())
    b.kill()
    assert cluster.head.state == "RUNNING"
    a.send(m.WorkersDone())
    assert a.outcome.kind == "succeeded"


def test_rank_0_and_the_store_host_stay_until_all_nodes_are_done():
    cluster = Cluster(min_nodes=3, max_nodes=3)
    first, _, other = cluster.add("a"), cluster.add("b"), cluster.add("c")
    other.send(m.WorkersDone())
    assert "barrier" in other.timers
    first.send(m.WorkersDone())
    assert "barrier" not in first.timers
    cluster = Cluster(min_nodes=3, max_nodes=3)
    _, host, _ = cluster.add("a"), cluster.add("b", hosts_store=True), cluster.add("c")
    host.send(m.WorkersDone())
    assert "barrier" not in host.timers
    cluster = Cluster(min_nodes=2, max_nodes=2)
    other, late = cluster.add("a"), cluster.add("b", begin=m.StoreHosted("b.test"))
    assert (late.member.agent.fallback_addr, other.member.agent.fallback_addr) == ("b.test", None)
    late.send(m.WorkersDone())
    assert "barrier" not in late.timers


def test_a_transient_start_failure_is_retried_without_using_a_restart():
    cluster, (a, b) = running(2, max_restarts=0)
    for attempt in range(4):
        assert cluster.head.round == attempt + 1
        b.send(m.StartFailed("no memory", transient=True))
        a.send(m.GroupEnded())
    assert b.outcome.kind == "failed"
    ends(a.outcome, "failed", "node b", "no memory")


def test_a_permanent_start_failure_fails_the_job_immediately():
    _, (a, b) = running(2, max_restarts=3)
    b.send(m.StartFailed("missing: train.py"))
    a.send(m.GroupEnded())
    ends(a.outcome, "failed", "node b", "missing: train.py")


def test_more_lost_nodes_than_max_node_losses_end_the_job():
    _, (a, b, c) = running(3, min_nodes=1, max_node_losses=0)
    c.kill()
    end_all([a, b])
    assert a.outcome.message == "lost 1 node (max_node_losses=0), last: c"
    assert a.outcome.is_explained


def test_of_several_agents_on_a_host_the_lost_one_is_named_with_its_group_rank():
    cluster = Cluster(min_nodes=1, max_nodes=3, max_node_losses=0)
    agents = [cluster.add(name) for name in ("a", "a", "b")]
    agents[1].kill()
    end_all([agents[0], agents[2]])
    (told,) = (each.why for each in agents[2].all(m.Stop))
    assert told == "node a:1 was lost"
    assert agents[0].outcome.message == "lost 1 node (max_node_losses=0), last: a:1"


def test_a_loss_that_ends_the_job_explains_a_failure_that_was_reported_before():
    _, (a, b, c) = running(3, min_nodes=1, max_node_losses=0)
    b.fail(end=False)
    c.kill()
    end_all([a, b])
    assert (a.outcome.kind, a.outcome.is_explained) == ("failed", True)


def test_no_loss_explains_failures_that_used_up_the_restarts():
    _, (a, b) = running(2, max_restarts=0)
    b.fail(end=False)
    end_all([a, b])
    assert (a.outcome.kind, a.outcome.is_explained) == ("failed", False)


@pytest.mark.parametrize("is_long", [False, True])
def test_consecutive_short_rounds_ended_by_node_losses_end_the_job(is_long):
    cluster, (a, b) = running(2, min_nodes=1, max_short_losses=2, scale_up_delay=0)
    b.kill()
    a.send(m.GroupEnded())
    c = cluster.add("c")
    a.fire("scale/2")
    a.send(m.GroupEnded())
    assert len(c.starts) == 1
    if is_long:
        a.fire("round_age")
    c.kill()
    a.send(m.GroupEnded())
    if is_long:
        assert cluster.head.state == "RUNNING"
    else:
        ends(a.outcome, "failed", "2 rounds", "60 s", "last: c")


def test_too_few_nodes_at_the_join_timeout_end_the_job():
    _, (a, b) = joined(2, needs=3, join_timeout=600)
    a.fire("join/0")
    assert b.outcome == a.outcome
    assert a.outcome == m.Outcome(
        "timeout", "only 2 of at least 3 nodes joined within 600 s (join_timeout): a (10.0.0.1), b (10.0.0.2)"
    )


def test_a_join_timeout_after_a_node_loss_names_the_lost_node():
    _, (a, b, c) = running(3)
    c.kill()
    end_all([a, b])
    a.fire("join/1")
    ends(a.outcome, "timeout", "a (10.0.0.1)", "b (10.0.0.2)", "round 1: c")


def test_the_waiting_message_names_the_nodes_that_have_joined():
    cluster, (a,) = joined(1, needs=3)
    cluster.add("b")
    a.fire("waiting/0")
    (text,) = a.texts
    says(text, "2", "3", "joined: a, b (join_timeout: 600 s)")


def test_the_waiting_message_is_repeated_after_a_node_loss():
    cluster, (a, b) = joined(2, needs=3)
    a.fire("waiting/0")
    c = cluster.add("c")
    c.kill()
    end_all([a, b])
    a.fire("waiting/1")
    told = [text for text in a.texts if text.startswith("waiting for nodes: 2 of at least 3 have joined")]
    assert len(told) == 2


def test_each_node_knows_what_it_waits_for_and_the_leader_which_nodes_have_joined():
    cluster, (a, b) = joined(2, needs=(3, 4))
    joins = "1 more node; 2 of at least 3 have joined: a, b", "join/0"
    assert (waits_for(a.member), waits_for(b.member)) == (joins, ("at least 3 nodes", "give_up"))
    c = cluster.add("c")
    says(waits_for(a.member)[0], "up to 1 more node; 3 have joined: a, ")
    assert waits_for(a.member)[1] in a.timers
    d = cluster.add("d")
    assert [waits_for(each.member) for each in (a, b, c, d)] == [None] * 4
    d.kill()
    c.kill()
    a.send(m.GroupEnded())
    assert waits_for(a.member) == ("the end of all workers on b (10.0.0.2)", "settle/1")
    b.send(m.GroupEnded())
    says(waits_for(a.member)[0], "1 more node; 2 of at least 3")
    b.refuses = ("refused", "nobody listens")
    b.lose()
    assert waits_for(b.member) == (
        "a connection to the rendezvous store head:29400 (nobody listens)",
        "store_lost",
    )


def test_each_node_knows_that_it_waits_for_the_restart_delay():
    _, (a, b) = running(2, max_restarts=1, restart_delay=90)
    a.fail()
    b.send(m.GroupEnded())
    assert waits_for(a.member) == ("the end of the restart delay", "delay/1")
    what, timer = waits_for(b.member)
    says(what, "restart delay of 1 min", "at least 2 nodes")
    assert timer == "give_up"


def test_the_last_call_is_reported_immediately_with_its_time_limit():
    cluster, (a,) = joined(1, needs=(2, 4))
    b = cluster.add("b")
    (text,) = a.texts
    says(text, "2 of", "4 nodes", "joined: a, b; ", "30 s")
    cluster.add("c")
    assert len(a.texts) == 1
    assert b.texts == []


def test_rank_0_opens_a_new_port_each_round_and_other_nodes_keep_theirs():
    _, (a, b) = running(2, max_restarts=1)
    first, kept = a.member.listener.port, b.member.listener.port
    a.fail()
    b.send(m.GroupEnded())
    assert a.starts[-1].master_port == a.member.listener.port != first
    assert b.member.listener.port == kept
    assert len(a.all(m.CloseStore)) == 1
    assert not b.all(m.CloseStore)


def test_the_loss_of_the_nursery_process_counts_as_a_worker_failure():
    cluster, (a,) = running(1, max_restarts=1)
    a.send(m.GroupEnded())
    assert (cluster.head.round, cluster.head.used) == (2, 1)


def test_a_node_with_stuck_workers_leaves_the_job():
    cluster, (a, b) = running(2, min_nodes=1, max_restarts=1)
    b.fail(end=False)
    b.send(m.GroupEnded(stuck="local rank(s) 0"))
    assert b.outcome.kind == "stuck"
    a.send(m.GroupEnded())
    assert cluster.head.state == "RUNNING"
    assert isinstance(cluster.head, Head)
    assert a.starts[-1].ranks.group_world_size == 1


def test_no_agent_gives_up_during_a_restart_delay():
    policy = RestartSettings(3, first_delay=3600.0, longest_delay=7200.0)
    _, agents = running(2, policy=policy, join_timeout=10)
    a, b = agents
    b.fail()
    a.send(m.GroupEnded())
    assert 1800 <= a.timers["delay/1"] <= 3600
    for agent in agents:
        assert [text for text in agent.texts if "(restart delay)" in text] == [agent.texts[-1]]
    assert min(agent.timers["give_up"] for agent in agents) > 2 * 3600
    a.fire("delay/1")
    assert [start.restarts for start in b.starts] == [0, 1]


def in_a_restart_delay():
    """Return a job of three nodes that waits for the restart delay after a failure on the second node."""
    policy = RestartSettings(3, first_delay=100.0, longest_delay=100.0)
    cluster, agents = running(3, min_nodes=2, policy=policy)
    agents[1].fail()
    end_all((agents[0], agents[2]))
    return cluster, agents


def test_a_failure_uses_a_restart_even_if_a_node_is_lost_during_the_delay():
    cluster, (a, b, c) = in_a_restart_delay()
    c.kill()
    assert cluster.head.state == "ENDED"
    a.fire("delay/1")
    assert (cluster.head.state, cluster.head.used, cluster.head.size) == ("RUNNING", 1, 2)
    assert [start.restarts for start in b.starts] == [0, 1]


def test_a_new_leader_does_not_count_a_failure_again_during_the_delay():
    cluster, (a, b, c) = in_a_restart_delay()
    a.kill()
    assert (cluster.head.state, cluster.head.used) == ("ENDED", 1)
    b.fire("delay/1")
    assert (cluster.head.state, cluster.head.used, cluster.head.size) == ("RUNNING", 1, 2)
    for agent in (b, c):
        assert [start.restarts for start in agent.starts] == [0, 1]
        assert agent.starts[-1].delay == cluster.head.delay > 0
        assert sum("(restart delay)" in text for text in agent.texts) == 1


def test_the_restart_message_names_the_window_instead_of_restarts_left():
    policy = RestartSettings(1, window=60.0)
    cluster, (a, b) = running(2, policy=policy)
    for _ in range(2):
        cluster.now += 3600 * 10**9
        b.fail()
        a.send(m.GroupEnded())
    assert cluster.head.used == 2
    assert "(restart 2, at most 1 in 1 min 0 s)" in b.texts[-1]
