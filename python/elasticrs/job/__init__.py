"""Description of the requested job: options, settings, ranks, and restart budget."""
