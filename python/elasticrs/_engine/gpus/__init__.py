"""Devices of a machine: their number, their health, and the processor cores near them (NUMA)."""
