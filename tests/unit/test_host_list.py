"""Host lists in Slurm's format. The tests in tests/slurm compare them with Slurm's own program."""

import pytest
from helpers.host_lists import host_lists
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.cli.schedulers import MAX_HOSTS, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[1-3,7]-ib[0-1],login", "node1-ib0 node1-ib1 node2-ib0 node2-ib1 node3-ib0 node3-ib1 "
         "node7-ib0 node7-ib1 login"),
        ("n[001-003,10]", "n001 n002 n003 n10"),
        ("n[01-3]", "n01 n02 n03"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("x[1-2][3-4]", "x13 x14 x23 x24"),
        ("g[10,9,8]", "g10 g9 g8"),
        ("a,b[1-2],c.example", "a b1 b2 c.example"),
        # Slurm itself neither writes nor accepts text after the last bracket.
        ("b[1-2].example", "b1.example b2.example"),
    ],
)  # fmt: skip
def test_host_lists_are_expanded(text, hosts):
    assert expand(text) == hosts.split()


@given(host_lists())
def test_a_host_list_is_expanded_in_its_order(made):
    text, hosts = made
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a,", "a b", "c:9", "n[", "n[1-", "n]", "n[]", "n[1,,2]", "n[3-1]", "n[a-b]",
     "n[1-2,4-]", "n[1[2]]", "n[1-2-3]", "n[-1]", "n[1 - 2]", f"n[0-{MAX_HOSTS}]", "n[0-9999][0-9999]",
     "n[1-99999999999999999999]", f"n[{'9' * 5000}]", "n[" + ",".join(["0-999999"] * 1000) + "]"],
)  # fmt: skip
def test_malformed_host_lists_are_refused(text):
    with pytest.raises(ValueError, match="host list"):
        expand(text)


@given(st.text(alphabet="an1290,-[] \u0663", max_size=16))
def test_any_text_is_expanded_or_refused(text):
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert hosts
    assert all(hosts)
