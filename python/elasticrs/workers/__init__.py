"""Description of an attempt's worker processes: plan, environment, log files, and shared memory page."""
