"""Elastic rendezvous, which forms rounds and selects the participating nodes. Pure functions make the
decisions.

``keys`` and ``records`` define the contents of the store. ``messages`` defines the input and output of the
state machine, :func:`elasticrs.rendezvous.elastic.machine.step`. See ``docs/design/rendezvous.md``.
"""
