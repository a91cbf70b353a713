"""Benchmarks that compare elasticrs with torchrun: ``python -m benchmarks`` or ``make bench``.

One module for each thing measured. Both launchers get the same command line, the same workers and the same
clock (CLOCK_MONOTONIC, one for all processes of a machine), and take turns within one run: a change of
the machine's mood hits both.
"""
