"""Describe the worker processes of an attempt: their plan, environment, log files, and shared memory page."""
