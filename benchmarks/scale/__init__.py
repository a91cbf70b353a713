"""Cost of a rendezvous with many agents.

A lightweight agent is one real connection of the native client and the shipped decisions
(:mod:`.machine`); only its workers are imitated: they start and end at once.
Many agents share a process, one thread of Python and one thread of Rust; the store has a process of its own,
and so has the agent that leads, so that their costs can be told from those of the imitation.
"""
