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
from functools import partial

from elasticrs._engine.inside.handover import Handover, Offer, Pace, in_chunks, take
from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.choice import Choice, Holding, choose, why_other
from elasticrs._engine.inside.keep.file import KeepFile, OffError, round_up, say, sizes_as_text
from elasticrs._engine.inside.keep.layout import Head, Slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from elasticrs._engine.inside.keep.file import SlotRegion

PATIENCE = 600.0
"""Seconds for which a rank waits until the workers of all nodes have called ``Keep.restore``."""

_QUIET = 15.0
"""Seconds after which a rank says that it waits."""

_CHOICE = "choice"

_FINAL = 1 << 62
"""Number of a generation after all others, with which rank 0 answers all that other ranks wait for."""


def is_job_of_several_nodes() -> bool:
    """Return true if the workers of this attempt run on several nodes."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


class Agreement:
    """Result of the nodes' agreement on the training step that all ranks restore.

    Attributes:
        plan: the agent's plan (what this worker is to restore), with the agreed step and its copy's place.
        handover: server from which other nodes download this rank's copies; ``None`` if no other node needs
            them. The server must run until all ranks have completed a training step.
        store: the store through which the nodes have agreed; ``None`` if the job has one node.
        nodes: first rank and number of ranks of each node; ``None`` if no node keeps copies of another one.
        is_restored: true when all ranks have restored their state. From then on, ``handover`` does not report
            failed downloads, because the nodes that download report them.
    """

    def __init__(self, plan: dict[str, Any], store: Store | None) -> None:
        self.plan, self.store = plan, store
        self.handover: Handover | None = None
        self.nodes: Sequence[Sequence[int]] | None = None
        self.is_restored = False


def agree(plan: Mapping[str, Any], file: KeepFile, other: int | None) -> Agreement:
    """Agree with the other nodes on the training step to restore. Download a copy of this step from another
    node if this node has none.

    ``other`` is the step of another state that the program has, such as a checkpoint on a disk. If all nodes
    have this state, and it is newer than the copies in memory, no node restores a copy.

    Raises:
        OffError: the nodes have no store in which they could meet.
        RuntimeError: a node has not called ``Keep.restore`` in time, or no node could send a copy.
    """
    facts = {**{name: plan[name] for name in _OF_NODE}, "other": other}
    facts["saved"] = plan["saved"] and plan["saved"]["facts"]
    store = Store() if is_job_of_several_nodes() else None
    own = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
    try:
        if plan["must_check"] and (own[1] == 0 or store is None):
            _check_copies(plan, facts)
        choice = _choice(store, own, facts)
        step, is_replicated = choice["step"], choice["replicated"]
        files = [file, *map(KeepFile, plan["partner_files"][own[1] : own[1] + 1])]
        readable = choice["reader"]
        for each in files:
            _drop_newer(each, step if readable is None else readable[0])
        file.words[Head.WAS_REPLICATED] = int(is_replicated)
        if own[1] == 0:
            file.tell_agreed(plan, {name: choice[name] for name in FACTS})
        done = {**plan, **{name: choice[name] for name in (*FACTS, "from_partners")}}
        done |= {"large": None, "own": None}
        if readable is not None:
            copies = [_located(plan, own[0], *each) for each in readable[1]]
            done["reader"] = {"step": readable[0], "copies": copies}
        agreement = Agreement(done, store)
        if choice["no_peers"] and os.environ["RANK"] == "0":
            say(f"--keep-peers has no effect: {choice['no_peers']}")
        if store is not None and (choice["has_peers"] or own in _servers(choice)):

            def tell(text: str) -> None:
                if not agreement.is_restored:
                    say(text)

            agreement.handover = _offer(store, own, files, plan["bandwidth"], tell)
            agreement.nodes = choice["nodes"] if choice["has_peers"] else None
        if choice.get("is_saved"):
            done |= {"folder": plan["saved"]["name"], "reader": plan["saved"]["reader"]}
            done |= plan["saved_own"] if step is not None else {}
        elif step is not None:
            _add_copy(store, done, choice, own, file)
        return agreement
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, OffError) as error:
        # End the attempt, because a rank that continued from another step would make the training wrong.
        raise RuntimeError(f"elasticrs: keep: the nodes could not agree on a step: {error}") from error


def _check_copies(plan: Mapping[str, Any], facts: dict[str, Any]) -> None:
    """Delete the damaged copies of this node, because a rank has found one in the attempt before. Also delete
    them from ``facts``, which this node publishes.
    """
    _drop_damaged([*plan["files"], *plan["partner_files"]], say)

    def intact(place: str, record: Mapping[str, Any], first: int) -> dict[str, Any]:
        file, holding = KeepFile(place), record["holding"]
        slots = [each for each in holding["slots"] if file.slots[each[0] - first].complete_step == each[1]]
        lost = [each[1] for each in holding["slots"] if each not in slots]
        damaged = max([*lost, *filter(None, [holding["damaged"]])], default=None)
        file.close()
        return {**record, "holding": {**holding, "slots": slots, "damaged": damaged}}

    facts["holdings"] = [
        record and intact(place, record, 0)
        for place, record in zip(plan["files"], plan["holdings"], strict=True)
    ]
    facts["partners"] = [
        [intact(place, record, layout.SLOTS) for record in records]
        for place, records in zip(plan["partner_files"], plan["partners"], strict=False)
    ] or plan["partners"]


def _drop_damaged(places: Iterable[str], tell: Callable[[str], None]) -> None:
    """Delete the damaged copies in some files. ``tell`` writes a line about it for the user."""
    from elasticrs._engine.inside.keep.restore import deleted_text, drop_damaged

    if steps := drop_damaged(places):
        tell(deleted_text(steps))


def tell_off(reason: str, name: str) -> None:
    """Tell the other nodes that this rank neither restores nor copies its state, so that they do not wait.
    ``name``: the name of the store through which other ranks compare their copies if they restore none.
    """
    try:
        own, store = (int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])), Store()
        for each in (store, Store(name)):
            leave(each, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), reason)
        _publish(store, own, {"off": reason})
    except (OSError, KeyError, ValueError, RuntimeError, OffError):
        return  # Ignore the error: the other nodes will report that they have waited for this node.


def agreed_step() -> int | None:
    """Return the step on which the other ranks agree, for a rank that takes no part in the agreement. Return
    ``None`` if no rank restores a step.

    Raises:
        RuntimeError: a node has not called ``Keep.restore`` in time.
    """
    try:
        step: int | None = Store().get(_CHOICE)["step"]
    except OffError:
        return None  # Without a store, the other ranks restore nothing.
    return step


def leave(store: Store, rank: int, world: int, reason: str, *, has_published: bool = False) -> None:
    """Tell the other ranks that ``rank`` no longer compares copies, so that they do not wait for it.

    Args:
        store: the store through which the ranks compare their copies.
        rank: this rank.
        world: number of ranks of the job.
        reason: why the rank leaves.
        has_published: true if the rank has written into the store before which copy it has.
    """
    store.set(f"copied/{rank}", [_FINAL, reason])
    if not has_published:
        store.add("published", 1)
    # Mark the current generation of copies as failed, and this rank's download as finished, so that rank 0
    # does not wait for this rank.
    for count in ("failed", "absent"):
        store.add(count, 1)
    store.add("taken", world)
    if rank == 0:
        store.set("compared", [_FINAL, [False, [], False]])
        store.set("done", [_FINAL, [False, False]])
        store.set("next", [_FINAL, [None, {"0": reason}]])


FACTS = tuple(Choice().facts())
"""Fields of the plan whose values are the same for all ranks."""


_OF_NODE = (
    *("holdings", "partners", "has_peers", "barred_from", "refused", "reached", "ranks_before"),
    "was_replicated",
)
"""Fields of the agent's plan that describe one node. The node's first worker publishes them in the store."""


class Store:
    """The key-value store that the process groups of this attempt also use to connect. Values are stored as
    JSON. A long wait is reported to the user. Stores with different names have separate keys.

    Raises:
        OffError: a worker hosts the store, but the program has not connected its process groups yet.
    """

    def __init__(self, name: str = "") -> None:
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
        prefix = f"elasticrs/keep/{os.environ.get('ELASTICRS_ROUND', '')}{name}"
        self._store = torch_distributed.PrefixStore(prefix, store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        (found,) = self.get_all([key])
        return found

    def has(self, key: str) -> bool:
        """Return true if the key exists now. Do not wait until it does."""
        has: bool = self._store.check([key])
        return has

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter that the store has under ``key``. Return the counter's new value."""
        total: int = self._store.add(key, number)
        return total

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """Wait until all keys exist, and return their values."""
        from torch.distributed import DistStoreError

        try:
            self._store.wait(list(keys), timedelta(seconds=_QUIET))
        except DistStoreError:
            say("waiting for the other nodes, because the ranks of all nodes must call Keep.restore()")
        self._store.wait(list(keys), timedelta(seconds=PATIENCE))
        return [json.loads(each) for each in self._store.multi_get(list(keys))]


def _choice(store: Store | None, own: tuple[int, int], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's choice. With a single node (no ``store``), each rank computes it for itself."""
    if store is None:
        first_rank = int(os.environ["RANK"]) - own[1]
        return chosen([{"first_rank": first_rank, **facts}], int(os.environ["WORLD_SIZE"]))
    _publish(store, own, facts)
    found: dict[str, Any] = store.get(_CHOICE)
    return found


def _publish(store: Store, own: tuple[int, int], facts: Mapping[str, Any]) -> None:
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
        The fields of the plan that are the same for all ranks (:data:`FACTS`), and further ones:
        ``replicated`` is true if all ranks have the same state. ``nodes`` has the first rank and the number
        of ranks of each node. ``has_peers`` is true if each node keeps copies of another node. If a step is
        chosen, ``where`` has the place of each copy (node, local rank, slot, and sequence number), by the
        rank that made the copy. If only ``Keep.reader`` can load a step, ``reader`` has the step and the
        places of the copies, in the order of the ranks that made them.
    """
    nothing: dict[str, Any] = {**Choice().facts(), "from_partners": {}, "replicated": False}
    nothing |= {"has_peers": False, "no_peers": "", "nodes": [], "reader": None}
    for group_rank, each in enumerate(found):
        if "off" in each:
            return {**nothing, "why": f"Keep is off on node {group_rank}: {each['off']}"}
    nothing["nodes"] = [[each["first_rank"], len(each["holdings"])] for each in found]
    nothing["no_peers"] = _why_no_peers(found) if any(each["has_peers"] for each in found) else ""
    nothing["has_peers"] = not nothing["no_peers"] and bool(found) and found[0]["has_peers"]
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
    _add_partners(found, holdings, places)
    bars = [each["barred_from"] for each in found if each["barred_from"] is not None]
    refused = [each["refused"] for each in found if each["refused"] is not None]
    before = max((_pair(*each["reached"]) for each in found if each["reached"] is not None), default=None)
    ranks = max(each["ranks_before"] for each in found)
    choose_for = partial(
        choose,
        holdings,
        barred_from=min(bars, default=None),
        refused=min(refused, default=None),
        was_replicated=any(each["was_replicated"] for each in found),
        before=before,
        ranks=ranks,
    )
    choice = choose_for(world)
    others = {each.get("other") for each in found}
    why = why_other(choice.step, others.pop()) if len(others) == 1 else ""
    if choice.step is None and (old := choose_for(ranks)).step is not None:
        # As many ranks as before could restore this step. So the reader can load it with another number.
        copies = [[*places[rank], *slot] for rank, *slot in (old.sources[each] for each in range(ranks))]
        nothing |= {"reader": [old.step, copies], "readable": old.step}
    elif choice.step is None and not why and any(each.get("saved") for each in found):
        return {**nothing, **_saved_facts(found, 0 if before is None else before[1])}
    if choice.step is None or why:
        return {**nothing, "why": why or choice.why, "replicated": choice.is_replicated}
    now = {  # Ranks in this attempt, by node and local rank.
        (group_rank, local_rank): each["first_rank"] + local_rank
        for group_rank, each in enumerate(found)
        for local_rank in range(len(each["holdings"]))
    }
    own = {now[places[rank]]: rank for rank, holding in holdings.items() if holding.has_small(choice.step)}
    if not choice.is_replicated:
        # A copy contains the small state (random numbers and the like) of the rank that made it. A rank that
        # has made no copy uses the small state in its own file.
        own = {rank: rank for rank in now.values() if rank in choice.kept_by or own.get(rank) == rank}
    where = {}
    from_partners: dict[str, list[int]] = {}
    for rank in choice.kept_by:
        slot = holdings[rank].slot_of(choice.step)
        assert slot is not None
        where[str(rank)] = [*places[rank], slot.index, slot.sequence]
        if slot.index >= layout.SLOTS and not choice.is_replicated:
            from_partners.setdefault(str(places[rank][0]), []).append(rank)
    return {
        **nothing,
        **choice.facts(),
        "exact": world == ranks and all(own.get(rank) == rank for rank in range(world)),
        "behind": [rank for rank in range(world) if rank not in own],
        "ranks": ranks,
        "replicated": choice.is_replicated,
        "where": where,
        "sources": {str(rank): holder for rank, (holder, *_) in choice.sources.items()},
        "from_partners": from_partners,
    }


def _why_no_peers(found: Sequence[Mapping[str, Any]]) -> str:
    """Return why ``--keep-peers`` has no effect; an empty text if each node keeps copies of another one."""
    lacking = [node for node, each in enumerate(found) if not each["has_peers"]]
    if lacking:
        return f"node {lacking[0]} was started without --keep-peers 1"
    if len(found) == 1:
        return "the job has only one node now"
    if len({len(each["holdings"]) for each in found}) > 1:
        return "the nodes have different numbers of workers"
    return ""


def _add_partners(
    found: Sequence[Mapping[str, Any]], holdings: dict[int, Holding], places: dict[int, tuple[int, int]]
) -> None:
    """Add the copies that partners (nodes that keep second copies of another node's state) have of ranks
    whose own node is lost, has missed an attempt, or is new and has restored nothing. Add where they are to
    ``places``.
    """

    def newest(holding: Holding) -> tuple[int, int]:
        return max(((slot.attempt, slot.step) for slot in holding.slots), default=(-1, -1))

    for group_rank, each in enumerate(found):
        for local_rank, records in enumerate(each["partners"]):
            for record in records:
                rank, holding = int(record["rank"]), Holding.of_json(record["holding"])
                known = holdings.get(rank)
                # A rank that died before it had restored its state may have no copy, and has changed nothing.
                is_own = (
                    known is not None
                    and known.has_joined
                    and (known.restored, known.ended) != (None, None)
                    and known.attempt >= newest(holding)[0]
                )
                if not is_own and (known is None or newest(known) < newest(holding)):
                    holdings[rank], places[rank] = holding, (group_rank, local_rank)


def _pair(attempt: int, step: int) -> tuple[int, int]:
    return attempt, step


def _saved_facts(found: Sequence[Mapping[str, Any]], ended: int) -> Mapping[str, Any]:
    """Return the choice to restore the state that an earlier job has saved (``--keep-save``), as no step is
    in memory. If the nodes do not find the same saved state, return only the reason why none is restored.
    ``ended``: the last step of this job's earlier attempts.
    """
    saved = found[0]["saved"]
    without = [group_rank for group_rank, each in enumerate(found) if each["saved"] != saved]
    if without:
        return {"why": f"not all nodes see the same state in the folder of --keep-save (node {without[0]})"}
    others = {each.get("other") for each in found}
    why = why_other(saved["step"], others.pop()) if len(others) == 1 else ""
    lost = 0 if saved["step"] is None else max(saved["lost"], ended - saved["step"])
    return {"why": why} if why else {**saved, "lost": lost, "is_saved": True}


def source_of(
    choice: Mapping[str, Any], group_rank: int, local_rank: int, rank: int
) -> tuple[int, list[int]]:
    """Return which rank made the copy that this rank restores, and the place of the copy."""
    where: dict[int, list[int]] = {int(each): place for each, place in choice["where"].items()}
    if not choice["replicated"]:
        holder = choice["sources"][str(rank)]
        return holder, where[holder]
    near = [each for each, place in sorted(where.items()) if place[0] == group_rank]
    for each in near:
        if where[each][1] == local_rank:
            return each, where[each]
    # Nodes without a copy download from different nodes, so that no node has to serve all of them.
    holders = near or sorted(where)
    holder = holders[(local_rank if near else group_rank) % len(holders)]
    return holder, where[holder]


def _add_copy(
    store: Store | None,
    plan: dict[str, Any],
    choice: Mapping[str, Any],
    own: tuple[int, int],
    file: KeepFile,
) -> None:
    """Add to the plan where the copy to restore is. Download it first if no file of this node has it."""
    group_rank, local_rank = own
    holder, (node, local, slot, sequence) = source_of(choice, *own, int(os.environ["RANK"]))
    plan["partner"] = node if slot >= layout.SLOTS else None
    plan["has_small"] = not choice["replicated"] and holder == int(os.environ["RANK"])
    if store is None or node == group_rank:
        place = plan["files"][local]
        if slot >= layout.SLOTS:
            place, slot = plan["partner_files"][local], slot - layout.SLOTS
        elif local == local_rank:
            plan["own"] = slot
        plan["large"] = {"file": place, "slot": slot, "rank": holder, "sequence": sequence}
        return
    taker = 0 if choice["replicated"] else local_rank
    if taker == local_rank:
        offer, memory = offer_of(store.get(f"offer/{node}/{local}")), int(plan["memory"])
        kept = [at for at, each in enumerate(file.slots) if each.complete_step == (choice["fallback"] or -1)]
        taken = take_copy(offer, f"{slot}", file, memory, kept=kept)
        say(f"step {choice['step']} is downloaded from node {node}")
        store.set(f"taken/{group_rank}/{taker}", [taken, file.slots[taken].sequence])
    slot, sequence = store.get(f"taken/{group_rank}/{taker}")
    plan["large"] = {"file": plan["files"][taker], "slot": slot, "rank": holder, "sequence": sequence}


def _located(
    plan: Mapping[str, Any], group_rank: int, node: int, local: int, slot: int, sequence: int
) -> tuple[str, int, int]:
    """Return file, slot and sequence number of a copy. If it is on another node, there is ``NODE/LOCAL RANK``
    in place of the file.
    """
    if node != group_rank:
        return f"{node}/{local}", slot, sequence
    if slot >= layout.SLOTS:
        return plan["partner_files"][local], slot - layout.SLOTS, sequence
    return plan["files"][local], slot, sequence


def _servers(choice: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return node and local rank of each worker whose copy another node needs."""
    found: set[tuple[int, int]] = set()
    if choice["reader"] is not None and len(choice["nodes"]) > 1:
        return {(node, local) for node, local, *_ in choice["reader"][1]}
    if choice["step"] is None or choice.get("is_saved"):
        return found
    for group_rank, (first, count) in enumerate(choice["nodes"]):
        for local_rank in range(count):
            _, (node, local, *_) = source_of(choice, group_rank, local_rank, first + local_rank)
            if node != group_rank:
                found.add((node, local))
    return found


def _offer(
    store: Store,
    own: tuple[int, int],
    files: Sequence[KeepFile],
    bandwidth: float,
    tell: Callable[[str], None],
) -> Handover:
    """Start a server for the copies in this rank's files, and publish its address for other nodes. The slots
    of the second file, which has copies of another node's rank, are numbered from :data:`.layout.SLOTS` on.
    """
    pace, slots = Pace(bandwidth), [slot for file in files for slot in file.slots]
    checked = set[tuple[int, int]]()

    def parts(name: str) -> Iterator[memoryview]:
        part, _, copy = name.partition(" ")
        if is_paced := copy.startswith(_PACED):
            (slot,) = (slot for slot in files[0].slots if slot.complete_step == int(copy[len(_PACED) :]))
        else:
            copy, *place = copy.split()
            slot = slots[int(copy)]
            is_of_partner = int(copy) >= layout.SLOTS
            if part == "bytes":
                at, length = map(int, place)
                yield from in_chunks(memoryview(slot.read_only()[0])[at : at + length], Pace(0))
                return
            # A client that reads only some bytes cannot check the copy. So do it here, once for all clients.
            known = int(copy), slot.sequence
            if part == "checked" and known not in checked and is_intact(slot):
                checked.add(known)
            is_damaged = part == "checked" and known not in checked
            if is_damaged or (part == "head" and is_of_partner and not is_intact(slot)):
                # Delete all damaged copies in this node's files now, because ranks of other nodes cannot
                # check these files.
                _drop_damaged((file.place for file in files), tell)
                raise ValueError("the checksum is wrong")
        private, words, index = slot.read_only()
        data = memoryview(private)[words[Slot.DATA_AT] :][: words[Slot.DATA_LENGTH]]
        head = memoryview(layout.pack(words))
        pieces = {"head": head, "checked": head, "index": memoryview(index), "data": data}
        if is_paced:
            yield from in_chunks(pieces[part], pace)
        else:
            yield pieces[part]

    near = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    handover = Handover(parts, near, lambda why: tell(f"another node could not download a copy: {why}"))
    host, port = handover.offer.address
    record = {"host": host, "port": port, "secret": handover.offer.secret}
    store.set(f"offer/{own[0]}/{own[1]}", record)
    return handover


_PACED = "paced "
"""Prefix of the name of a copy that is downloaded during the training. Its step follows, not its slot."""


def is_intact(slot: SlotRegion) -> bool:
    """Return true if the copy in a slot has the checksum that was stored when it was made."""
    import torch

    from elasticrs._engine.inside.keep.copier import digest_of

    private, words, _ = slot.read_only()
    at, length = words[Slot.DATA_AT], words[Slot.DATA_LENGTH]
    return digest_of(torch.frombuffer(private, dtype=torch.uint8)[at : at + length]) == words[Slot.DIGEST]


def offer_of(record: Mapping[str, Any]) -> Offer:
    """Return the address of another worker's server, from what that worker has published in the store."""
    return Offer((str(record["host"]), int(record["port"])), str(record["secret"]))


def take_paced(
    offer: Offer, step: int, file: KeepFile, memory: int, kept: Collection[int], least_rate: float
) -> int:
    """Download the copy of ``step`` that another rank has made, while the training goes on; see
    :func:`take_copy`. Fail if the other rank sends fewer than ``least_rate`` bytes per second.
    """
    get = partial(take, is_checked=True, least_rate=least_rate)
    return take_copy(offer, f"{_PACED}{step}", file, memory, kept=kept, get=get)


def take_copy(
    offer: Offer,
    copy: str,
    file: KeepFile,
    memory: int,
    *,
    kept: Collection[int] = (),
    get: Callable[[Offer, str, memoryview], None] = take,
) -> int:
    """Download a copy of another worker into a slot (a region for one copy) of a file. Of the slots that are
    not in ``kept``, use an empty one, or that with the oldest copy.

    Args:
        offer: address of the other worker's server.
        copy: name of the copy on that server: the number of its slot there, or as :data:`_PACED` says.
        file: the file into which the copy is written.
        memory: maximum size of the copy in bytes.
        kept: numbers of slots of ``file`` whose copies must not be replaced.
        get: function that downloads a part of the copy.

    Returns:
        The number of the slot in ``file``.

    Raises:
        OSError: the copy cannot be downloaded.
        OffError: the copy is too large.
    """
    head = bytearray(layout.WORD * Slot.COUNT)
    get(offer, f"head {copy}", memoryview(head))
    words = layout.unpack(bytes(head))
    data_at, length, index_length = words[Slot.DATA_AT], words[Slot.DATA_LENGTH], words[Slot.INDEX_LENGTH]
    if data_at < layout.HEAD_SIZE + index_length:
        raise ConnectionError("its head is damaged")
    if data_at + length > memory:
        need, allowed = sizes_as_text(data_at + length, memory)
        raise OffError(f"it needs {need}, and --keep-memory leaves {allowed} for it")
    index = bytearray(index_length)
    get(offer, f"index {copy}", memoryview(index))
    free = [each for each in range(layout.SLOTS) if each not in kept]
    number = min(free, key=lambda each: file.slots[each].complete_step or -1)
    target = file.slots[number]
    target.reserve(round_up(data_at + length, layout.PAGE))
    facts = {word: words[word] for word in range(Slot.STEP, Slot.COUNT) if word not in _SET_LATER}
    target.begin(bytes(index), data_at, facts)
    assert target.map is not None
    with memoryview(target.map)[data_at : data_at + length] as data:
        get(offer, f"data {copy}", data)
    target.complete(words[Slot.DIGEST], 1 + max(each.sequence for each in file.slots))
    return number


_SET_LATER = (Slot.DIGEST, Slot.SEQUENCE, Slot.WALL_NS)


def _drop_newer(file: KeepFile, step: int | None) -> None:
    """Delete this rank's copies of steps after the chosen one, because no rank will continue from them."""
    for slot in file.slots:
        if slot.complete_step is not None and (step is None or slot.complete_step > step):
            slot.drop()
