"""Helpers for all tests: waiting for events, processes, the launcher, and a guard against leaks."""
