"""Checks of elasticrs on a machine with a GPU: ``make test-gpu``, or ``python -m tests.gpu_kit --help``.

The kit needs the standard library, torch, and an installed elasticrs or its wheel. It needs no pytest, no
Rust and no network, so it runs on a bare machine. With ``--device cpu`` the same programs run with gloo.
"""
