"""Finds out why a worker failed: its failure, the root cause among several failures, and the report."""
