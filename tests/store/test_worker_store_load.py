"""Many clients at once, and whole process groups, on the workers' store."""

import pytest

pytestmark = pytest.mark.torch


def mixed(fork, store, clients, operations):
    workers = fork(clients)
    for worker in workers:
        worker.ask("connect", store.port, {})
    for number, worker in enumerate(workers):
        worker.begin("mixed", number, operations, number)
    added = sum(worker.result(240.0) for worker in workers)
    assert added > 0
    assert workers[0].call("add", "shared", 0) == added


def test_many_clients_get_what_a_model_says(fork, store):
    mixed(fork, store, 16, 500)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_64_clients_do_10000_operations_each(fork, store):
    mixed(fork, store, 64, 10_000)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_process_group_forms(fork, store, size):
    ranks = fork(size)
    for number, rank in enumerate(ranks):
        rank.begin("process_group", number, size, store.port)
    for rank in ranks:
        assert rank.result() == [{"rank": number} for number in range(size)]
    assert store.take_notices() == []
