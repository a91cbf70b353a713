"""Elastic rendezvous: it forms rounds, and selects the nodes that take part in each round. The decisions are
pure functions.

``keys`` and ``records`` define the contents of the store. ``messages`` defines the input and output of the
state machine, :func:`elasticrs.rendezvous.elastic.machine.step`. See ``docs/design/rendezvous.md``.
"""
