"""Rendezvous over a user's own back end: its state, decisions and turns. The handler is in
:mod:`elasticrs.rendezvous.dynamic_rendezvous`.
"""
