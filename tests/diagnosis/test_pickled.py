"""Decoding of pickles without unpickling them. Arbitrary bytes lead to plain values or an error."""

import os
import pickle
import pickletools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.hangs.flight_record import (
    MAX_OPERATIONS,
    Damage,
    FlightRecordError,
    PickledError,
    parse,
    plain,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=9)
    | st.floats(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_are_decoded(value):
    assert plain(pickle.dumps(value, 2)) == value


def test_a_list_that_contains_itself_is_decoded_without_the_cycle():
    value = [1]
    value.append(value)
    assert plain(pickle.dumps(value, 2)) == [1, []]


def test_tuples_become_lists_and_shared_flat_values_become_copies():
    frame = {"name": "step", "line": 88}
    found = plain(pickle.dumps([(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), frame, frame], 2))
    assert found == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], frame, frame]
    assert found[-1] is not found[-2]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/nonexistent/never",)


def nested(depth):
    value = [1]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        Evil(),
        [{"a": Evil()}],
        {1, 2},
        b"bytes",
        os.getcwd,
        threading.Thread,
        nested(40),
        {None: 1},
        {(1,): 2},
    ],
    ids=["call", "calls", "set", "bytes", "function", "class", "nested", "none key", "tuple key"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_values_that_are_not_plain_are_refused(value, protocol):
    with pytest.raises(PickledError):
        plain(pickle.dumps(value, protocol))


@given(st.binary(max_size=80))
def test_any_bytes_give_a_plain_value_or_an_error(data):
    for start in (b"", b"\x80\x02"):
        try:
            found = plain(start + data)
        except PickledError:
            continue
        assert pickle.loads(pickle.dumps(found)) == found or found != found


@given(VALUES, st.data())
def test_a_corrupted_pickle_gives_a_plain_value_or_an_error(value, data):
    whole = bytearray(pickle.dumps([value, "x"], 2))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = plain(bytes(whole))
    except PickledError:
        return
    assert type(found) in (list, dict, str, int, bool, float, type(None))


OPERATIONS = {operation.name: operation.code.encode("latin-1") for operation in pickletools.opcodes}


@pytest.mark.parametrize(
    "name",
    [
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "BUILD",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "PERSID",
        "BINPERSID",
        "EXT1",
        "EXT2",
        "EXT4",
    ],
)
def test_operations_that_run_code_are_refused(name):
    arguments = {
        "GLOBAL": b"os\nmkdir\n",
        "INST": b"os\nmkdir\n",
        "PERSID": b"0\n",
        "EXT1": b"\1",
        "EXT2": b"\1\0",
        "EXT4": b"\1\0\0\0",
    }
    with pytest.raises(PickledError, match=name):
        plain(b"\x80\x02(" + OPERATIONS[name] + arguments.get(name, b"") + b".")


def test_the_number_of_operations_is_limited():
    with pytest.raises(PickledError, match="opcodes"):
        plain(b"\x80\x02]" + b"Na" * MAX_OPERATIONS + b".")
    copies = pickle.dumps([1] * 1000, 2)[:-1] + b"q\x01(" + b"h\x01" * 5000 + b"l."
    with pytest.raises(PickledError):
        plain(copies)


DUMP = """
import json, sys, torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
store = distributed.FileStore(sys.argv[1] + "/store", 1)
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
for _ in range(3):
    distributed.all_reduce(torch.ones(4))
distributed.barrier(distributed.new_group([0], group_desc="dp"))
# A thread of gloo marks the barrier as retired, maybe after the barrier has returned.
while not all(entry["retired"] for entry in json.loads(c10d._dump_fr_trace_json())["entries"]):
    pass
for name, dump in (("pickle", c10d._dump_fr_trace), ("json", c10d._dump_fr_trace_json)):
    content = dump()
    with open(f"{sys.argv[1]}/{name}", "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
distributed.destroy_process_group()
"""


@pytest.mark.torch
def test_a_pickle_and_a_json_dump_of_torch_give_the_same_record(tmp_path, torch_programs):
    torch_programs.checked(DUMP, str(tmp_path))
    record = parse((tmp_path / "pickle").read_bytes())
    assert record == parse((tmp_path / "json").read_bytes())
    assert [entry.operation for entry in record.entries] == ["all_reduce"] * 3 + ["barrier"]


def test_a_pickle_that_is_not_a_record_is_reported_as_damaged():
    for value, damage in (
        (Evil(), Damage.NOT_PLAIN),
        ([], Damage.INVALID),
        ({"version": "3.0"}, Damage.UNSUPPORTED),
    ):
        with pytest.raises(FlightRecordError) as raised:
            parse(pickle.dumps(value, 2))
        assert raised.value.damage is damage
