"""Assertions about printed lines. They check only the tokens that carry facts, so that messages can be
reworded.
"""


def has(text: str, *tokens: str) -> bool:
    """Return true if the text contains these tokens in this order."""
    end = 0
    for token in tokens:
        start = text.find(token, end)
        if start < 0:
            return False
        end = start + len(token)
    return True


def says(text: str, *tokens: str) -> None:
    """Assert that the text contains these tokens in this order."""
    assert has(text, *tokens), f"no {tokens} in this order in:\n{text}"


def line_with(text: str, *tokens: str) -> str:
    """Return the only line that contains these tokens in this order."""
    found = [line for line in text.splitlines() if has(line, *tokens)]
    assert len(found) == 1, f"{len(found)} lines have {tokens} in this order:\n{text}"
    return found[0]
