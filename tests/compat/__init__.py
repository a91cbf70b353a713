"""Tests of compatibility with the installed torch."""
