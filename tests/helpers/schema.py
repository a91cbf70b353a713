"""JSON against the part of JSON Schema that the documents of this project use."""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN = {"title", "description", "type", "enum", "required", "properties", "additionalProperties", "items"}


def schemas(document: str) -> list[dict[str, Any]]:
    """The blocks of JSON of a document, in order."""
    blocks = re.findall(r"```json\n(.*?)```", (DOCS / document).read_text(encoding="utf-8"), re.DOTALL)
    return [json.loads(block) for block in blocks]


def check(value: Any, schema: dict[str, Any], where: str = "it") -> None:
    """Raise an ``AssertionError`` that says where ``value`` is not what the schema says."""
    assert schema.keys() <= _KNOWN, f"this checker knows nothing of {schema.keys() - _KNOWN}"
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        assert any(_is(value, name) for name in names), f"{where} is {value!r}, not {names}"
    if "enum" in schema:
        assert value in schema["enum"], f"{where} is {value!r}, not one of {schema['enum']}"
    if isinstance(value, dict):
        known = schema.get("properties", {})
        missing = set(schema.get("required", ())) - value.keys()
        assert not missing, f"{where} lacks {missing}"
        if schema.get("additionalProperties") is False:
            assert value.keys() <= known.keys(), f"{where} has {value.keys() - known.keys()} as well"
        for name, each in value.items():
            if name in known:
                check(each, known[name], f"{where}.{name}")
            elif isinstance(schema.get("additionalProperties"), dict):
                check(each, schema["additionalProperties"], f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for number, each in enumerate(value):
            check(each, schema["items"], f"{where}[{number}]")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])
