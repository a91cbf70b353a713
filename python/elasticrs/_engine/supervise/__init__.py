"""Runs the workers of a job on one node, restarts them after a failure, and reports how the job ended.

The files in this folder are about one attempt: what was recorded of it, the pure function that leads from one
attempt to the next, and why an attempt failed.
"""
