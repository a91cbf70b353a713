"""Answers why a worker failed: the failure and what the worker wrote about it, the root cause among several
failures, and the report. What takes an attempt is in ``supervise.failures``.
"""
