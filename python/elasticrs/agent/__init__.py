"""The agent of one node: it starts the workers, watches them, and decides what follows.

:mod:`~elasticrs.agent.state` decides, :mod:`~elasticrs.agent.loop` carries out. The classes that users
subclass are in :mod:`elasticrs.agent.server`.
"""
