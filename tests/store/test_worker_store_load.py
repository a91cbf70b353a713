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


def test_16_clients_get_the_results_of_a_reference_model(fork, store):
    mixed(fork, store, 16, 500)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_64_clients_with_10000_operations_match_the_reference_model(fork, store):
    mixed(fork, store, 64, 10_000)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_torch_process_group_can_be_created(fork, store, size):
    ranks = fork(size)
    for number, rank in enumerate(ranks):
        rank.begin("process_group", number, size, store.port)
    for rank in ranks:
        assert rank.result() == [{"rank": number} for number in range(size)]
    assert store.take_notices() == []
