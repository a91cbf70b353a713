"""Access the machine and the process that the agent runs in: clocks, devices, ports, forks, and blocking
calls.
"""
