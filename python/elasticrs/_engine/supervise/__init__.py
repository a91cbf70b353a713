"""Runs the workers of a job on one node, from the first attempt to the report."""
