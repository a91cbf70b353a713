"""Elastic rendezvous: a pure state machine (:func:`.step`) that forms rounds and selects the nodes of each
round. See ``docs/design/rendezvous.md``.
"""
