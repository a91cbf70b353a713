"""Elastic rendezvous: a pure state machine that forms rounds and selects the nodes of each round.

``keys`` and ``records`` define the contents of the store. ``messages`` defines the input and output of the
state machine, :func:`.step`. See ``docs/design/rendezvous.md``.
"""
