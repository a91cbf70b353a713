"""Lets the workers of several nodes choose the training step that they all restore after a failure.

Each agent knows only which steps the workers of its own node have copied into its memory, and writes that
into the plan, a record that its workers read. When the workers restore their state, they exchange this
information through the store in which their process groups meet.

- **NODES-1** Only rank 0 chooses the step. Either all ranks restore that step, or no rank restores any.
- **NODES-2** A node without a copy of that step downloads one from another node. If all ranks have the same
  parameters, one download serves all ranks of the node. The checksum of a downloaded copy is checked like
  that of any other copy.
- **NODES-3** A downloaded copy is labelled with the rank that made it, because it also contains that rank's
  random numbers, which no other rank may use.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta

from elasticrs._engine.inside.handover import Handover, Offer, take
from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.choice import Holding, choose, why_other
from elasticrs._engine.inside.keep.file import OffError, round_up
from elasticrs._engine.inside.keep.layout import Head, Slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs._engine.inside.keep.file import KeepFile

PATIENCE = 600.0
"""Seconds for which a rank waits until the workers of all nodes have called ``Keep.restore``."""

_QUIET = 15.0
"""Seconds after which a rank says that it waits."""

_CHOICE = "choice"


def is_job_of_several_nodes() -> bool:
    """Return true if the workers of this attempt run on several nodes."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


class Agreement:
    """What the nodes have agreed on.

    Attributes:
        plan: the agent's plan, with the step to restore and the place of the copy.
        handover: server from which other nodes download this rank's copy; ``None`` if no other node needs it.
            It must run until all ranks have completed a training step.
    """

    def __init__(self, plan: dict[str, Any], handover: Handover | None) -> None:
        self.plan, self.handover = plan, handover


def agree(
    plan: Mapping[str, Any], file: KeepFile, other: int | None, say: Callable[[str], None]
) -> Agreement:
    """Agree with the other nodes on the step to restore, and download a copy of it if this node has none.

    ``other`` is the step of which the program has another state, such as a checkpoint. If it is newer, and
    all nodes have it, no node restores any copy.

    Raises:
        OffError: the nodes have no store in which they could meet.
        RuntimeError: a node has not called ``Keep.restore`` in time, or no node could send a copy.
    """
    facts = {name: plan[name] for name in ("holdings", "barred_from", "ranks_before", "was_replicated")}
    facts["other"] = other
    store = _Store(say) if is_job_of_several_nodes() else None
    own = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
    try:
        choice = _choice(store, own, facts)
        step, is_replicated = choice["step"], choice["replicated"]
        _drop_newer(file, step)
        file.words[Head.WAS_REPLICATED] = int(is_replicated)
        if own[1] == 0:
            file.tell_agreed(plan, {name: choice[name] for name in FACTS})
        done = {**plan, **{name: choice[name] for name in FACTS}, "large": None, "own": None}
        if step is None:
            return Agreement(done, None)
        return _with_copy(store, done, choice, own, file, say)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, OffError) as error:
        # End the attempt, because a rank that continued from another step would make the training wrong.
        raise RuntimeError(f"elasticrs: keep: the nodes could not agree on a step: {error}") from error


def tell_off(reason: str) -> None:
    """Tell the other nodes that this node cannot restore any state, so that they do not wait for it."""
    try:
        own = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
        _publish(_Store(), own, {"off": reason})
    except (OSError, KeyError, ValueError, RuntimeError, OffError):
        return  # Ignore the error: the other nodes will report that they have waited for this node.


FACTS = ("step", "exact", "behind", "why", "kept_by", "ranks", "at_death", "lost")
"""Fields of the plan whose values are the same for all ranks."""


class _Store:
    """The store through which the process groups of this attempt connect. Values are stored as JSON.
    ``say`` tells the user about a long wait.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        from torch import distributed

        torch_distributed: Any = distributed  # Its annotations lack the names of its stores.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            patience = timedelta(seconds=PATIENCE)
            store = torch_distributed.TCPStore(*address, is_master=False, timeout=patience)
        elif distributed.is_initialized():
            store = torch_distributed.distributed_c10d._get_default_store()
        else:
            raise OffError(
                "on several nodes, a worker hosts the store of this job; call init_process_group() before"
                " Keep.restore()"
            )
        prefix = f"elasticrs/keep/{os.environ.get('ELASTICRS_ROUND', '')}"
        self._store = torch_distributed.PrefixStore(prefix, store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        (found,) = self.get_all([key])
        return found

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """Wait until all keys exist, and return their values."""
        from torch.distributed import DistStoreError

        if self._say is not None:
            try:
                self._store.wait(list(keys), timedelta(seconds=_QUIET))
            except DistStoreError:
                self._say(
                    "waiting for the other nodes, because the ranks of all nodes must call Keep.restore()"
                )
        self._store.wait(list(keys), timedelta(seconds=PATIENCE))
        return [json.loads(each) for each in self._store.multi_get(list(keys))]


def _choice(store: _Store | None, own: tuple[int, int], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's choice. With a single node (no ``store``), each rank computes it for itself."""
    if store is None:
        first_rank = int(os.environ["RANK"]) - own[1]
        return chosen([{"first_rank": first_rank, **facts}], int(os.environ["WORLD_SIZE"]))
    _publish(store, own, facts)
    found: dict[str, Any] = store.get(_CHOICE)
    return found


def _publish(store: _Store, own: tuple[int, int], facts: Mapping[str, Any]) -> None:
    """Publish which copies this node has, if this rank is the node's first. If this rank is rank 0, also
    choose a step and publish the choice.
    """
    group_rank, local_rank = own
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if local_rank == 0:
        store.set(f"node/{group_rank}", {"first_rank": rank, **facts})
    if rank == 0:
        keys = [f"node/{each}" for each in range(int(os.environ["GROUP_WORLD_SIZE"]))]
        store.set(_CHOICE, chosen([facts] if "off" in facts else store.get_all(keys), world))


def chosen(found: Sequence[Mapping[str, Any]], world: int) -> dict[str, Any]:
    """Choose the step that all nodes restore.

    Args:
        found: what each node has published, by group rank.
        world: number of ranks of this attempt.

    Returns:
        The fields of the plan that are the same for all ranks, and ``replicated``. With a step also ``where``
        (node, local rank, slot and sequence number of each copy, by the rank that made it) and ``nodes``
        (first rank and number of ranks of each node).
    """
    nothing: dict[str, Any] = {"step": None, "exact": True, "behind": [], "kept_by": [], "ranks": 0}
    nothing |= {"at_death": False, "lost": 0, "replicated": False}
    for group_rank, each in enumerate(found):
        if "off" in each:
            return {**nothing, "why": f"Keep is off on node {group_rank}: {each['off']}"}
    holdings: dict[int, Holding] = {}
    places: dict[int, tuple[int, int]] = {}
    for group_rank, each in enumerate(found):
        for local_rank, record in enumerate(each["holdings"]):
            if record is None:
                continue
            rank, holding = int(record["rank"]), Holding.of_json(record["holding"])
            # A node that missed a round has older copies, and another node may have its ranks now.
            if rank not in holdings or holdings[rank].attempt < holding.attempt:
                holdings[rank], places[rank] = holding, (group_rank, local_rank)
    bars = [each["barred_from"] for each in found if each["barred_from"] is not None]
    choice = choose(
        holdings,
        world,
        barred_from=min(bars, default=None),
        was_replicated=any(each["was_replicated"] for each in found),
    )
    others = {each.get("other") for each in found}
    why = why_other(choice.step, others.pop()) if len(others) == 1 else ""
    if choice.step is None or why:
        return {**nothing, "why": why or choice.why, "replicated": choice.is_replicated}
    ranks = max(each["ranks_before"] for each in found)
    now = {  # Ranks in this attempt, by node and local rank.
        (group_rank, local_rank): each["first_rank"] + local_rank
        for group_rank, each in enumerate(found)
        for local_rank in range(len(each["holdings"]))
    }
    own = {now[places[rank]]: rank for rank, holding in holdings.items() if holding.has_small(choice.step)}
    where = {}
    for rank in choice.kept_by:
        slot = holdings[rank].slot_of(choice.step)
        assert slot is not None
        where[str(rank)] = [*places[rank], slot.index, slot.sequence]
    return {
        "step": choice.step,
        "exact": world == ranks and all(own.get(rank) == rank for rank in range(world)),
        "behind": [rank for rank in range(world) if rank not in own],
        "why": choice.why,
        "kept_by": list(choice.kept_by),
        "ranks": ranks,
        "at_death": choice.is_at_death,
        "lost": choice.lost,
        "replicated": choice.is_replicated,
        "where": where,
        "nodes": [[each["first_rank"], len(each["holdings"])] for each in found],
    }


def source_of(
    choice: Mapping[str, Any], group_rank: int, local_rank: int, rank: int
) -> tuple[int, list[int]]:
    """Return which rank made the copy that this rank restores, and the place of the copy."""
    where: dict[int, list[int]] = {int(each): place for each, place in choice["where"].items()}
    if not choice["replicated"]:
        return rank, where[rank]
    near = [each for each, place in sorted(where.items()) if place[0] == group_rank]
    for each in near:
        if where[each][1] == local_rank:
            return each, where[each]
    # Nodes without a copy download from different nodes, so that no node has to serve all of them.
    holders = near or sorted(where)
    holder = holders[(local_rank if near else group_rank) % len(holders)]
    return holder, where[holder]


def _with_copy(
    store: _Store | None,
    plan: dict[str, Any],
    choice: Mapping[str, Any],
    own: tuple[int, int],
    file: KeepFile,
    say: Callable[[str], None],
) -> Agreement:
    group_rank, local_rank = own
    handover = None
    if store is not None and own in _servers(choice):
        handover = _offer(store, own, file, say)
    holder, (node, local, slot, sequence) = source_of(choice, *own, int(os.environ["RANK"]))
    if store is None or node == group_rank:
        if local == local_rank:
            plan["own"] = slot
        plan["large"] = {"file": plan["files"][local], "slot": slot, "rank": holder, "sequence": sequence}
        return Agreement(plan, handover)
    taker = 0 if choice["replicated"] else local_rank
    if taker == local_rank:
        record = store.get(f"offer/{node}/{local}")
        offer = Offer((str(record["host"]), int(record["port"])), str(record["secret"]))
        taken = _take(offer, slot, file, int(plan["memory"]))
        say(f"step {choice['step']} is downloaded from node {node}")
        store.set(f"taken/{group_rank}/{taker}", [taken, file.slots[taken].sequence])
    slot, sequence = store.get(f"taken/{group_rank}/{taker}")
    plan["large"] = {"file": plan["files"][taker], "slot": slot, "rank": holder, "sequence": sequence}
    return Agreement(plan, handover)


def _servers(choice: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return node and local rank of each worker whose copy another node needs."""
    found = set()
    for group_rank, (first, count) in enumerate(choice["nodes"]):
        for local_rank in range(count):
            _, (node, local, *_) = source_of(choice, group_rank, local_rank, first + local_rank)
            if node != group_rank:
                found.add((node, local))
    return found


def _offer(store: _Store, own: tuple[int, int], file: KeepFile, say: Callable[[str], None]) -> Handover:
    """Start to serve this rank's copy to other nodes, and publish the address."""

    def parts(name: str) -> Iterator[memoryview]:
        part, _, number = name.partition(" ")
        private, words, index = file.slots[int(number)].read_only()
        data_at = words[Slot.DATA_AT]
        pieces = {
            "head": memoryview(layout.pack(words)),
            "index": memoryview(index),
            "data": memoryview(private)[data_at : data_at + words[Slot.DATA_LENGTH]],
        }
        yield pieces[part]

    near = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    handover = Handover(parts, near, lambda why: say(f"another node could not download a copy: {why}"))
    host, port = handover.offer.address
    record = {"host": host, "port": port, "secret": handover.offer.secret}
    store.set(f"offer/{own[0]}/{own[1]}", record)
    return handover


def _take(offer: Offer, slot: int, file: KeepFile, memory: int) -> int:
    """Download a copy into that slot of the file that has the older copy. Return the number of the slot."""
    head = bytearray(layout.WORD * Slot.COUNT)
    take(offer, f"head {slot}", memoryview(head))
    words = layout.unpack(bytes(head))
    data_at, length, index_length = words[Slot.DATA_AT], words[Slot.DATA_LENGTH], words[Slot.INDEX_LENGTH]
    if data_at < layout.HEAD_SIZE + index_length or data_at + length > memory:
        raise OffError(f"the copy has {data_at + length} bytes, and this rank may use {memory}")
    index = bytearray(index_length)
    take(offer, f"index {slot}", memoryview(index))
    number = min(range(layout.SLOTS), key=lambda each: file.slots[each].complete_step or -1)
    target = file.slots[number]
    target.reserve(round_up(data_at + length, layout.PAGE))
    facts = {word: words[word] for word in range(Slot.STEP, Slot.COUNT) if word not in _SET_LATER}
    target.begin(bytes(index), data_at, facts)
    assert target.map is not None
    with memoryview(target.map)[data_at : data_at + length] as data:
        take(offer, f"data {slot}", data)
    target.complete(words[Slot.DIGEST], 1 + max(each.sequence for each in file.slots))
    return number


_SET_LATER = (Slot.DIGEST, Slot.SEQUENCE, Slot.WALL_NS)


def _drop_newer(file: KeepFile, step: int | None) -> None:
    """Delete this rank's copies of steps after the chosen one, because no rank will continue from them."""
    for slot in file.slots:
        if slot.complete_step is not None and (step is None or slot.complete_step > step):
            slot.drop()
