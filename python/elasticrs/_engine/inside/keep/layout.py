"""Layout of the file into which a worker copies its training state. It is a file in memory (a memfd) that the
agent owns, and there is one for each rank.

The numbers in the file (*words*) have 8 bytes and are little-endian. The agent imports this module at its
start, which must be fast, so this module imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

VARIABLE = "ELASTICRS_KEEP"
"""Environment variable of the worker. Its value is ``{mark}:{path of the file}``."""

KEPT_VARIABLE = "ELASTICRS_KEPT"
"""Environment variable of the worker: the newest step that this attempt may restore. It is not set if nothing
is kept. A worker that cannot read its file, which has the plan, knows from it if other ranks may restore.
"""

UNUSABLE = "elasticrs._engine.inside.keep.file.UnusableError"
"""Name of the exception that a rank raises if it cannot use its file, but other ranks may restore a step."""

WORD = 8
PAGE = 4096
HEAD_SIZE = PAGE
"""Size in bytes of the head of the file, and of the head of each slot (a region with one copy)."""

PLAN_AT = HEAD_SIZE
"""Offset of the plan (what the worker is to restore, by the agent): a word with its length, then JSON."""

REGIONS_AT = 65536
"""Offset of the first region (ring or slot). Also the size of a new file."""

MAX_PLAN = REGIONS_AT - PLAN_AT - WORD

MAGIC = 0x45504C534B454550
SLOT_MAGIC = 0x45504C53534C4F54
SLOTS = 2


REASON_AT = 2048
"""Offset of a text: why the worker stopped copying its state, or could not load the copied state."""

MAX_REASON = 512


class Head:
    """Indices of the words in the head of the file. A step is stored as its number plus 1; 0 is no step."""

    MAGIC = 0
    MARK = 1
    """Random number that the agent has also put into the worker's environment."""
    PID = 2
    """Pid of the worker process that uses the file. The agent writes 0 before each attempt."""
    RANK = 3
    """Global rank plus 1."""
    WORLD = 4
    ENDED = 5
    """The last training step that this rank has completed."""
    MODE = 6
    """Code of :class:`Mode`: whether the program says that all ranks have the same state."""
    NEXT = 7
    """Step at which all ranks make the next periodic copy. Rank 0 announces it in its own file."""
    COPIES = 8
    FAILED_COPIES = 9
    """Number of copies that failed or were skipped."""
    BLOCKED_NS = 10
    """Nanoseconds for which copies have blocked the training."""
    LAST_BYTES = 11
    LAST_NS = 12
    """Bytes and duration of the last copy."""
    ANSWER = 13
    """Code of :class:`Answer`: what the worker answered when the agent last ordered it to copy its state."""
    CHECK_STEP = 14
    CHECK_DIGEST = 15
    """Step and checksum of a copy. If all ranks have the same state, these words are equal in all files."""
    TABLE = 16
    """First of six words: offset and size of the ring (records of random numbers and the like), of slot 0,
    and of slot 1.
    """
    RESTORED = 22
    """The step that the worker has restored in this attempt."""
    ATTEMPT = 23
    ENDED_AT = 24
    """Time at which the last step was completed, in nanoseconds of the monotonic clock."""
    CHANGES = 25
    """Number of times that an optimizer changed the parameters before the end of the first training step."""
    REASON_LENGTH = 26
    """Length in bytes of the text at :data:`REASON_AT`; 0 if there is no text."""
    REFUSED = 27
    """The step whose copy the worker could not load at the start of this attempt."""
    IS_AGREED = 28
    """1 if the workers of all nodes have agreed on the step to restore, and have written it into the plan."""
    SECURED = 29
    """The newest step that can be restored after the loss of any one node (``--keep-peers``): each rank has a
    copy of this step, and each copy has an equal one on another node.
    """
    WAS_REPLICATED = 30
    """1 if the ranks of several nodes have found that they all have the same state. Never reset."""
    TWINS = 31
    """First of three words that say which ranks have the same part of a sharded state as this rank: the first
    of these ranks, the distance from each to the next, and their number. All three words are 0 if no other
    rank has the same part. Never reset.
    """
    DAMAGED = 34
    """The newest step of which a worker has found a damaged copy in this file, and has deleted it."""
    GIVEN_UP = 35
    """The step of which this rank is about to overwrite its copy. Other ranks do not count on that copy any
    more, although it is still complete.
    """
    COUNT = 36


class Agreed:
    """Indices of further words in the head of the file. With them, the agent and the worker agree on the
    training step after which the agent sends a signal to all ranks.
    :mod:`elasticrs._engine.inside.boundary` describes how.
    """

    NUMBER = 64
    """Number of the agent's request for such a step. The agent writes this word and those up to ``SENT``."""
    STATE = 65
    """Code of :class:`AgreedState`: what the worker is to do at the end of a step."""
    STEP = 66
    """The chosen step: the number of training steps after which the ranks get the signal."""
    SIGNAL = 67
    UNTIL = 68
    """Time until which the ranks wait for the signal, in nanoseconds of the monotonic clock."""
    SENT = 69
    """Number of the last request for whose signal the ranks have waited, and whose signal the agent has sent.
    The agent may ask for the next one before the signal arrives.
    """
    NODE_LEAVES = 70
    """1 if a node leaves the job at this step, and the others continue. The agent writes this word, too."""
    OWNER = 72
    """Pid of the worker process whose steps are counted. The worker writes this word and those after it."""
    STEPS = 73
    """Number of training steps that this process has completed."""
    TIME = 74
    """Time at which a step ended, in nanoseconds of the monotonic clock. If steps take more than a
    millisecond, this is the end of the last step, and otherwise that of a step up to 64 steps before.
    """
    DURATION = 75
    """Nanoseconds that a recent step took; 0 if that is not known yet."""
    READY = 76
    """Number of the request for which this rank has stopped after the chosen step, and awaits the signal."""
    MISSED = 77
    """Number of the agent's request that this rank could not follow, because it had already passed the chosen
    step, or had waited too long for the agent's choice.
    """
    READY_AT = 78
    """Time (nanoseconds of the monotonic clock) at which this rank began to wait for the agent's signal."""
    PAUSED = 79
    """Nanoseconds that this rank has waited at ends of steps until the agents chose a step to stop at."""
    END = 80


class AgreedState:
    """What the agent tells the ranks to do at the end of a training step."""

    NONE = 0
    WAIT = 1
    """Wait until the agents of all nodes have chosen the step after which the ranks get the signal."""
    ACT = 2
    """Train until the chosen step is complete. Then wait for the signal at the start of the next step."""
    SENT = 3
    """The agent is sending the signal to the ranks."""


class Mode:
    """Whether all ranks have the same state (replicated), or each a part of it (sharded)."""

    AUTO = 0
    REPLICATED = 1
    SHARDED = 2


class Answer:
    """What a worker answers when the agent orders it to copy its state."""

    NONE = 0
    KEPT = 1
    CHANGING = 2
    """The optimizer was changing the state, and did not finish in time."""
    NOTHING = 3
    """No training step was complete, or the worker makes only periodic copies."""
    NO_MEMORY = 4
    TENSOR_CHANGED = 5
    FAILED = 6
    KILLED = 7
    """The process that made the copy was ended by a signal."""
    APART = 8
    """Other ranks of this node had not restored the step that this rank has restored."""


class Slot:
    """Indices of the words in the head of a slot, which holds one copy. After the head come the index (a
    pickle that names the tensors) and the data of the tensors.
    """

    MAGIC = 0
    STATE = 1
    """A code of :class:`SlotState`."""
    STEP = 2
    ATTEMPT = 3
    RANK = 4
    WORLD = 5
    LAYOUT = 6
    """Hash of the names, types and shapes of the tensors."""
    INDEX_LENGTH = 7
    DATA_AT = 8
    """Offset of the tensors' data from the start of the slot."""
    DATA_LENGTH = 9
    DIGEST = 10
    """Checksum: the sum of the data's words, modulo 2 to the power of 64."""
    SEQUENCE = 11
    """Number of the copy among all copies that were ever written into this file."""
    WHY = 12
    """A code of :class:`Why`."""
    WALL_NS = 13
    """Time of the copy, in nanoseconds of the wall clock."""
    COUNT = 14


class SlotState:
    """State of a slot. A copy begins with storing ``WRITING``, and ends with storing ``COMPLETE``."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


class Why:
    """Reason why a worker copied its training state. ``PERIODIC``: a periodic copy was due. ``AT_DEATH``: the
    worker was about to end because of a failure. ``AT_STOP``: the agent had planned to stop all workers, for
    example to let a node leave.
    """

    PERIODIC = 0
    AT_DEATH = 1
    AT_STOP = 2


RECORDS = 6
"""Number of records in the ring: two for each of the last two steps, and those of :data:`RESTORED` and
:data:`COPIED`.
"""

RESTORED, COPIED = 4, 5
"""Positions in the ring of the records of the restored step, and of the last step that had a periodic copy.
They were written when the rank had restored its state, and at the end of that step. Records of later steps do
not replace them. A rank may have no copy of its own of these steps: it has restored that of another rank, or
has died during its next copy. Then it restores the copy of another rank, but needs its own random numbers.
"""

RECORD_HEAD = 3 * WORD
"""Size in bytes of a record's head. Its words are the step plus 1, and length and CRC-32 of the content."""


def record_number(step: int, is_end: bool) -> int:
    """Return the position of a record among the records of the ring. ``is_end`` is true if the record was
    written at the end of the step, and false if it was written before the optimizer ran.
    """
    return (step * 2 + is_end) % RESTORED


def record_at(number: int, capacity: int) -> int:
    """Return the offset of a record from the start of the ring. The ring has ``capacity`` bytes."""
    return number * record_size(capacity)


def record_size(capacity: int) -> int:
    """Return the size of one record, with its head, if the ring has ``capacity`` bytes."""
    return capacity // RECORDS // WORD * WORD


def records(read: Callable[[int, int], bytes], capacity: int) -> Iterator[tuple[int, bool, int, int, int]]:
    """Find the records of a rank's random numbers and the like. They are in the ring, a region of
    ``capacity`` bytes in the rank's file, where new records overwrite old ones. ``read(offset, length)``
    reads from this region. For each record, yield its step, ``is_end`` (see :func:`record_number`), the
    offset and length of its content, and its CRC-32. If the content has another CRC-32, the record is
    incomplete.
    """
    room = record_size(capacity) - RECORD_HEAD
    for number in range(RECORDS if room > 0 else 0):
        at, is_end = record_at(number, capacity), number >= RESTORED or bool(number % 2)
        step, length, crc = unpack(read(at, RECORD_HEAD))
        is_own_place = number >= RESTORED or number == record_number(step - 1, is_end)
        if step and 0 < length <= room and is_own_place:
            yield step - 1, is_end, at + RECORD_HEAD, length, crc


def pack(words: Sequence[int]) -> bytes:
    """Convert 8-byte numbers to bytes."""
    return b"".join(word.to_bytes(WORD, "little") for word in words)


def unpack(data: bytes) -> tuple[int, ...]:
    """Convert bytes to 8-byte numbers. Ignore up to 7 bytes at the end that are no whole number."""
    ends = range(WORD, len(data) + 1, WORD)
    return tuple(int.from_bytes(data[end - WORD : end], "little") for end in ends)


def is_prepared(head: bytes, size: int, mark: int) -> bool:
    """Return true if a file belongs to the agent that has told this worker ``mark``, and has the first plan.
    ``head`` is the file's first two words, and ``size`` its number of bytes.
    """
    return unpack(head) == (MAGIC, mark) and size >= REGIONS_AT
