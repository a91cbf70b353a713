"""Elastic, fault-tolerant launcher and supervisor for PyTorch distributed jobs."""

__version__ = "0.1.0"
