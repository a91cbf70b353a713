"""Configuration of the worker processes for one attempt: ranks and addresses, environment, log files, and
shared memory page.
"""
