"""The elastic rendezvous: which nodes take part in which round, decided by pure functions.

``keys`` and ``records`` say what is in the store, ``messages`` what goes into and comes out of
:func:`elasticrs.rendezvous.elastic.machine.step`. See ``docs/design/rendezvous.md``.
"""
