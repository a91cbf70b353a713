"""Tests that take minutes, for hangs of every kind, misbehaving programs and hostile clients.

``make attack`` runs them.
"""
