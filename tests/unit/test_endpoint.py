"""Tests of endpoints in the user's format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.job.config import UsageError
from elasticrs._engine.nodes.transport.addresses import parse_endpoint


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("host", ("host", None)),
        ("host:1", ("host", 1)),
        ("node-1.cluster.:0", ("node-1.cluster.", 0)),
        ("10.0.0.1:29400", ("10.0.0.1", 29400)),
        ("[::1]", ("::1", None)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_endpoints_are_split_into_host_and_port(endpoint, expected):
    assert parse_endpoint("--rdzv-endpoint", endpoint) == expected


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "host:", "host:x", "host:65536", "host:-1", "host:²", "host:" + "0" * 5000, "ho st:1"),
        *("[::1", "[]:1", "[::1]80", "[host]:1", "[10.0.0.1]:1", "a=b:1", "a/b", "h]:1", ":1"),
    ],
)
def test_malformed_endpoints_are_refused(endpoint):
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: got '.*', expected HOST\[:PORT\]$"):
        parse_endpoint("--rdzv-endpoint", endpoint)


def test_an_ipv6_address_without_brackets_gets_a_hint():
    with pytest.raises(UsageError, match=r"^endpoint: got 'fd00::1'.* \[fd00::1\]$"):
        parse_endpoint("endpoint", "fd00::1")
    with pytest.raises(UsageError, match=r"\[fd00::1\]:29400$"):
        parse_endpoint("endpoint", "fd00::1:29400")


names = st.from_regex(r"[A-Za-z0-9_.-]{1,40}", fullmatch=True)
addresses = st.ip_addresses(v=6).map(str)
ports = st.integers(0, 65535)


@given(names | addresses, st.none() | ports)
def test_a_formatted_endpoint_parses_to_the_same_host_and_port(host, port):
    text = f"[{host}]" if ":" in host else host
    assert parse_endpoint("x", text if port is None else f"{text}:{port}") == (host, port)


@given(st.text(max_size=30) | st.text("[]:019afx.%", max_size=30))
def test_any_text_is_parsed_or_refused_with_a_one_line_error(text):
    line = None
    try:
        host, port = parse_endpoint("x", text)
    except UsageError as error:
        line = str(error)
    if line is not None:
        assert len(line.splitlines()) == 1
    else:
        assert host
        assert port is None or 0 <= port < 2**16
