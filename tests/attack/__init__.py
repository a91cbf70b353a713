"""Tests that take minutes: hangs of every kind, programs that misbehave, hostile clients.

``make attack`` runs them.
"""
