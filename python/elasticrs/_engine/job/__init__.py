"""The job as the user configured it: options, settings, restart policy. Also the texts of messages."""
