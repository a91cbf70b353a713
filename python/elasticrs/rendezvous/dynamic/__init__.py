"""Parts of the dynamic rendezvous, whose state is kept in a pluggable back end: settings, shared state, state
access, and a node's decisions. :mod:`elasticrs.rendezvous.dynamic_rendezvous` contains the handler.
"""
