"""The agent's own process: its console, clock, forks, stop signals, and calls that may block."""
