"""Tests for records, whose annotations declare their fields."""

from __future__ import annotations

import copy
import pickle
from dataclasses import KW_ONLY  # noqa: TC003 -- an annotation
from typing import ClassVar

import pytest

from elasticrs._engine.job.value import Record, Value, fresh, shared_fields


class Point(Value):
    dimensions: ClassVar[int] = 2
    x: int
    y: int = 0
    _: KW_ONLY
    names: list[str] = fresh(factory=list)
    colour: str | None = None


class Above(Point):
    z: int = 7


class Empty(Value):
    pass


class Count(Record):
    done: int
    seen: list[int] = fresh(factory=list)


class Checked(Record):
    size: int

    def __init__(self, text: str) -> None:
        self.size = len(text)


def test_record_fields_are_set_by_position_by_name_or_by_default():
    assert Point(1, 2, colour="red") == Point(x=1, y=2, names=[], colour="red")
    assert repr(Point(1)) == "Point(x=1, y=0, names=[], colour=None)"
    assert (Above(1, 2, 3).z, Above(1).z, Above(1, names=["a"]).names) == (3, 7, ["a"])
    assert Count(1, [2]).values() == (1, [2])
    assert Empty() == Empty()


@shared_fields
class Style:
    __slots__ = ()

    colour: str = "red"
    width: float = 1.0


class Line(Record, Style):
    length: int
    width: float = 2.0


class Dot(Value, Style):
    x: int
    _: KW_ONLY
    y: int = 0


def test_declared_fields_are_keyword_only_fields_of_records():
    assert repr(Line(3)) == "Line(length=3, width=2.0, colour='red')"
    assert repr(Dot(1, width=4.0)) == "Dot(x=1, y=0, colour='red', width=4.0)"
    assert Dot(1, colour="blue") == Dot(1).replaced(colour="blue") != Dot(1)
    assert Dot.defaults() == {"colour": "red", "width": 1.0, "y": 0}
    assert not hasattr(Line(3), "__dict__")
    with pytest.raises(TypeError, match="got 3 values for 2 fields"):
        Line(3, 1.0, "blue")


def test_taken_from_copies_fields_from_another_object():
    line = Line(3, width=5.0)
    assert Dot.taken_from(line, x=1, colour="blue") == Dot(1, width=5.0, colour="blue")
    with pytest.raises(TypeError, match="missing: x"):
        Dot.taken_from(line)
    with pytest.raises(TypeError, match="unknown"):
        Dot.taken_from(line, x=1, z=2)


def test_mutable_defaults_are_not_shared_between_records():
    Point(1).names.append("a")
    assert Point(1).names == []
    assert Count(1).seen is not Count(1).seen


@pytest.mark.parametrize(
    ("args", "given", "word"),
    [
        ((), {}, "missing: x"),
        ((1, 2, 3), {}, "3 values for 2 fields"),
        ((1,), {"x": 1}, "x"),
        ((1,), {"depth": 1}, "depth"),
        ((1,), {"dimensions": 3}, "dimensions"),
    ],
)
def test_invalid_record_arguments_are_named(args, given, word):
    with pytest.raises(TypeError, match=word):
        Point(*args, **given)


def test_replaced_copies_a_record_with_changed_fields():
    point = Point(1, 2, names=["a"])
    assert point.replaced(y=3) == Point(1, 3, names=["a"])
    assert point.fields() == {"x": 1, "y": 2, "names": ["a"], "colour": None}
    assert point.values() == (1, 2, ["a"], None)


def test_values_compare_by_type_and_fields_but_records_by_identity():
    assert Point(1, names=()) == Point(1, names=())
    assert hash(Point(1, names=())) == hash(Point(1, names=()))
    assert Point(1) != Point(2)
    assert Point(1) != Above(1)
    assert Count(1) != Count(1)


def test_only_fields_of_a_record_can_be_assigned():
    count = Count(1)
    count.done = 2
    assert count.done == 2
    with pytest.raises(AttributeError):
        count.other = 1
    assert Checked("abc").size == 3


def test_copied_and_unpickled_values_are_equal():
    point = Point(1, colour="red")
    assert copy.copy(point) == pickle.loads(pickle.dumps(point)) == point
