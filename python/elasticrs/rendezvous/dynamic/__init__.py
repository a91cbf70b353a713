"""Rendezvous over a back end that the user supplies: its settings, shared state, decisions, and access to the
state. The handler is in :mod:`elasticrs.rendezvous.dynamic_rendezvous`.
"""
