"""The engine: everything that users do not import.

It imports nothing of the public packages but the names that ``pyproject.toml`` lists.
"""
