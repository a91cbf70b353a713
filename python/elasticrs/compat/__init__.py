"""What exists for torch's interfaces alone: agents with hooks, handlers and back ends that are polled.

The event-driven agent (:mod:`elasticrs.agent`) does not know of it. Torch's names for these modules, such as
``elasticrs.agent.server.api``, are the modules here: a name that a program patches there is patched.
"""
