"""The agent: one per node, decides what happens to the workers."""
