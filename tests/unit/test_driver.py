"""The driver of a rendezvous, which connects the state machine to the store."""

from rendezvous.store import Entry

from elasticrs._engine.nodes.driver import Timers, drop_stale
from elasticrs._engine.nodes.protocol.records import Head
from elasticrs._engine.nodes.transport.coordination import Changes, ConnectionLost, Reply

HEAD = "/elasticrs/job/head"
LOST = ConnectionLost("closed", "the store has gone")


def head(state, revision, **more):
    return Changes(revision, [Entry(HEAD, Head(state, 1, **more).encode(), 1, revision)])


def test_no_event_is_dropped_without_a_connection_loss():
    events = [head("RUNNING", 2), Reply(1, True, 3)]
    assert drop_stale(events, HEAD) == events
    assert drop_stale([], HEAD) == []


def test_events_before_a_connection_loss_are_dropped():
    assert drop_stale([Reply(1, True, 2), head("RUNNING", 3), LOST], HEAD) == [LOST]


def test_the_end_of_the_job_is_kept_despite_a_connection_loss():
    closed = head("CLOSED", 4, outcome="succeeded")
    assert drop_stale([head("ENDED", 3), closed, LOST], HEAD) == [closed, LOST]


def test_only_a_closed_head_record_counts_as_the_end_of_the_job():
    other = Changes(2, [Entry("/elasticrs/job/slot/a/1", b"{}", 2, 2)])
    deleted = Changes(3, [Entry(HEAD, None, 1, 3)])
    assert drop_stale([other, deleted, LOST], HEAD) == [LOST]


def test_due_timers_are_returned_once_in_order_of_their_deadlines():
    timers = Timers()
    assert timers.seconds_left(7.0) == 7.0
    timers.arm("late", 3600)
    timers.arm("second", -1)
    timers.arm("first", -2)
    timers.arm("gone", -3)
    timers.disarm("gone")
    timers.disarm("never there")
    assert timers.seconds_left(7.0) == 0.0
    assert timers.take_due() == ["first", "second"]
    assert timers.take_due() == []
    assert 3500 < timers.seconds_left(1e9) <= 3600


def test_a_rearmed_timer_has_the_new_deadline():
    timers = Timers()
    timers.arm("one", -1)
    timers.arm("one", 3600)
    assert timers.take_due() == []
