"""Runs the workers of a job on one node, restarts them after a failure, and reports how the job ended."""
