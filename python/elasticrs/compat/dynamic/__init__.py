"""The rendezvous over a user's own back end: state, decisions, turns. The handler is
:mod:`elasticrs.compat.dynamic_rendezvous`.
"""
