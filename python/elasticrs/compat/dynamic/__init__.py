"""The rendezvous over a user's own back end: state, decisions, turns. The handler is
:mod:`elasticrs.rendezvous.dynamic_rendezvous`.
"""
