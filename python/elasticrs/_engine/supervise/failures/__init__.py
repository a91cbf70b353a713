"""Explains a failure: which worker failed first, why, and who kept the others waiting."""
