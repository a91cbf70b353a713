"""Tests for Xids: how kernel log records are parsed, and which action each Xid requires."""

import json
import re
from pathlib import Path

import pytest

from elasticrs._engine.gpus import xids
from elasticrs._engine.gpus.xids import Xid, meaning, parse

CATALOG = json.loads((Path(xids.__file__).parent / "xids.json").read_text())
HERE = (0, 0, 6)


@pytest.mark.parametrize(
    ("record", "code", "pid", "detail"),
    [
        (
            "4,360,28078015,c;NVRM: Xid (PCI:0000:00:06): 31, pid=462, name=python3, channel 0x0000000a, intr"
            " 00000000. MMU Fault: ENGINE GRAPHICS",
            31,
            462,
            "channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS",
        ),
        (
            "4,361,30730230,c;NVRM: Xid (PCI:0000:00:06): 13, Graphics SM Warp Exception on (GPC 1, TPC 4,"
            " SM 0): Misaligned Address\n SUBSYSTEM=pci",
            13,
            None,
            "Graphics SM Warp Exception on (GPC 1, TPC 4, SM 0): Misaligned Address",
        ),
        (
            "NVRM: Xid (PCI:0000:00:06): 43, pid=510, name=python3, channel 0x0000000a",
            43,
            510,
            "channel 0x0000000a",
        ),
        (
            "NVRM: Xid (PCI:0000:00:06): 79, pid='<unknown>', name=<unknown>, GPU is lost",
            79,
            None,
            "GPU is lost",
        ),
        ("NVRM: Xid (0000:00:06): 14, Channel 00000001", 14, None, "Channel 00000001"),
        ("NVRM: Xid (PCI:0000:00:06 GPU-I:05): 45, pid=7, name=a b, Ch 00000010", 45, 7, "Ch 00000010"),
        ("NVRM: Xid (PCI:0000:00:06): 62", 62, None, ""),
    ],
)
def test_xid_records_in_the_kernel_log_are_parsed(record, code, pid, detail):
    found = parse(record)
    assert (found.address, found.code, found.pid, found.detail) == (HERE, code, pid, detail)


@pytest.mark.parametrize(
    "record",
    ["", "NVRM: GPU at PCI:0000:00:06: GPU-37c6", "nvidia: Xid 31", "NVRM: Xid (PCI:zz): 31", "NVRM: Xid ("],
)
def test_other_kernel_log_records_are_ignored(record):
    assert parse(record) is None


def test_a_long_xid_detail_is_cut():
    assert len(parse(f"NVRM: Xid (PCI:0000:00:06): 31, {'x' * 100_000}").detail) <= 200


def test_gpu_addresses_from_nvml_and_the_kernel_log_are_parsed_alike():
    assert xids.address_of("00000000:00:06.0") == parse("NVRM: Xid (PCI:0000:00:06): 31").address
    assert xids.address_of("0001:AF:10.0") == (1, 0xAF, 16)


def test_the_xid_catalog_is_consistent():
    assert CATALOG["source"].startswith("https://docs.nvidia.com/")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", CATALOG["date"])
    seen = []
    for entry in CATALOG["xids"]:
        for part in entry["codes"].split(","):
            first, _, last = part.partition("-")
            seen += range(int(first), int(last or first) + 1)
        rules = [entry.get(name, {}) for name in ("by_severity", "by_unit", "by_subcode", "by_announcement")]
        actions = [*filter(None, [entry.get("action")]), *(each for rule in rules for each in rule.values())]
        assert set(actions) <= set(CATALOG["actions"])
        assert actions
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("code", "detail", "action"),
    [
        (13, "", "restart"),
        (31, "", "restart"),
        (94, "", "restart"),
        (45, "", "earlier"),
        (48, "", "reset"),
        (95, "", "reset"),
        (119, "", "reset"),
        (79, "", "reboot"),
        (63, "", "ignore"),
        (43, "", "ignore"),
        (54, "", "support"),
        (2, "", "support"),
        (4096, "", "support"),
        (145, "RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x00000000)", "reset"),
        (145, "RLW_REMAP Nonfatal XC0 i0 Link 02 (0x00000004 0x00000001)", "restart"),
        (145, "RLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000003 0x80000000)", "ignore"),
        (149, "NETIR_LINK_DOWN Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)", "reset"),
        (149, "NETIR_LINK_DOWN Fatal XC0 i0 Link 08 (0x026001c6 0x00000000)", "ignore"),
        (149, "NETIR_LINK_DOWN Fatal", "reset"),
        (150, "MSE_WATCHDOG Fatal", "reset"),
        (144, "", "driver"),
        (147, "another text", "driver"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "reset"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "reboot"),
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "ignore"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x63", "driver"),
        (154, "", "driver"),
    ],
)
def test_the_code_and_sometimes_the_detail_of_an_xid_decide_the_action(code, detail, action):
    assert meaning(code, detail).action == action


def test_an_xid_note_names_the_gpu_the_process_and_the_action():
    note = Xid(31, 2, 1, (462,)).note()
    assert note.startswith("Xid 31 (GPU 2, pid 462): illegal memory access")
    assert note.endswith("restart here")
    assert "pids 1, 2, 3 times" in Xid(13, 0, 3, (1, 2)).note()
