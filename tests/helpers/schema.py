"""The JSON schemas in the documentation."""

import json
import re
from pathlib import Path

from jsonschema import Draft202012Validator

DOCS = Path(__file__).resolve().parents[2] / "docs"


def schemas(document: str) -> list[Draft202012Validator]:
    """Return a validator for each JSON block in a document, in order."""
    blocks = re.findall(r"```json\n(.*?)```", (DOCS / document).read_text(encoding="utf-8"), re.DOTALL)
    return [Draft202012Validator(json.loads(block)) for block in blocks]
