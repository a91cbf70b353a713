"""The job as the user configured it: options, settings and restart policy. Also texts of messages."""
