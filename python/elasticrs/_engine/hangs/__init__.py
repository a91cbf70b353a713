"""Finds the ranks that cause a hang, from flight records and stacks. Pure functions without torch."""
