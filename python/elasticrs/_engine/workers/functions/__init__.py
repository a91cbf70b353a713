"""Runs functions as workers: how their processes start, and how results, errors and logs come back."""
