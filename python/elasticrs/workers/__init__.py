"""What the worker processes of an attempt are: their plan, environment, log files, and shared page."""
