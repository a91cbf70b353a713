"""Helpers for the operating system and the hardware: clocks, devices, forks, node checks, blocking calls."""
