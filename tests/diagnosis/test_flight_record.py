"""Parsing of flight records: real records and arbitrary input."""

import json
import os
import pickle
import pickletools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.model import dump, entry
from diagnosis.recorded_evidence import recorded
from elasticrs._engine.hangs import flight_record
from elasticrs._engine.hangs.flight_record import (
    MAX_OPERATIONS,
    Damage,
    Entry,
    FlightRecord,
    FlightRecordError,
    PickledError,
    State,
    parse,
    plain,
)

REAL = recorded("skipped")[0].records[0]


def damage(data):
    with pytest.raises(FlightRecordError) as caught:
        parse(data)
    return caught.value.damage, caught.value.where


def test_a_real_flight_record_is_parsed():
    first, second, third = parse(REAL).entries
    assert first == Entry(
        backend="gloo",
        operation="all_reduce",
        group_id=0,
        group_name="0",
        group_description="default_pg",
        collective_seq_id=1,
        is_p2p=False,
        input_sizes=((4,),),
        input_dtypes=("Float",),
        state=State.SCHEDULED,
        retired=True,
    )
    assert (second.operation, second.input_sizes, second.is_complete) == ("barrier", (), True)
    assert (third.collective_seq_id, third.is_complete) == (3, False)


def test_a_record_without_entries_is_empty():
    assert parse(dump([])) == FlightRecord((), False, {})


def test_overwritten_entries_mark_the_record_as_truncated():
    assert parse(dump([entry(record_id=7)])).is_truncated
    assert not parse(dump([entry(record_id=0), entry(record_id=1)])).is_truncated


def test_only_named_groups_have_members():
    config = {
        "": {"name": "", "desc": "", "ranks": "[0, 1]"},
        "5": {"name": "5", "desc": "tp", "ranks": "[4, 5, 6]"},
        "9": {"name": "9", "desc": "solo", "ranks": "[]"},
    }
    assert parse(dump([], pg_config=config)).members == {"5": (4, 5, 6), "9": ()}


@pytest.mark.parametrize(
    ("backend", "state", "retired", "is_complete"),
    [
        ("gloo", "scheduled", False, False),
        ("gloo", "scheduled", True, True),
        ("nccl", "scheduled", False, False),
        ("nccl", "started", False, False),
        ("nccl", "completed", False, True),
        ("nccl", "completed", True, True),
        ("nccl", "started", True, False),  # the operation timed out
    ],
)
def test_completion_is_derived_from_the_fields_of_each_backend(backend, state, retired, is_complete):
    (found,) = parse(dump([entry(name=f"{backend}:all_reduce", state=state, retired=retired)])).entries
    assert found.is_complete is is_complete


def test_a_truncated_record_is_refused_wherever_it_ends():
    for end in range(0, len(REAL), 7):
        assert damage(REAL[:end])[0] is Damage.NOT_JSON


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", Damage.NOT_JSON),
        (b"\x80\x02}q\x00.", Damage.INVALID),  # a pickle
        (b"\x80\x02cos\nmkdir\n.", Damage.NOT_PLAIN),
        (b"\x80\x02", Damage.NOT_PLAIN),
        (b"\x80" + b" " * flight_record.MAX_BYTES, Damage.TOO_LARGE),
        (b'{"version": "2.10", "entries": NaN}', Damage.NOT_JSON),
        (b'{"version": "2.10", "entries": ' + b"9" * 5000 + b"}", Damage.NOT_JSON),
        (b"[" * 100_000, Damage.TOO_DEEP),
        (b'{"version":"2.1","pg_config":' + b'{"a":' * 50_000, Damage.TOO_DEEP),
        (b" " * (flight_record.MAX_BYTES + 1), Damage.TOO_LARGE),
        (b"[" + b"{}," * flight_record.MAX_CONTAINERS + b"{}]", Damage.TOO_LARGE),
        (b"[]", Damage.INVALID),
        (b"{}", Damage.INVALID),
        (b'{"version": "3.0"}', Damage.UNSUPPORTED),
        (b'{"version": "2.1", "entries": {}}', Damage.INVALID),
        (b'{"version": "2.1", "pg_config": []}', Damage.INVALID),
    ],
)
def test_invalid_data_is_refused_with_its_kind_of_damage(data, kind):
    assert damage(data)[0] is kind


def test_too_many_entries_are_refused():
    data = dump([0] * (flight_record.MAX_ENTRIES + 1))
    assert damage(data) == (Damage.TOO_LARGE, f"{flight_record.MAX_ENTRIES + 1} entries")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("collective_seq_id", "1"),
        ("collective_seq_id", -1),
        ("collective_seq_id", True),
        ("collective_seq_id", 1 << 63),
        ("collective_seq_id", 1.5),
        ("pg_id", None),
        ("process_group", ["0"]),
        ("process_group", ["0", 1]),
        ("process_group", ["0", "x" * 2000]),
        ("profiling_name", None),
        ("profiling_name", "x" * 2000),
        ("input_sizes", [4]),
        ("input_sizes", [["4"]]),
        ("input_sizes", [[2] * 65]),
        ("input_sizes", [[True]]),
        ("input_sizes", None),
        ("input_dtypes", [1]),
        ("state", "done"),
        ("retired", 0),
        ("is_p2p", "no"),
    ],
)
def test_an_invalid_field_is_named_in_the_error(field, value):
    assert damage(dump([entry(), {**entry(), field: value}])) == (Damage.INVALID, f"entries[1].{field}")


@pytest.mark.parametrize("ranks", ["0, 1", "[0, -1]", "[0x1]", "[" + "9" * 20 + "]", 7, "[\u0661]"])
def test_invalid_group_members_are_refused(ranks):
    config = {"5": {"name": "5", "desc": "", "ranks": ranks}}
    assert damage(dump([], pg_config=config)) == (Damage.INVALID, "pg_config.5.ranks")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted(entry()))


@given(st.binary(max_size=300))
def test_any_bytes_give_a_record_or_a_flight_record_error(data):
    try:
        found = parse(data)
    except FlightRecordError:
        return
    assert isinstance(found, FlightRecord)


@given(st.dictionaries(FIELDS, VALUES, max_size=3), st.sets(FIELDS, max_size=2))
def test_any_entry_gives_the_declared_types_or_a_flight_record_error(changed, missing):
    raw = {field: value for field, value in {**entry(), **changed}.items() if field not in missing}
    try:
        (found,) = parse(json.dumps({"version": "2.10", "entries": [raw]}).encode()).entries
    except FlightRecordError:
        return
    assert isinstance(found.state, State)
    assert {type(found.group_id), type(found.collective_seq_id)} == {int}
    assert {type(found.retired), type(found.is_p2p)} == {bool}
    assert all(type(size) is int for sizes in found.input_sizes for size in sizes)
    assert all(type(name) is str for name in (found.operation, found.group_name, *found.input_dtypes))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=9)
    | st.floats(allow_nan=False)
)
PLAIN_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN_VALUES)
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


@given(PLAIN_VALUES, st.data())
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
