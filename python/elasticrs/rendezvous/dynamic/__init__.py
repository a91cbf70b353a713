"""Settings, shared state, state access and decisions of the dynamic rendezvous. The shared state is kept in a
pluggable back end. :mod:`elasticrs.rendezvous.dynamic_rendezvous` contains the handler.
"""
