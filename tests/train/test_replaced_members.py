"""A replacement process does not wait until its predecessor's lease expires."""

import pytest

from elasticrs._engine.nodes.describe import describe
from elasticrs._engine.nodes.transport.coordination import Server
from elasticrs.rendezvous.elastic_handler import ElasticRendezvousHandler


@pytest.fixture
def handler():
    """Return a function that makes members of a job of one worker, which use the same store."""
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
