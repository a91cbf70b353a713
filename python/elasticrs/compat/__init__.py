"""Code that only torch's interfaces need: agents with hooks, and rendezvous handlers and back ends that are
polled.

The event-driven agent (:mod:`elasticrs.agent`) does not use this package. Torch's names for its modules, such
as ``elasticrs.agent.server.api``, refer to the same module objects, so patches under those names take effect
here.
"""
