"""The failure of a worker: its facts, which failure of several was first, and the report of all."""
