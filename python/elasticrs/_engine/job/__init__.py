"""The job as the user configured it: options, settings, ranks, restart policy. Also the texts of messages."""
