"""Access to the agent's machine and process: clocks, devices, ports, forks, and blocking calls."""
