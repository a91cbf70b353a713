"""Parts of the dynamic rendezvous, which keeps its state in a back end that users can supply: the settings,
the shared state, the access to this state, and the decisions of a node. The handler is in
:mod:`elasticrs.rendezvous.dynamic_rendezvous`.
"""
