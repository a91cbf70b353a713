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
    Call,
    FlightRecordError,
    GroupSteps,
    RankRecord,
    Step,
    Transfer,
    parse,
    plain,
)

REAL = recorded("skipped")[0].records[0]


def refusal(*records):
    """Return the error text for invalid records."""
    with pytest.raises(FlightRecordError) as caught:
        parse(records)
    return str(caught.value)


def only_step(*entries):
    """Return the only step of a record with these entries."""
    (group,) = parse([dump(entries)]).groups.values()
    (step,) = group.steps.values()
    return step


def test_a_real_flight_record_is_parsed():
    steps = {
        1: Step(Call("all_reduce", 4, ("Float",)), is_complete=True, is_started=False),
        2: Step(Call("barrier"), is_complete=True, is_started=False),
        3: Step(Call("all_reduce", 4, ("Float",)), is_complete=False, is_started=False),
    }
    assert parse([REAL]) == RankRecord({("gloo", "0"): GroupSteps("default_pg", steps)})


def test_a_record_without_entries_is_empty():
    assert parse([dump([])]) == RankRecord({})


def test_point_to_point_operations_that_have_not_completed_are_transfers():
    waits = [
        entry(name=f"nccl:{name}", is_p2p=True) for name in ("recv 0<-1", "send 0->12", "recv 0<-1", "new")
    ]
    done = entry(name="nccl:send 0->2", is_p2p=True, state="completed")
    found = parse([dump([*waits, done])])
    assert found.groups == {}
    assert found.transfers == tuple(Transfer("0", "default_pg", peer) for peer in (1, 12, None))


def test_overwritten_entries_mark_the_record_as_truncated():
    assert parse([dump([entry(record_id=7)])]).is_truncated
    assert not parse([dump([entry(record_id=0), entry(record_id=1)])]).is_truncated


def test_only_named_groups_have_members():
    config = {
        "": {"name": "", "desc": "", "ranks": "[0, 1]"},
        "5": {"name": "5", "desc": "tp", "ranks": "[4, 5, 6]"},
        "9": {"name": "9", "desc": "solo", "ranks": "[]"},
    }
    entries = [entry(group=(name, "")) for name in ("0", "5", "9")]
    assert parse([dump(entries, pg_config=config)]).members == {"5": (4, 5, 6)}
    # A worker knows the members of its groups, but the record comes first.
    assert parse([dump(entries, pg_config=config)], {"0": [1, 0], "5": [7], "8": [1]}).members == {
        "0": (0, 1),
        "5": (4, 5, 6),
    }


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
    found = only_step(entry(name=f"{backend}:all_reduce", state=state, retired=retired))
    assert found.is_complete is is_complete
    assert found.is_started is (state != "scheduled")


def test_a_truncated_record_is_refused_wherever_it_ends():
    for end in range(0, len(REAL), 7):
        refusal(REAL[:end])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", ""),
        (b"\x80\x02}q\x00.", "version"),
        (b"\x80\x02cos\nmkdir\n.", "opcode GLOBAL"),
        (b"\x80\x02", ""),
        (b"\x80" + b" " * flight_record.MAX_BYTES, "bytes"),
        (b'{"version": "2.10", "entries": NaN}', "NaN"),
        (b'{"version": "2.10", "entries": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 100_000, "deep"),
        (b'{"version":"2.1","pg_config":' + b'{"a":' * 50_000, "deep"),
        (b" " * (flight_record.MAX_BYTES + 1), "bytes"),
        (b"[" + b"{}," * flight_record.MAX_CONTAINERS + b"{}]", "objects"),
        (b"[]", "the record"),
        (b"{}", "version"),
        (b'{"version": "3.0"}', "version"),
        (b'{"version": "2.1", "entries": {}}', "entries"),
        (b'{"version": "2.1", "pg_config": []}', "pg_config"),
        (dump([0] * (flight_record.MAX_ENTRIES + 1)), f"{flight_record.MAX_ENTRIES + 1} entries"),
        *[
            (pickle.dumps(value, 2), why)
            for value, why in (([], "the record"), ({"version": "3.0"}, "version"))
        ],
    ],
)
def test_invalid_data_is_refused(data, why):
    assert why in refusal(data)


def test_a_group_whose_name_is_no_text_is_ignored():
    """JSON has only text as names, but a pickle may have numbers."""
    config = {5: {"name": 5, "ranks": "[0]"}, 6: {"name": 6, "ranks": "0"}}
    assert parse([pickle.dumps({"version": "2.10", "pg_config": config}, 2)]) == RankRecord({})


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
    assert refusal(dump([entry(), {**entry(), field: value}])) == field


@pytest.mark.parametrize("ranks", ["0, 1", "[0, -1]", "[0x1]", "[" + "9" * 20 + "]", 7, "[\u0661]"])
def test_invalid_group_members_are_refused(ranks):
    config = {"5": {"name": "5", "desc": "", "ranks": ranks}}
    assert refusal(dump([], pg_config=config)) == "pg_config.5.ranks"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted(entry()))


@given(st.binary(max_size=300))
def test_any_bytes_give_a_record_or_a_flight_record_error(data):
    try:
        found = parse([data])
    except FlightRecordError:
        return
    assert isinstance(found, RankRecord)


@given(st.dictionaries(FIELDS, VALUES, max_size=3), st.sets(FIELDS, max_size=2))
def test_any_entry_gives_the_declared_types_or_a_flight_record_error(changed, missing):
    raw = {field: value for field, value in {**entry(), **changed}.items() if field not in missing}
    try:
        found = parse([json.dumps({"version": "2.10", "entries": [raw]}).encode()])
    except FlightRecordError:
        return
    texts = [text for key in found.groups for text in key]
    for group in found.groups.values():
        ((seq, step),) = group.steps.items()
        texts += [group.description, step.call.operation, *step.call.dtypes]
        assert type(seq) is int
        assert type(step.call.elements) in (int, type(None))
        assert {type(step.is_complete), type(step.is_started)} == {bool}
    for transfer in found.transfers:
        texts += [transfer.group, transfer.description]
        assert type(transfer.peer) in (int, type(None))
    assert all(type(text) is str for text in texts)


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
    with pytest.raises(FlightRecordError):
        plain(pickle.dumps(value, protocol))


@given(st.binary(max_size=80))
def test_any_bytes_give_a_plain_value_or_an_error(data):
    for start in (b"", b"\x80\x02"):
        try:
            found = plain(start + data)
        except FlightRecordError:
            continue
        assert pickle.loads(pickle.dumps(found)) == found or found != found


@given(PLAIN_VALUES, st.data())
def test_a_corrupted_pickle_gives_a_plain_value_or_an_error(value, data):
    whole = bytearray(pickle.dumps([value, "x"], 2))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = plain(bytes(whole))
    except FlightRecordError:
        return
    assert type(found) in (list, dict, str, int, bool, float, type(None))


OPERATIONS = {operation.name: operation.code.encode("latin-1") for operation in pickletools.opcodes}


@pytest.mark.parametrize(
    "name",
    [
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"),
        *("PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"),
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
    with pytest.raises(FlightRecordError, match=name):
        plain(b"\x80\x02(" + OPERATIONS[name] + arguments.get(name, b"") + b".")


def test_the_number_of_operations_is_limited():
    with pytest.raises(FlightRecordError, match="opcodes"):
        plain(b"\x80\x02]" + b"Na" * MAX_OPERATIONS + b".")
    copies = pickle.dumps([1] * 1000, 2)[:-1] + b"q\x01(" + b"h\x01" * 5000 + b"l."
    with pytest.raises(FlightRecordError):
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


def test_a_pickle_and_a_json_dump_of_torch_give_the_same_record(tmp_path, torch_programs):
    torch_programs.checked(DUMP, str(tmp_path))
    record = parse([(tmp_path / "pickle").read_bytes()])
    assert record == parse([(tmp_path / "json").read_bytes()])
    calls = [step.call.operation for group in record.groups.values() for step in group.steps.values()]
    assert calls == ["all_reduce"] * 3 + ["barrier"]
