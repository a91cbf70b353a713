"""Carries out the decisions: the agent's loop, its workers, and the signals to them."""
