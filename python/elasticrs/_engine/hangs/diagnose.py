"""Diagnoses why a job hangs or a collective failed, and writes a paragraph about it for the user."""

from __future__ import annotations

import os
from typing import NamedTuple

from elasticrs._engine.hangs.collectives import match, most_frequent
from elasticrs._engine.hangs.culprits import Confidence, Diagnosis, Reason, blame
from elasticrs._engine.hangs.flight_record import DEFAULT_GROUP, FlightRecordError, NoRecord, RankFacts, parse
from elasticrs._engine.hangs.node_evidence import decode
from elasticrs._engine.hangs.stacks import line, main_thread, merge, place, program_frame
from elasticrs._engine.job import phrases
from elasticrs._engine.job.phrases import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from elasticrs._engine.hangs.collectives import StuckCollective
    from elasticrs._engine.hangs.culprits import Culprit
    from elasticrs._engine.hangs.flight_record import RankRecord
    from elasticrs._engine.hangs.stacks import Frame

MAX_SPANS = 6

MAX_PLACES = 2
MAX_CULPRITS = 3
"""Maximum number of culprits that the paragraph describes, and of collectives without a known culprit."""

_MAX_NODES = 3
_MAX_ERROR = 200

_WHY_NO_RECORD = {
    NoRecord.NO_TORCH: "torch is not imported",
    NoRecord.OFF: "the recorder is off",
    NoRecord.LATE: "no answer in time",
    NoRecord.EXITED: "exited",
    NoRecord.ABORTED: "aborted",
    NoRecord.RETURNED: "its program has returned",
    NoRecord.LOST_PEER: "it has lost a peer",
    NoRecord.LOST: "the node did not answer",
    NoRecord.DAMAGED: "the record is damaged",
    NoRecord.OUTDATED: "the record is older than the others",
}
_LIKELIHOOD = {Confidence.CERTAIN: "", Confidence.LIKELY: "probably ", Confidence.POSSIBLE: "possibly "}
_UNDECIDED = "the records do not show which is wrong"


class RankEvidence(NamedTuple):
    rank: int
    node: str
    records: tuple[bytes, ...] | NoRecord
    """The rank's flight records, one for each backend, or the reason why there is no record."""
    stacks: str | None = None
    """Output of ``faulthandler`` or ``py-spy``; ``None`` if unknown."""
    groups: Mapping[str, Sequence[int]] = {}
    """Global ranks of the process groups that the rank has created. gloo's records do not contain them."""
    has_raised: bool = False
    """True if the program had raised an exception. Torch then marks the failed collective as retired, too."""
    frames: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first, if ``stacks`` has none. Empty if unknown."""


def failed(error: Exception) -> Diagnosis:
    """Return a diagnosis that says that a defect in elasticrs made the diagnosis fail."""
    entry, place = error.__traceback__, ""
    while entry is not None:
        place = f" at {os.path.basename(entry.tb_frame.f_code.co_filename)}:{entry.tb_lineno}"
        entry = entry.tb_next
    why = printable(f"{type(error).__name__}: {error}")[:_MAX_ERROR]
    summary = f"the diagnosis failed because of a defect in elasticrs ({why}{place})"
    return Diagnosis(summary, (), (), (), {}, ())


def observe(found: RankEvidence) -> RankFacts:
    """Parse the evidence about one rank. A record that cannot be parsed counts as missing."""
    frames = main_thread(found.stacks or "") or found.frames
    return RankFacts(found.rank, found.node, _parsed(found), frames)


def diagnose(evidence: Iterable[RankEvidence]) -> Diagnosis:
    """Name the ranks that keep a job from making progress. Never raises an exception."""
    return judge(map(observe, evidence))


def judge(facts: Iterable[RankFacts]) -> Diagnosis:
    """Make a diagnosis from parsed evidence about each rank of the job, in any order."""
    by_rank = {found.rank: found for found in sorted(facts, key=lambda found: found.rank)}
    matched = match({rank: found.record for rank, found in by_rank.items()})
    stacks = {rank: found.frames for rank, found in by_rank.items() if found.frames}
    culprits, candidates = blame(matched, stacks, tuple(by_rank))
    blamed = {culprit.collective for culprit in culprits}
    stuck = tuple(sorted(matched.stuck, key=lambda stuck: (stuck not in blamed, -len(stuck.waiting))))
    nodes = {rank: found.node for rank, found in by_rank.items() if found.node}
    paragraph = Paragraph(nodes, stacks, matched.no_record, culprits, stuck)
    return Diagnosis(
        summary=paragraph.text(),
        culprits=culprits,
        candidates=candidates,
        collectives=stuck,
        no_record=matched.no_record,
        stacks=merge(stacks),
    )


def diagnose_nodes(
    nodes: Sequence[tuple[str, bytes | None]], world_size: int, finished: Collection[int] = ()
) -> Diagnosis | None:
    """Make a diagnosis from the evidence of all nodes. Evidence that cannot be decoded counts as missing.

    ``nodes`` is in the order of the group ranks. It has each node's name and its evidence, as encoded by
    :func:`.node_evidence.encode` (``None`` if the node did not answer). ``finished`` has the indexes of the
    nodes that have no evidence because their ranks have exited with code 0. Return ``None`` if there is
    neither a stuck collective nor a rank to blame.
    """
    facts: dict[int, RankFacts] = {}
    silent: list[tuple[str, bool]] = []
    first = 0

    def lose(end: int) -> None:
        # These ranks have no facts, because their nodes did not answer. If there are several such nodes, it
        # is unknown which of them a rank belongs to, so leave the name empty.
        name = silent[0][0] if len(silent) == 1 else ""
        have_exited = bool(silent) and all(has_finished for _, has_finished in silent)
        reason = NoRecord.EXITED if have_exited else NoRecord.LOST
        facts.update({rank: RankFacts(rank, name, reason) for rank in range(first, end)})
        silent.clear()

    for index, (name, encoded) in enumerate(nodes):
        found = {each.rank: each for each in decode(encoded) if first <= each.rank < world_size}
        if not found:
            silent.append((name, index in finished))
            continue
        lose(min(found))
        facts.update(found)
        first = max(found) + 1
    lose(world_size)
    return telling(facts.values())


def telling(facts: Iterable[RankFacts]) -> Diagnosis | None:
    """Diagnose why the ranks make no progress. Return ``None`` if no rank has a flight record, or if no
    collective is stuck and no rank is to blame.
    """
    facts = list(facts)
    if all(isinstance(found.record, NoRecord) for found in facts):
        return None
    try:
        diagnosis = judge(facts)
    # An error in this package must not hide the failure that it should explain.
    except Exception as error:
        return failed(error)
    return diagnosis if diagnosis.culprits or diagnosis.collectives else None


def _parsed(found: RankEvidence) -> RankRecord | NoRecord:
    if isinstance(found.records, NoRecord):
        return found.records
    try:
        record = parse(found.records, found.groups, has_raised=found.has_raised)
    except FlightRecordError:
        return NoRecord.DAMAGED
    # Without a record, the collectives that the rank has called are unknown, as if the recorder were off.
    return record if found.records else NoRecord.OFF


class Paragraph:
    """Writes the paragraph that tells the user the result of a diagnosis. ``stacks`` has the frames of each
    rank's main thread, innermost first.
    """

    def __init__(
        self,
        nodes: Mapping[int, str],
        stacks: Mapping[int, Sequence[Frame]],
        no_record: Mapping[int, NoRecord],
        culprits: Sequence[Culprit],
        stuck: Sequence[StuckCollective],
    ) -> None:
        self._nodes, self._stacks, self._no_record = nodes, stacks, no_record
        self._culprits, self._stuck = culprits, stuck
        self._named = {rank for culprit in culprits for rank in culprit.ranks}
        self._waiting = {rank for collective in stuck for rank in collective.waiting}

    def text(self) -> str:
        clauses = [self._clause(culprit) for culprit in self._culprits[:MAX_CULPRITS]]
        if len(self._culprits) > MAX_CULPRITS:
            more = sum(len(culprit.ranks) for culprit in self._culprits[MAX_CULPRITS:])
            clauses.append(f"{more} more rank{'s are' if more > 1 else ' is'} suspect")
        clauses += self._undecided()
        if not clauses:
            clauses.append(self._nothing())
        clauses += self._others()
        clauses += self._missing()
        return "; ".join(clauses)

    def _clause(self, culprit: Culprit) -> str:
        ranks, doubt = self.ranks(culprit.ranks), _LIKELIHOOD[culprit.confidence]
        they, them, are = ("they", "them", "are") if len(culprit.ranks) > 1 else ("it", "it", "is")
        if self._are_aborted(culprit.ranks):
            are = "were" if len(culprit.ranks) > 1 else "was"
        places = self._places(culprit.ranks)
        where = f": {they} {are} {places}" if places else ""
        collective = culprit.collective
        if collective is None:
            what = "for a send or receive of" if culprit.reason is Reason.NO_PEER else "for"
            return f"other ranks {doubt}wait {what} {ranks}{where}"
        if culprit.called is not None and culprit.expected is not None:
            others = sum(len(side.ranks) for side in collective.sides if side.call == culprit.expected)
            return (
                f"{ranks} {are} {doubt}out of step at {self._name(collective)}: "
                f"called {printable(str(culprit.called))}{self._at(culprit.ranks)} where {others:,} "
                f"rank{'s' if others > 1 else ''} called {printable(str(culprit.expected))}"
            )
        why = f"of which there is no record ({self._why(culprit.ranks)})"
        is_one = len(collective.waiting) == 1
        wait = f"{doubt}waits for" if is_one else f"{doubt}wait for"
        who = self.ranks(collective.waiting) if is_one else "the others"
        blame = {
            Reason.NO_RECORD: f"{doubt}because of {ranks}, {why}"
            if self._are_aborted(culprit.ranks)
            else f"{'it' if is_one else 'they'} {wait} {ranks}, {why}",
            Reason.NOT_STARTED: f"the devices of {ranks} have not started it",
            Reason.OUTSIDE: f"{ranks} {are} in no collective, so {who} {wait} {them}",
            Reason.OTHER_ORDER: f"{ranks} did not enter it and {doubt}skipped or reordered a collective",
        }
        if culprit.reason is Reason.OTHER_ORDER and not set(culprit.ranks) <= set(collective.absent):
            blame[Reason.OTHER_ORDER] = f"{ranks} {doubt}skipped, reordered or added a collective"
        not_entered = f"{ranks} did not enter it"
        if doubt:
            not_entered += f", and {who} {wait} {them}"
        return f"{self._waits(collective)}; {blame.get(culprit.reason, not_entered)}{where}"

    def _are_aborted(self, ranks: Iterable[int]) -> bool:
        return all(self._no_record.get(rank) is NoRecord.ABORTED for rank in ranks)

    def _undecided(self) -> list[str]:
        clauses = []
        for collective in self._stuck:
            sides = collective.sides
            free = [rank for rank in collective.absent if rank not in self._waiting]
            if sides and all(self._named.isdisjoint(side.ranks) for side in sides):
                calls = [f"{self.ranks(side.ranks)} called {printable(str(side.call))}" for side in sides]
                shown = " and ".join(calls[:MAX_CULPRITS])
                more = " and others differ" if len(calls) > MAX_CULPRITS else ""
                clauses.append(f"{shown}{more} as {self._name(collective)}: {_UNDECIDED}")
            elif collective.waiting and not sides and free and self._named.isdisjoint(collective.absent):
                where = self._places(free)
                clauses.append(
                    f"{self._waits(collective)}; {self.ranks(free)} did not enter it"
                    f"{f' ({where})' if where else ''}: {_UNDECIDED}"
                )
        return clauses[:MAX_CULPRITS]

    def _nothing(self) -> str:
        waiting = [collective for collective in self._stuck if collective.waiting]
        if not waiting:
            return "no rank waits in a collective that was recorded"
        first = max(waiting, key=lambda collective: len(collective.waiting))
        if not first.absent and not first.unknown and first.are_members_known:
            return f"{self._waits(first)}; all ranks of the group entered it, so no rank is to blame"
        if first.absent:
            waits = f"{self._waits(first)}; {self.ranks(first.absent)} did not enter it"
            also = "wait" if len(first.absent) > 1 else "waits"
            elsewhere = [
                f"{printable(other.operation)} {self._name(other)}{self._at(other.waiting)}"
                for other in waiting
                if other is not first and not set(first.absent).isdisjoint(other.waiting)
            ]
            where = (
                f"{also} in {' and '.join(elsewhere[:MAX_CULPRITS])}"
                if elsewhere
                else f"in turn {also} for others"
            )
            return f"{waits} and {where}: {_UNDECIDED}"
        return f"{self._waits(first)}; the evidence does not show which rank is missing"

    def _others(self) -> list[str]:
        """Return a sentence with the number of waiting ranks that the paragraph has not mentioned yet."""
        blamed_in = [culprit.collective for culprit in self._culprits if culprit.collective]
        told = self._named.union(*(collective.waiting for collective in blamed_in))
        told = told.union(*(side.ranks for collective in blamed_in for side in collective.sides))
        others = self._waiting - told
        if not told or not others:
            return []
        return [f"{len(others):,} more rank{'s wait' if len(others) > 1 else ' waits'} in other collectives"]

    def _missing(self) -> list[str]:
        named = {rank for each in self._culprits if each.reason is Reason.NO_RECORD for rank in each.ranks}
        missing = [rank for rank in self._no_record if rank not in named]
        return [f"no record of {self.ranks(missing)} ({self._why(missing)})"] if missing else []

    def _why(self, ranks: Iterable[int]) -> str:
        """Return why these ranks' calls are unknown: there is no record, or later calls overwrote them."""
        reasons = dict.fromkeys(self._no_record.get(rank) for rank in ranks)
        return ", ".join(_WHY_NO_RECORD[why] if why else "overwritten by later calls" for why in reasons)

    def _waits(self, collective: StuckCollective) -> str:
        waiting, members = collective.waiting, len(collective.members)
        of = f" of {members:,}" if collective.are_members_known else ""
        who = f"{len(waiting):,}{of} ranks wait" if len(waiting) > 1 else f"{self.ranks(waiting)} waits"
        operation = printable(collective.operation)
        return f"{who} in {operation} {self._name(collective)}{self._at(waiting)}"

    def _name(self, collective: StuckCollective) -> str:
        return f"#{collective.seq:,} of {self._group(collective)}"

    def _group(self, collective: StuckCollective) -> str:
        if collective.description == DEFAULT_GROUP:
            return "the default group"
        name = collective.description
        if name in ("", "undefined"):
            name = collective.group
        twins = {other.members for other in self._stuck if other.description == collective.description}
        which = f" ({ranks_text(collective.members)})" if len(twins) > 1 else ""
        return f'group "{printable(name)}"{which}'

    def _at(self, ranks: Sequence[int]) -> str:
        """Return the program line at which most of the ranks are, such as `` (train.py:88)``; or no text."""
        frames = [program_frame(self._stacks.get(rank, ())) for rank in ranks]
        lines = [line(frame) for frame in frames if frame is not None]
        best = most_frequent(lines) if lines else ""
        return f" ({best})" if 2 * lines.count(best) > len(ranks) else ""

    def _places(self, ranks: Sequence[int]) -> str:
        by_place: dict[str, list[int]] = {}
        for rank in ranks:
            if self._stacks.get(rank):
                by_place.setdefault(f"in {place(self._stacks[rank])}", []).append(rank)
        order = sorted(by_place, key=lambda text: (-len(by_place[text]), by_place[text]))
        if len(order) == 1:
            return order[0]
        shown = [f"{text} ({ranks_text(by_place[text])})" for text in order[:MAX_PLACES]]
        if len(order) > MAX_PLACES:
            more = len(order) - MAX_PLACES
            shown.append(f"in {more:,} other place{'s' if more > 1 else ''}")
        return ", ".join(shown)

    def ranks(self, ranks: Sequence[int]) -> str:
        nodes = list(dict.fromkeys(self._nodes[rank] for rank in ranks if rank in self._nodes))
        if len(set(self._nodes.values())) == 1:
            return ranks_text(ranks)
        shown = ", ".join(map(printable, nodes)) if len(nodes) <= _MAX_NODES else f"{len(nodes)} nodes"
        return f"{ranks_text(ranks)} ({shown})" if nodes else ranks_text(ranks)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ascending ranks, such as ``ranks 0-6, 8 and 12 more``."""
    return phrases.ranks_text(ranks, MAX_SPANS)
