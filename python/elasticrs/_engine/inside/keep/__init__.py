"""Keeps the state of a training program in memory that the agent owns, so that it survives the program's
processes. See :class:`elasticrs.Keep`.
"""
