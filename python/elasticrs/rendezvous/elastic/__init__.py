"""Elastic rendezvous, which forms rounds and selects the nodes of each round. The state machine is a pure
function.

``keys`` and ``records`` define the contents of the store. ``messages`` defines the input and output of the
state machine, :func:`elasticrs.rendezvous.elastic.machine.step`. See ``docs/design/rendezvous.md``.
"""
