"""Tests of two decisions of a worker: whether the exit of another rank may have caused its exception, and
which member represents an exception group.
"""

import builtins
import ctypes
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside.error_file import failure_facts, origin, representative
from elasticrs.errors import NonRetryable

CLOSED = "[pair.cc:534] Connection closed by peer [10.0.0.2]:4242"
GLOO = [
    CLOSED,
    "[pair.cc:525] readv [10.0.0.2]:4242: Connection reset by peer",
    "[pair.cc:446] writev [10.0.0.2]:4242: Broken pipe",
    "[pair.cc:812] Socket closed [10.0.0.2]:4242",
    "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "[pair.cc:175] Application timeout caused pair closure",
]


def exception_type(name, module, *bases):
    return type(name, bases or (RuntimeError,), {"__module__": module})


DistBackendError = exception_type("DistBackendError", "torch.distributed")
DistNetworkError = exception_type("DistNetworkError", "torch.distributed")
DistStoreError = exception_type("DistStoreError", "torch.distributed")
DistQueueEmptyError = exception_type("DistQueueEmptyError", "torch.distributed")
OutOfMemoryError = exception_type("OutOfMemoryError", "torch")
AcceleratorError = exception_type("AcceleratorError", "torch")


def raised(error):
    """Return an exception that a ``raise`` statement has raised."""
    try:
        raise error
    except BaseException as caught:
        return caught


def native(text, kind=RuntimeError, caller="__main__"):
    """Return an exception that native code has raised.

    Args:
        text: text of the exception.
        kind: type of the exception.
        caller: name of the module that called the native code.
    """
    names = {"__name__": caller, "call": ctypes.pythonapi.PyErr_SetString}
    exec("def f(kind, text): call(kind, text)", names)
    try:
        names["f"](ctypes.py_object(kind), text.encode())
    except kind as caught:
        return caught


def caused_by(error, cause, **known):
    error.__cause__ = cause
    for name, value in known.items():
        setattr(error, name, value)
    return raised(error)


def while_handling(error, handled, *, is_suppressed=False):
    error.__context__, error.__suppress_context__ = handled, is_suppressed
    return error


PEER = [
    *(native(text, caller="torch.distributed.distributed_c10d") for text in GLOO),
    native(CLOSED, caller="torch.autograd.graph"),
    native(CLOSED, caller="torch.nn.parallel.distributed"),
    native(CLOSED),
    native("NCCL error: remote process exited", DistBackendError, "torch.distributed.distributed_c10d"),
    native("failed to recv, got 0 bytes", DistNetworkError),
    raised(DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cuda//timeout_dump")),
    raised(ConnectionResetError(104, "Connection reset by peer")),
    raised(BrokenPipeError(32, "Broken pipe")),
    raised(exception_type("RemoteDisconnected", "http.client", ConnectionResetError)("no response")),
    caused_by(ValueError("the step failed"), native(CLOSED)),
    while_handling(raised(KeyError("loss")), native(CLOSED)),
]
UNKNOWN = [
    native("Detected mismatch between collectives on ranks", caller="torch.distributed.distributed_c10d"),
    native("CUDA error: unspecified launch failure", AcceleratorError),
    raised(ConnectionRefusedError(111, "Connection refused")),
    raised(TimeoutError(110, "Connection timed out")),
    raised(EOFError()),
    raised(DistQueueEmptyError()),
    raised(exception_type("CalledProcessError", "subprocess", Exception)("exit status 1")),
    while_handling(raised(ValueError("the step failed")), native(CLOSED), is_suppressed=True),
]
OWN = [
    # These texts match a lost peer, but the type of the exception and the code that raised it do not.
    *(raised(kind(text)) for kind in (ValueError, RuntimeError, OSError) for text in GLOO),
    native(CLOSED, caller="torch.nn.functional"),
    native("mat1 and mat2 shapes cannot be multiplied", caller="torch.nn.modules.linear"),
    native("CUDA out of memory", OutOfMemoryError),
    native("maximum recursion depth exceeded", RecursionError),
    native("not there", NotImplementedError),
    raised(NonRetryable("bad config")),
]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (error, found)
        for found, errors in (("peer", PEER), ("unknown", UNKNOWN), ("own", OWN))
        for error in errors
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:60],
)
def test_types_and_the_code_that_raised_decide_whether_a_peer_may_be_the_cause(error, found):
    assert origin(error) == found
    assert failure_facts(error)["is_lost_peer"] is (found == "peer")


needs_groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups need Python 3.11")


def group(*members):
    return builtins.ExceptionGroup("failed", list(members))


@needs_groups
@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([ConnectionResetError(), KeyError("label"), ValueError("x")], KeyError),
        ([ConnectionResetError(), TimeoutError()], ConnectionResetError),
        ([KeyError("label"), NonRetryable("bad config")], NonRetryable),
        ([ValueError("x"), DistNetworkError()], ValueError),
    ],
)
def test_the_representative_of_a_group_is_a_member_that_is_no_side_effect(members, told):
    for ordered in (members, members[::-1]):
        found, _, more = representative(raised(group(*ordered)))
        assert type(found) is told
        assert more == len(members) - 1


@needs_groups
@pytest.mark.parametrize(
    ("members", "found"),
    [
        ([ConnectionResetError(), DistNetworkError()], "peer"),
        ([ConnectionResetError(), KeyError("label")], "unknown"),
        ([ValueError("x"), KeyError("label")], "own"),
    ],
)
def test_a_group_follows_from_a_peer_only_if_all_members_do(members, found):
    assert origin(raised(group(*members))) == found


LEAVES = st.sampled_from([KeyError, ValueError, ConnectionResetError, TimeoutError, NonRetryable]).map(
    lambda kind: kind("x")
)
GROUPS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda members: group(*members))
)


def leaves(error):
    members = getattr(error, "exceptions", ())
    return [leaf for member in members for leaf in leaves(member)] if members else [error]


def reversed_group(error):
    members = getattr(error, "exceptions", ())
    return group(*map(reversed_group, members[::-1])) if members else error


@needs_groups
@given(GROUPS)
def test_the_representative_is_a_leaf_and_does_not_depend_on_the_order(error):
    found, _, more = representative(error)
    every = leaves(error)
    assert any(found is each for each in every)
    assert more == len(every) - 1
    assert type(representative(reversed_group(error))[0]) is type(found)
    is_marked = any(isinstance(each, NonRetryable) for each in every)
    assert isinstance(found, NonRetryable) == is_marked


def test_an_exception_that_contains_itself_is_described():
    error = ValueError("x")
    error.exceptions = (error,)
    assert representative(error)[0] is error
    assert origin(error) == "own"
