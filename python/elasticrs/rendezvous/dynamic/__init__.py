"""Parts of the rendezvous that uses a back end supplied by the user: the settings, the shared state, the
access to this state, and the decisions of a node. The handler is in
:mod:`elasticrs.rendezvous.dynamic_rendezvous`.
"""
