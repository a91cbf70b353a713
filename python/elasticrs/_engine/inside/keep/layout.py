"""The layout of the file (a memfd of the agent, one for each rank) in which a worker keeps its state.

All words are little-endian and have 8 bytes. The agent and the worker import this module. The agent
does so at its start, so this module imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE = "ELASTICRS_KEEP"
"""Variable of the worker: ``{mark}:{path of the file}``."""

WORD = 8
PAGE = 4096
HEAD_SIZE = PAGE
"""Bytes of the file's head, and of a slot's head."""

PLAN_AT = HEAD_SIZE
"""Offset of the plan: a word with its length, and then JSON, which the agent writes before each attempt."""

REGIONS_AT = 65536
"""Offset of the first region (ring or slot). Also the size of a new file."""

MAX_PLAN = REGIONS_AT - PLAN_AT - WORD

MAGIC = 0x45504C534B454550
SLOT_MAGIC = 0x45504C53534C4F54
SLOTS = 2


class Head:
    """Indices of the words of the file's head. Steps are stored plus 1, because 0 stands for none."""

    MAGIC = 0
    MARK = 1
    """Random number that the agent has also put into the worker's environment."""
    PID = 2
    """Process that has joined. The agent writes 0 before each attempt."""
    RANK = 3
    """Global rank plus 1."""
    WORLD = 4
    ENDED = 5
    """The last step that has ended."""
    MODE = 6
    """What the program says about its state: a code of :class:`Mode`."""
    NEXT = 7
    """The step of the next periodic copy of all ranks, which rank 0 announces in its file."""
    COPIES = 8
    FAILED_COPIES = 9
    """Copies that failed or were skipped."""
    BLOCKED_NS = 10
    """Nanoseconds for which copies have blocked the training."""
    LAST_BYTES = 11
    LAST_NS = 12
    """Bytes and duration of the last copy."""
    ANSWER = 13
    """Answer to the last order to copy: a code of :class:`Answer`."""
    CHECK_STEP = 14
    CHECK_DIGEST = 15
    """Step and digest of the first periodic copy. They are equal on all ranks if the state is replicated."""
    TABLE = 16
    """First of six words: offset and capacity of the ring, of slot 0, and of slot 1."""
    RESTORED = 22
    """The step from which this attempt goes on."""
    ATTEMPT = 23
    ENDED_AT = 24
    """Monotonic nanoseconds at which the last step ended."""
    WAS_REPLICATED = 25
    """1 if the ranks have agreed on a replicated copy in this job. No attempt clears it."""
    COUNT = 26


class Mode:
    """Whether each rank has the whole state."""

    AUTO = 0
    REPLICATED = 1
    SHARDED = 2


class Answer:
    """How a worker answered the order to copy its state."""

    NONE = 0
    KEPT = 1
    CHANGING = 2
    """The optimizer was writing, and the step did not end in time."""
    NOTHING = 3
    """No step had ended, or copies at death are off."""
    NO_MEMORY = 4
    TENSOR_CHANGED = 5
    FAILED = 6


class Slot:
    """Indices of the words of a slot's head. The index (a pickle) and the data follow the head."""

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
    """Offset of the data from the start of the slot."""
    DATA_LENGTH = 9
    DIGEST = 10
    """Sum of the data's words, modulo 2 to the power of 64."""
    SEQUENCE = 11
    """Grows with each copy into this file."""
    WHY = 12
    """A code of :class:`Why`."""
    WALL_NS = 13
    """Wall-clock time of the copy in nanoseconds."""
    COUNT = 14


class SlotState:
    """Whether a slot can be read. ``WRITING`` is stored first, and ``COMPLETE`` last."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


class Why:
    """What caused a copy."""

    PERIODIC = 0
    AT_DEATH = 1


RECORDS = 4
"""Number of records in a ring: two for each step, of two steps."""

RECORD_HEAD = 3 * WORD
"""Bytes of a record's head: its step plus 1, and length and CRC-32 of the bytes that follow."""


def record_number(step: int, is_end: bool) -> int:
    """Return the place in the ring of a record. ``is_end`` is false for a record that was written before the
    optimizer of the step ran.
    """
    return (step * 2 + is_end) % RECORDS


def record_at(number: int, capacity: int) -> int:
    """Return the offset of a record from the start of a ring of ``capacity`` bytes."""
    return number * record_size(capacity)


def record_size(capacity: int) -> int:
    """Return the bytes of one record, with its head, in a ring of ``capacity`` bytes."""
    return capacity // RECORDS // WORD * WORD


def pack(words: Sequence[int]) -> bytes:
    """Return the bytes of words."""
    return b"".join(word.to_bytes(WORD, "little") for word in words)


def unpack(data: bytes) -> tuple[int, ...]:
    """Return the words in ``data``, without an incomplete one at its end."""
    ends = range(WORD, len(data) + 1, WORD)
    return tuple(int.from_bytes(data[end - WORD : end], "little") for end in ends)
