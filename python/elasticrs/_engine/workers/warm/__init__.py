"""Warm start (``--warm``): modules are imported once, by the process from which the workers are forked."""
