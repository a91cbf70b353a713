"""Decides what the agent of a node does, on one node or several. Most of it is pure."""
