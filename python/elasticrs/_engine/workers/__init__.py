"""Worker processes of one attempt: ranks, addresses, environment, log files, and shared memory page."""
