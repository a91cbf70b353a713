"""CPU time of a diagnosis of many ranks: ``python -m benchmarks.diagnosis``.

Each rank has a flight record of 200 entries in three process groups, and the stacks of four threads. One rank
is stuck outside of a collective, and some ranks are at other lines than most.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

from elasticrs._engine.hangs import flight_record, stacks
from elasticrs._engine.hangs.diagnose import RankEvidence, diagnose, diagnose_nodes, observe
from elasticrs._engine.hangs.node_evidence import encode
from elasticrs._engine.supervise.hang_diagnosis import limits

ENTRIES = 200
TENSOR_RANKS = 8
STUCK = 5


def record(rank: int, ranks: int) -> bytes:
    """Return a flight record whose collectives alternate between the rank's process groups."""
    tensor, data = rank // TENSOR_RANKS, rank % TENSOR_RANKS
    groups = [("0", "default_pg"), (str(1 + tensor), "tp"), (str(1 + ranks + data), "dp")]
    count = ENTRIES - 1 if rank == STUCK else ENTRIES
    entries = []
    for index in range(count):
        number = 1 + index // len(groups)
        entries.append(
            {
                "record_id": index,
                "pg_id": index % len(groups),
                "process_group": groups[index % len(groups)],
                "thread_name": "python",
                "thread_id": "140462178757504",
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "op_id": number,
                "profiling_name": "gloo:all_reduce",
                "time_created_ns": 1_795_654_340_610_794_792 + index,
                "input_sizes": [[1024, 1 + index % 8]],
                "input_dtypes": ["Float"],
                "output_sizes": [[1024, 1 + index % 8]],
                "output_dtypes": ["Float"],
                "state": "scheduled",
                "time_discovered_started_ns": 0,
                "time_discovered_completed_ns": 0,
                "retired": index < ENTRIES - 1,
                "timeout_ms": 600_000,
                "is_p2p": False,
            }
        )
    return json.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": entries}).encode()


def stack(rank: int) -> str:
    """Return the stacks of four threads. In every tenth rank, the main thread is at a different line."""
    frames = "".join(f'  File "/job/model.py", line {line} in layer\n' for line in range(20))
    line = 1000 + rank if rank % 10 == 0 else 88
    others = f"Thread 0x00007f0000000001 (most recent call first):\n{frames}\n" * 3
    own = f'  File "/job/train.py", line {line} in step\n{frames}'
    return f"{others}Current thread 0x00007f0000000002 (most recent call first):\n{own}"


def evidence(rank: int, ranks: int) -> RankEvidence:
    """Return all diagnostic data of one rank."""
    tensor, data = rank // TENSOR_RANKS, rank % TENSOR_RANKS
    groups = {
        str(1 + tensor): range(tensor * TENSOR_RANKS, (tensor + 1) * TENSOR_RANKS),
        str(1 + ranks + data): range(data, ranks, TENSOR_RANKS),
    }
    return RankEvidence(rank, f"node{tensor}", (record(rank, ranks),), stack(rank), groups)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of one call, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5, help="the median counts (default: 5)")
    arguments = parser.parse_args()
    ranks = [evidence(rank, arguments.ranks) for rank in range(arguments.ranks)]
    texts = {rank.rank: rank.stacks or "" for rank in ranks}
    records = [data for rank in ranks if isinstance(rank.records, tuple) for data in rank.records]
    found = diagnose(ranks)
    assert [culprit.ranks for culprit in found.culprits] == [(STUCK,)], found.summary

    def merge_stacks() -> None:
        stacks.merge({rank: stacks.main_thread(text) for rank, text in texts.items()})

    def parse_records() -> None:
        for data in records:
            flight_record.parse([data])

    print(f"{arguments.ranks} ranks, {sum(map(len, records)) / 1e6:.1f} MB of records of {ENTRIES} entries")
    print(f"parse and merge the stacks: {seconds(merge_stacks, arguments.repeats) * 1e3:.0f} ms")
    print(f"parse the records:          {seconds(parse_records, arguments.repeats) * 1e3:.0f} ms")
    print(f"the whole diagnosis:        {seconds(lambda: diagnose(ranks), arguments.repeats) * 1e3:.0f} ms")
    for nproc in (1, TENSOR_RANKS):
        sizes = limits(arguments.ranks // nproc, arguments.ranks)
        facts = [observe(rank._replace(node=f"node{rank.rank // nproc}")) for rank in ranks]
        parts = [facts[first : first + nproc] for first in range(0, len(facts), nproc)]
        nodes = [(part[0].node, encode(part, **sizes)) for part in parts]
        encoding = seconds(partial(encode, parts[0], **sizes), arguments.repeats)
        leading = seconds(partial(diagnose_nodes, nodes, arguments.ranks), arguments.repeats)
        largest = max(len(encoded or b"") for _, encoded in nodes)
        print(f"{len(nodes)} nodes: {largest} bytes and {encoding * 1e3:.1f} ms for each node,", end=" ")
        print(f"{leading * 1e3:.0f} ms for the leader")
    print(found.summary)


if __name__ == "__main__":
    main()
